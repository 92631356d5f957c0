"""Lab 13b: ranks that continue when some of them are killed, and learn what one rank learns.

    train(crew, model, steps)   # on every rank; crew: labs/support/fault_tolerance/worker_group.py

Only `train` is judged, by its contract; the other three functions are one way to divide the work.
A rank that is killed says nothing. The others see a collective that fails, or takes longer than
`crew.limit`: both raise a RuntimeError. They have then stopped at different places: some with
incomplete sums in their gradients, some one step ahead of the others.

A *generation* is the time from one meeting to the next failure. Its number is part of every key in
the store, so that no rank mistakes an old message for a new one.
"""

import datetime
import json
import time

import torch
import torch.distributed as dist
from torch import nn

from labs.support.fault_tolerance.worker_group import Crew


def train(crew: Crew, model: nn.Module, steps: int) -> bool:
    """Train `model` for `steps` steps. Returns True if this rank took part to the end; False if the
    others continued without it (it was stopped, or slow, for longer than `crew.patience`).

    A step is that of one rank with the whole batch: g is the gradient of the mean loss over all
    `crew.batch` rows, v = momentum·v + g (v is 0 at first), weights -= lr·v; call `crew.after`.

    - Ranks may be killed at any time: before the first step, in a step, in the recovery itself, two
      at once, rank 0 too. No process is restarted. The remaining ranks divide the rows of a step by
      index, each row on one rank, no rank with more than one row more than another; a single
      remaining rank continues on its own.
    - Every rank that returns True has the weights of one rank, up to rounding, after each step that
      it reports to `crew.after` and at the end; and all of them have the same bits.
    - A step that any remaining rank has completed is not repeated.
    - A live rank that comes to the meeting within `crew.patience` stays. One that comes after the
      others have closed the list without it returns False, and takes no further step.
    - A rank sends its gradients once per step, with a few other values; a new group sends weights
      and velocity at most once.
    - Each wait ends: a collective after `crew.limit` seconds, a meeting after `crew.patience`.
    """
    raise NotImplementedError(
        "meet, form a group, take the furthest state, take steps; repeat on failure"
    )


def meet(crew: Crew, store: dist.Store, generation: int, before: list[int]) -> list[int]:
    """The members of a generation, sorted, the same list on every rank that asks.

    before: members of the previous generation. Ends when all are here, or after `crew.patience`.
    """
    raise NotImplementedError("announce this rank, wait for the others; agree on one list")


def take_furthest(model: nn.Module, velocity: list[torch.Tensor], done: int) -> int:
    """Give every rank of the group the state of the rank that has completed the most steps; return
    their number. A rank whose group fails meanwhile keeps the state that it had.

    velocity: one tensor per parameter.
    """
    raise NotImplementedError("which rank is furthest? if others are behind, broadcast its state")


def one_step(crew: Crew, model: nn.Module, velocity: list[torch.Tensor], step: int) -> float:
    """Take one step on all ranks of the group; return the mean loss over the batch.

    If it fails, the model and the velocity are unchanged.
    """
    raise NotImplementedError(
        "the gradient of this rank's rows, the sum over the ranks, then the update"
    )
