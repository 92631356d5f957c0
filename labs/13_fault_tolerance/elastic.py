"""Lab 13b: ranks that go on when some of them are killed, and learn what one rank learns.

    train(crew, model, steps)   # on every rank; crew: labs/support/fault_tolerance/worker_group.py

Only `train` is judged, by its contract; the other three functions are one way to cut it in pieces.
A rank that is killed says nothing. The others see a collective that fails, or takes longer than
`crew.limit`: both raise a RuntimeError. They have then stopped at different places: some with sums
in their gradients that are not complete, some one step ahead of the others.

A *generation* is the time from one meeting to the next failure. Its number is part of every key in
the store, so that nobody mistakes an old word for a new one.
"""

import datetime
import json
import time

import torch
import torch.distributed as dist
from torch import nn

from labs.support.fault_tolerance.worker_group import Crew


def train(crew: Crew, model: nn.Module, steps: int) -> bool:
    """Trains `model` for `steps` steps. True: this rank is one of those who did; False: the others
    went on without it (it was stopped, or slow, for longer than `crew.patience`).

    A step is that of one rank with the whole batch: g is the gradient of the mean loss over all
    `crew.batch` rows, v = momentum·v + g (v is 0 at first), weights -= lr·v; `crew.after` is told.

    - Ranks may be killed at any time: before the first step, in a step, in the recovery itself, two
      at once, rank 0 too. No process is started anew. Who is left shares the rows of a step by
      their numbers, each row on one rank, no rank more than one row above another, and goes on
      alone if need be.
    - Every rank that returns True has the weights of one rank, up to rounding, after each step that
      it tells `crew.after` of and at the end; and all of them have the same bits.
    - A step that any of those who are left has made is not computed again.
    - A rank that lives and comes to the meeting in `crew.patience` stays. One that comes when the
      others have closed the list without it returns False, and makes no further step.
    - A rank sends its gradients once a step, with some numbers beside them; a new group sends
      weights and velocity once at most.
    - Each wait ends: a collective after `crew.limit` seconds, a meeting after `crew.patience`.
    """
    raise NotImplementedError(
        "meet, form a group, take the furthest state, do steps; after a failure again"
    )


def meet(crew: Crew, store: dist.Store, generation: int, before: list[int]) -> list[int]:
    """The members of a generation, sorted, the same list on every rank that asks.

    before: those of the last generation. Ends when all of them are here, or after `crew.patience`.
    """
    raise NotImplementedError(
        "say that you are here, wait for the others; let one list be the list of all"
    )


def take_furthest(model: nn.Module, velocity: list[torch.Tensor], done: int) -> int:
    """Gives every rank of the group the state of the one that has done most steps, and returns
    their number. A rank whose group fails meanwhile keeps the state that it had.

    velocity: one tensor for each parameter.
    """
    raise NotImplementedError(
        "who is furthest? if others are not, let it send its state; then take it over"
    )


def one_step(crew: Crew, model: nn.Module, velocity: list[torch.Tensor], step: int) -> float:
    """One step of all ranks in the group; returns the mean loss over the batch.

    If it fails, the model and the velocity are what they were.
    """
    raise NotImplementedError(
        "the gradient of this rank's rows, the sum over the ranks, then the change"
    )
