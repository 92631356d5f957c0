"""Given: what becomes of the ranks in a run: who is killed, stopped, late, or loses a connection.

`Fates` stands around everything that a rank does with others: a rank dies where its case says, by
SIGKILL, in the middle of what it was about to do.

A collective that *fails* is complete on the other ranks, and ends with an error on this one, its
tensors half done: so it goes when a rank dies that has sent all to one neighbour, and not to the
other.
"""

import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from labs.support.fault_tolerance.crew import weights_of
from utils.measure.traffic import Event, Traffic, tensors_in

COLLECTIVES = (
    "allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base",
    "allgather_coalesced", "all_gather_single", "allgather_into_tensor_coalesced", "reduce",
    "gather", "scatter", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource", "barrier",
    "monitored_barrier",
)
STORE = ("set", "get", "multi_set", "multi_get", "queue_push", "queue_pop", "add", "append",
         "compare_set", "wait", "check", "delete_key", "num_keys", "barrier")
# those whose first argument is written to
RESULTS = ("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base",
           "all_gather_single", "alltoall", "alltoall_base", "all_to_all_single",
           "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single")
NEW_GROUPS = 12  # who makes more than these makes them again and again
IN_A_RECOVERY = ("meeting", "handing over")
WORDS = {
    "start": "before the first step",
    "rows": "at the beginning of step {}",
    "before": "before a collective of step {}",
    "during": "in a collective of step {}",
    "after": "at the end of step {}",
    "meeting": "in the meeting after step {} was begun",
    "handing over": "in the new group after step {} was begun",
}
ACTS = {  # of one rank, of several
    "dies": ("is killed", "are killed"),
    "stops": ("is stopped until the others have gone on,", "are stopped until the others go on,"),
    "waits": ("comes late", "come late"),
    "fails": ("loses its connection", "lose their connections"),
}


@dataclass(frozen=True)
class Fate:
    """What becomes of one rank.

    act: "dies", "stops" (until the others have gone on), "waits" (`seconds`), "fails" (a collective
    of this rank, and not of the others).
    moment: "start": in the first meeting, at access `count` to the store; in a step: "rows",
    "before" or "during" (then for `seconds`) the collective at `share` of all that a step has,
    "after"; in the recovery of this step or of a later one: "meeting", after `share` of the crew's
    patience, "handing over", at collective number `count`.
    Where the recovery is over without it, it comes at the next step.
    """

    act: str
    moment: str
    step: int = 0
    share: float = 0.0
    count: int = 0
    seconds: float = 0.0

    def of(self, ranks: Sequence[int]) -> str:
        """ "rank 2 is killed at the end of step 3"."""
        many = len(ranks) > 1
        when = WORDS[self.moment].format(self.step)
        if self.act == "fails" and self.moment == "before":
            when = f"in the last collective of step {self.step}"
        return f"rank{'s' * many} {', '.join(map(str, ranks))} {ACTS[self.act][many]} {when}"


class NoEnd(BaseException):
    """Groups are made again and again. No Exception: an answer catches those."""


class Fates(Traffic):
    """Inside `with`, this rank's fates come.

    told: for its `Crew`; patience: of the crew; wake: called after each step, with its number.
    notes: [(seconds, what, …)]: ("losses", step, rows), ("after", step, weights, loss),
    ("failed",), ("recovered", collectives that it took).
    """

    def __init__(self, fates: Iterable[Fate], patience: float, wake: Callable[[int], None]):
        super().__init__()
        self._fates, self._patience, self._wake = list(fates), patience, wake
        self.notes: list[tuple] = []
        self._step = -1  # that was begun last
        self._begun: float | None = None  # when the recovery began that goes on
        self._recoveries: list[int] = []  # the step before each
        self._fresh = True  # something may fail that has not been part of a failure
        self._collectives = self._usual = self._accesses = self._groups = 0
        self._lock = threading.RLock()  # an answer may have threads

    # --- what is watched

    def __enter__(self):
        self._outside = []
        for owner in (dist.ProcessGroup, dist.ProcessGroupGloo):
            for name in COLLECTIVES:
                if hasattr(owner, name):
                    self._patch(owner, name, functools.partial(self._collective, owner, name))
        for name in STORE:
            if hasattr(dist.Store, name):
                self._patch(dist.Store, name, functools.partial(self._access, name))
        for name in ("init_process_group", "new_group"):
            self._patch(dist, name, self._new_group)
        return super().__enter__()

    def __exit__(self, *exception):
        for owner, name, function in reversed(self._outside):
            setattr(owner, name, function)
        return super().__exit__(*exception)

    def _patch(self, owner, name, around):
        function = getattr(owner, name)
        self._outside.append((owner, name, function))

        @functools.wraps(function)
        def call(*args, **keywords):
            return around(function, *args, **keywords)

        setattr(owner, name, call)

    def told(self, what: str, step: int, *more: Any) -> None:
        """The crew was asked for losses, or told of a step."""
        if what == "losses":
            self._begins(step)
            self._note(what, step, *more)
            self._meets("rows", step)
            return
        model, loss = more
        self._note(what, step, weights_of(model), loss)
        self._meets("after", step)
        self._wake(step)

    def _begins(self, step):
        """A step begins, or a part of one: no recovery goes on."""
        with self._lock:
            again = self._begun is None and step == self._step and self._collectives > 0
            for fate in [f for f in self._fates if f.moment in (*IN_A_RECOVERY, "start")]:
                over = self._recovered(fate) or (again and step >= fate.step)
                if over or step > fate.step + 1 or fate.moment == "start":
                    self._comes(fate)
            if step != self._step:
                if self._step >= 0 and self._begun is None:
                    self._usual = self._collectives
                self._step = step
            elif self._begun is None and not again:
                return
            if self._begun is not None:
                self._note("recovered", self._collectives)
            self._begun, self._collectives = None, 0

    def _collective(self, owner, name, function, group, *args, **keywords):
        if owner is not dist.ProcessGroup:  # what goes by the dispatcher is counted there
            self.events.append(_event(name, args, group))
        with self._lock:
            self._fresh = True
            number, failing = self._collectives, False
            self._collectives += not name.startswith("recv")
            if self._begun is not None:
                failing = self._meets("handing over", count=number)
            elif self._step >= 0:
                share = (number + 1) / max(1, self._usual)
                failing = self._meets("before", self._step, share)
                failing |= self._meets("during", self._step, share)
        results = _results(name, group, args) if failing else None
        try:
            work = function(group, *args, **keywords)
            if failing and work is not None:
                work.wait()
        except RuntimeError:
            self._failed()
            raise
        work = _Work(work, self._failed, results)
        if work.behind is None:
            work.wait()
            return None
        return work

    def _failed(self):
        with self._lock:
            if not self._fresh:
                return
            self._note("failed")
            self._fresh, self._begun, self._collectives = False, time.monotonic(), 0
            self._recoveries.append(self._step)

    def _access(self, name, function, store, *args, **keywords):
        begun, first = self._begun, self._step < 0
        share = 0.0 if begun is None else (time.monotonic() - begun) / self._patience
        if begun is not None:
            self._meets("meeting", share=share, act="waits")
        found = function(store, *args, **keywords)
        size = _length([*args[1:], *keywords.values(), found])  # without the key
        self.events.append(Event(f"store.{name}", size, Fraction(size), 0, False))
        self._accesses += 1
        if first:
            self._meets("start", count=self._accesses)
        elif begun is not None:
            self._meets("meeting", share=share)
        return found

    def _new_group(self, function, *args, **keywords):
        self._groups += 1
        self._fresh = True
        if self._groups > NEW_GROUPS:
            raise NoEnd(
                f"{self._groups} groups were made, and each has failed. Is an error of your own "
                "caught each\ntime, or are the ranks at different steps? Print what you catch."
            )
        try:
            return function(*args, **keywords)
        except RuntimeError:
            self._failed()
            raise

    # --- what comes

    def _meets(self, moment, step=None, share=math.inf, count=math.inf, act=None) -> bool:
        """A moment has come. True: the collective that begins has to fail."""
        failing = False
        with self._lock:
            for fate in [f for f in self._fates if f.moment == moment and act in (None, f.act)]:
                if step not in (None, fate.step) or fate.share > share or fate.count > count:
                    continue
                if moment in IN_A_RECOVERY and not self._now(fate):
                    continue
                failing |= fate.act == "fails"
                self._comes(fate)
        return failing

    def _now(self, fate):
        """Whether the recovery that goes on is a fate's."""
        return len([step for step in self._recoveries if step >= fate.step]) == 1

    def _recovered(self, fate):
        return any(step >= fate.step for step in self._recoveries)

    def _comes(self, fate):
        self._fates.remove(fate)
        if fate.act == "waits":
            time.sleep(fate.seconds)
        elif fate.act == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fate.act == "dies" and fate.moment == "during":
            threading.Timer(fate.seconds, _die).start()
        elif fate.act == "dies":
            _die()

    def _note(self, *what):
        self.notes.append((time.monotonic(), *what))


class _Work:
    """A `Work` that tells when it has failed, or has to fail: then `results` are spoilt."""

    def __init__(self, behind: Any, failed: Callable[[], None], results: list | None):
        self.behind, self._failed, self._results = behind, failed, results

    def wait(self, *args: Any, **keywords: Any) -> bool:
        """As `Work.wait`."""
        try:
            done = self.behind.wait(*args, **keywords) if self.behind is not None else True
            if self._results is None:
                return done
            with torch.no_grad():
                for tensor in self._results:
                    tensor.mul_(2).add_(1)
            raise RuntimeError("Connection closed by peer")
        except RuntimeError:
            self._failed()
            raise

    def __getattr__(self, name):
        return getattr(self.behind, name)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _results(name: str, group: Any, args: tuple) -> list[torch.Tensor]:
    """The tensors that a collective writes to."""
    root = getattr(args[1], "rootRank", -1) if name == "broadcast" and len(args) > 1 else -1
    if name not in RESULTS or root == group.rank():
        return []
    return list(tensors_in([args[0]]))


def _event(name: str, args: tuple, group: Any) -> Event:
    """Of a collective that goes past the dispatcher, by a backend's own object."""
    size, payload = group.size(), sum(t.numel() * t.element_size() for t in tensors_in(list(args)))
    share = Fraction(2 * (size - 1), size) if name.startswith("allreduce") else Fraction(1)
    return Event(name, payload, share * payload, size, True)


def _length(value: Any) -> int:
    """Bytes of the texts in nested lists."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    return sum(map(_length, value)) if isinstance(value, list | tuple) else 0
