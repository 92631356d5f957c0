"""Given: what the ranks do for a check: they run a learner's program, or ask for her diagnosis."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.support.profiling.machine import Machine, Troubles, weights_of
from utils.course.expect import Wrong
from utils.measure.traffic import Traffic


@dataclass(frozen=True)
class Case:
    """A run of a program."""

    widths: tuple[int, ...]
    seed: int
    steps: int
    troubles: Troubles

    def machine(self, rank: int, ranks: int) -> Machine:
        """Of a rank; it takes no time."""
        return Machine(rank, ranks, self.widths, self.seed, troubles=self.troubles)


def slow(answer, cases: list[Case]) -> list[dict]:
    """Run after run of `train`: what it returns, sends, and asks of the machine."""
    found = []
    for case in cases:
        machine = case.machine(dist.get_rank(), dist.get_world_size())
        ended, traffic = [], Traffic()
        with traffic:
            losses = answer.train(machine, case.steps, lambda done=ended: done.append(1))
        found.append(
            {
                "losses": _numbers(losses),
                "ended": len(ended),
                "events": _events(traffic),
                "calls": dict(machine.calls),
                "saved": machine.saved,
                "lines": [str(line) for line in machine.lines],
                "looked_at": machine.looked_at,
            }
        )
    return found


def hanging(answer, cases: list[Case]) -> list[dict]:
    """Run after run of `train`: the rows that it returns."""
    found = []
    for case in cases:
        traffic = Traffic()
        with traffic:
            rows = answer.train(case.machine(dist.get_rank(), dist.get_world_size()), case.steps)
        if not isinstance(rows, (list, tuple)) or not all(isinstance(row, dict) for row in rows):
            raise Wrong("train does not return a list of dictionaries, one for each step.")
        found.append(
            {
                "rows": [{str(k): _number(v) for k, v in row.items()} for row in rows],
                "events": _events(traffic),
            }
        )
    return found


def wrong(answer, cases: list[Case]) -> list[dict]:
    """Run after run of `train`: the losses, and the weights that each step began with."""
    found = []
    for case in cases:
        traffic, weights = Traffic(), []
        with traffic:
            machine = case.machine(dist.get_rank(), dist.get_world_size())
            losses = answer.train(machine, case.steps, functools.partial(_Weights, weights))
        found.append({"losses": _numbers(losses), "weights": weights, "events": _events(traffic)})
    return found


class _Weights:
    """Keeps a model's weights, at the first forward pass of each step and at the end, in `kept`."""

    def __init__(self, kept: list[torch.Tensor], model: nn.Module):
        self._kept, self._model, self._new = kept, model, True

    def __enter__(self):
        self._handle = self._model.register_forward_pre_hook(lambda *_: self._keep())
        return self

    def __exit__(self, *exception):
        self._handle.remove()
        self._new = True
        self._keep()

    def step(self) -> None:
        """As `Watch.step`."""
        self._new = True

    def _keep(self):
        if self._new:
            self._kept.append(weights_of(self._model))
        self._new = False


def _events(traffic: Traffic) -> list[tuple[str, float]]:
    """(operation, bytes that this rank sends) of each collective."""
    return [(event.op, float(event.sent)) for event in traffic.events]


def _numbers(losses: Any) -> list[float]:
    if not isinstance(losses, (list, tuple, torch.Tensor)):
        raise Wrong(f"train returns a {type(losses).__name__}, not the list of the losses.")
    return [_number(loss) for loss in losses]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(f"train returns a {type(value).__name__} where a number should be.") from None
