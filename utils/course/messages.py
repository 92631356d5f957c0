"""A log of what a rank sends, receives and waits on, in order, for a check.

with noted() as notes:
    answer.function(x)
never_waited(notes)            # ["isend"]: its handle was never waited on
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.ranks.pool import PRELOADED

PRELOADED.append(__name__)
PEERS = ("dst", "src", "group_dst", "group_src")  # arguments that name the other rank
_never_waited_for: list = []  # a message without a handle might never leave


class Note(NamedTuple):
    """name: "isend", "irecv" or "wait"; other: the other rank; number: of the call that is logged
    or waited on; dtype: of the message."""

    name: str
    other: int | None
    number: int
    dtype: torch.dtype | None = None


class _Noted:
    """A `Work` that logs its wait; pending: those that have not been waited on."""

    def __init__(self, work: Any, noted: list, pending: dict):
        self._work, self._noted, self._pending = work, noted, pending
        self._number = len(noted)
        pending[self._number] = self

    def wait(self, *args: Any, **keywords: Any) -> bool:
        """As `Work.wait`."""
        done = self._work.wait(*args, **keywords)
        note = self._noted[self._number]
        if note.other is None:  # received from any source
            self._noted[self._number] = note._replace(other=self._work._source_rank())
        self._note_wait()
        return done

    def is_completed(self) -> bool:
        """As `Work.is_completed`."""
        done = self._work.is_completed()
        if done:
            self._note_wait()
        return done

    def _note_wait(self):
        self._noted.append(Note("wait", None, self._number))
        self._pending.pop(self._number, None)  # its tensor belongs to the caller alone again

    def __getattr__(self, name):
        return getattr(self._work, name)


@contextlib.contextmanager
def noted() -> Iterator[list[Note]]:
    """Log the sends and receives inside `with`.

    A blocking call is one of these plus its wait: PyTorch implements it that way.
    """
    notes, pending = [], {}
    before = {name: getattr(dist, name) for name in ("isend", "irecv")}

    def noting(name, function):
        def call(tensor, *args, **keywords):
            named = [value for key, value in keywords.items() if key in PEERS]
            other = next((peer for peer in [*args[:1], *named] if peer is not None), None)
            work = _Noted(function(tensor, *args, **keywords), notes, pending)
            notes.append(Note(name, other, len(notes), tensor.dtype))
            return work

        return call

    for name, function in before.items():
        noted_function = noting(name, function)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, noted_function)
    try:
        yield notes
    finally:
        for name, function in before.items():
            for module in (dist, dist.distributed_c10d):
                setattr(module, name, function)
        _never_waited_for.extend(pending.values())


def never_waited(notes: list[Note]) -> list[str]:
    """The names of the calls that were never waited on."""
    waited = {note.number for note in notes if note.name == "wait"}
    return [note.name for note in notes if note.name != "wait" and note.number not in waited]
