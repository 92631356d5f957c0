"""Given: what the ranks do for a check: they run a learner's program, and note what it does.

What is noted stands behind the services that a program is handed, out of its reach.
"""

import functools
import math
import sys
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.support.profiling.machine import SERVICES, Machine, Troubles, weights_of
from utils.course.assertions import Wrong
from utils.measure.traffic import Event, Traffic, Watching

HOT = 90.25  # °C
MEETING = ("set", "get", "multi_set", "multi_get", "queue_push", "queue_pop", "add", "append",
           "compare_set", "wait", "check", "barrier")  # of a store
ENDING = 2.0  # seconds that a thread may go on when train has returned


@dataclass(frozen=True)
class Case:
    """A run of a program.

    hot: the step from which on the machine is HOT; saving: seconds that a checkpoint takes, unless
    the program is two steps further before.
    """

    widths: tuple[int, ...]
    seed: int
    steps: int
    troubles: Troubles = field(default_factory=Troubles)
    hot: float = math.inf
    saving: float = 0.0

    def machine(self, rank: int, ranks: int, kind: type[Machine] = Machine) -> Machine:
        """Of a rank."""
        return kind(rank, ranks, self.widths, self.seed, troubles=self.troubles)


class Handed(SimpleNamespace):
    """What a program gets for its machine."""


def handed(machine: Machine, *services: str) -> Handed:
    """Who the rank is, and these services of its machine."""

    def ask(name):
        return lambda *args, **keywords: getattr(machine, name)(*args, **keywords)

    known = {name: getattr(machine, name) for name in ("rank", "ranks", "widths", "leader")}
    return Handed(**known, **{name: ask(name) for name in services})


class Messages(Traffic):
    """Counts on threads that start inside, too, and who meets the others by a store."""

    def __enter__(self):
        self._outside = (
            threading.getprofile(),
            {name: getattr(dist.Store, name) for name in MEETING},
        )
        threading.setprofile(self._begin)
        for name, function in self._outside[1].items():
            setattr(dist.Store, name, self._noted(function, name))
        return super().__enter__()

    def __exit__(self, *exception):
        threading.setprofile(self._outside[0])
        for name, function in self._outside[1].items():
            setattr(dist.Store, name, function)
        return super().__exit__(*exception)

    def _begin(self, *_):
        """At the first call on a new thread."""
        sys.setprofile(None)
        Watching(self.saw).__enter__()

    def _noted(self, function, name):
        @functools.wraps(function)
        def call(store, *args, **keywords):
            found = function(store, *args, **keywords)
            if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
                size = _length([*args[1:], *keywords.values(), found])  # without the key
                self.events.append(Event(f"store.{name}", size, size, 0, False))
            return found

        return call

    def without_weights(self) -> int:
        """Bytes that were handed over, but for weights that are sent at the beginning."""
        return self.payload() - self.payload("broadcast")

    def seen(self) -> list[tuple[str, float, str, int | None]]:
        """(operation, bytes that this rank sends, the group if all ranks are in it, then also the
        rank that receives a message from one to another) of each."""
        found = []
        for event in self.events:
            whole = event.group_size == dist.get_world_size()
            to = event.peer if event.op == "send" else dist.get_rank()
            found.append(
                (event.op, float(event.sent), event.group if whole else "", to if whole else None)
            )
        return found


def slow(answer, case: Case) -> dict:
    """A run of `train`: what it returns, sends, and asks of the machine."""
    with Messages() as messages:
        machine = case.machine(dist.get_rank(), dist.get_world_size(), _Slow)
        machine.case, machine.sent = case, messages.without_weights
        given = handed(machine, "read", *SERVICES)
        try:
            losses = _numbers(answer.train(given, case.steps, machine.after))
        except RuntimeError:
            if not machine.seen_hot:
                raise
            losses = None
        return {
            "losses": losses,
            "weights": list(machine.weights),
            "events": messages.seen(),
            "calls": dict(machine.calls),
            "saved": dict(machine.saved),
            "lines": [str(line) for line in machine.lines],
            "looked_at": list(machine.looked_at),
            "unseen": machine.unseen,
        }


class _Slow(Machine):
    """A machine that can be hot, and whose checkpoints take time. weights: after each step; unseen:
    bytes that were handed over before the first look."""

    def __init__(self, *args, **keywords):
        super().__init__(*args, **keywords)
        self.weights, self.unseen, self.seen_hot = [], 0, False
        self.moved = threading.Condition()

    def after(self, model: nn.Module) -> None:
        with self.moved:
            self.weights.append(weights_of(model))
            self.moved.notify_all()

    def temperature(self, step):
        if not self.looked_at:  # at the beginning, weights may be sent
            self.unseen = self.sent()
        found = super().temperature(step)
        self.seen_hot |= step >= self.case.hot
        return HOT if step >= self.case.hot else found

    def save(self, step, model):
        steps = len(self.weights)
        with self.moved:
            self.moved.wait_for(lambda: len(self.weights) > steps + 1, self.case.saving)
        super().save(step, model)


def hanging(answer, case: Case) -> dict:
    """A run of `train`: the rows that it returns, and how many threads it leaves."""
    with Messages() as messages:
        machine = case.machine(dist.get_rank(), dist.get_world_size())
        given = handed(machine, "rows", "asked_to_stop", "metrics", "score")
        before = set(threading.enumerate())
        rows = answer.train(given, case.steps)
        left = set(threading.enumerate()) - before
        for thread in left:
            thread.join(ENDING)
        if not isinstance(rows, list | tuple) or not all(isinstance(r, dict) for r in rows):
            raise Wrong("train does not return a list of dictionaries, one for each step.")
        rows = [{str(k): _number(v) for k, v in row.items()} for row in rows]
        threads = sum(thread.is_alive() for thread in left)
        return {"rows": rows, "events": messages.seen(), "threads": threads}


def wrong(answer, case: Case) -> dict:
    """A run of `train`: the losses, the weights that each step began with, and those that were left
    in the end."""
    weights = []
    with Messages() as messages:
        machine = case.machine(dist.get_rank(), dist.get_world_size())
        watching = functools.partial(_Weights, weights)
        losses = _numbers(answer.train(handed(machine, "rows"), case.steps, watching))
        weights = [*weights[:-1], *(weights_of(model) for _, model in weights[-1:])]
        return {"losses": losses, "weights": weights, "events": messages.seen()}


class _Weights:
    """Keeps a model's weights at the first forward pass of each step in `kept`, and in the end
    (None, the model)."""

    def __init__(self, kept: list, model: nn.Module):
        self._kept, self._model, self._new = kept, model, True

    def __enter__(self):
        self._handle = self._model.register_forward_pre_hook(lambda *_: self._keep())
        return self

    def __exit__(self, *exception):
        self._handle.remove()
        self._kept.append((None, self._model))

    def step(self) -> None:
        """As `Watch.step`."""
        self._new = True

    def _keep(self):
        if self._new:
            self._kept.append(weights_of(self._model))
        self._new = False


def _length(value: Any) -> int:
    """Bytes of the texts in nested lists."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return sum(map(_length, value)) if isinstance(value, list | tuple) else 0


def _numbers(losses: Any) -> list[float]:
    if not isinstance(losses, (list, tuple, torch.Tensor)):
        raise Wrong(f"train returns a {type(losses).__name__}, not the list of the losses.")
    return [_number(loss) for loss in losses]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"train returns a {type(value).__name__} where a number should be.") from None
