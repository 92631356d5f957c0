"""Given: one MPI rank of the check of exercise 01a (check_mpi.py starts four of them).

The first 1, 2, 3 and 4 ranks run your functions in turn; each rank writes down what it has seen.
It imports no torch, so that it starts quickly.
"""

import faulthandler
import importlib.util
import json
import os
import sys
import threading
import traceback
from pathlib import Path

import numpy as np

from labs.support.data_parallel import digits

RANKS = (1, 2, 3, 4)
ROWS = (1797, 200, 197, 7, 3, 1, 0)  # what `shard` is asked to cut
EPOCHS, BATCH, LR = 2, 200, 0.5
GRACE = 2.0  # seconds between the first rank that gives up and its end
QUIET = ("Get_rank", "Get_size", "Barrier", "Abort")  # methods that send no data


class Counted:
    """A communicator that notes the name and the bytes of each call."""

    def __init__(self, comm):
        self._comm, self.calls = comm, []

    def __getattr__(self, name):
        attribute = getattr(self._comm, name)
        if not callable(attribute) or name in QUIET:
            return attribute

        def call(*args, **keywords):
            given = [*args, *keywords.values()]
            sizes = [array.nbytes for array in given if isinstance(array, np.ndarray)]
            self.calls.append((name, max(sizes, default=0)))
            return attribute(*args, **keywords)

        return call


def observe(answer, comm) -> dict:
    """Everything that the judge wants to know from this rank, in a group of `comm.size`."""
    rank, size = comm.rank, comm.size
    slices = [answer.shard(rows, rank, size).indices(rows)[:2] for rows in ROWS]

    root, parameters = digits.new_parameters(0), digits.new_parameters(rank)
    counted = Counted(comm)
    answer.broadcast(parameters, counted)
    broadcast = {"same": bool((parameters == root).all()), "calls": counted.calls}

    rows = [3 + 2 * other for other in range(size)]  # ranks have different numbers of rows
    own = [digits.new_parameters(10 + other) for other in range(size)]
    gradient, counted = own[rank].copy(), Counted(comm)
    answer.all_reduce_gradient(gradient, rows[rank], sum(rows), counted)
    mean = sum(g * (r / sum(rows)) for g, r in zip(own, rows))
    spots = slice(0, 64)  # a few of the numbers tell
    reduced = {
        "got": gradient[spots].tolist(), "mean": mean[spots].tolist(), "rows": rows,
        "own": own[rank][spots].tolist(), "sum": sum(own)[spots].tolist(), "calls": counted.calls,
    }  # fmt: skip
    return {"shards": slices, "broadcast": broadcast, "gradient": reduced,
            "train": _observe_training(answer, comm)}  # fmt: skip


def _observe_training(answer, comm) -> dict:
    images_total, passes = len(digits.load()[1]), []
    original = digits.loss_and_gradient

    def counting(parameters, images, labels):
        if len(labels) < images_total:  # the loss on all images is no work that could be shared
            passes.append(len(labels))
        return original(parameters, images, labels)

    digits.loss_and_gradient = counting
    counted = Counted(comm)
    try:
        curve = answer.train(counted, epochs=EPOCHS, batch=BATCH, lr=LR)
    finally:
        digits.loss_and_gradient = original
    starts = range(0, images_total, BATCH)
    batches = [min(BATCH, images_total - first) for first in starts] * EPOCHS
    return {"curve": curve, "passes": sum(passes), "batches": batches, "calls": counted.calls}


def load(path: Path):
    """The answer as a module."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("answer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(path: Path, notes: Path, seconds: float) -> None:
    """On a rank of `mpirun`: observe the answer in groups of 1, 2, 3 and 4 ranks.

    Ranks that are not done after so many seconds count as waiting for each other.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    stack = os.open(notes / f"stack{world.rank}", os.O_CREAT | os.O_WRONLY)
    faulthandler.dump_traceback_later(seconds, file=stack)
    # mpirun ends all ranks when the first one exits: each gets the time to write down its place
    ender = threading.Timer(seconds + GRACE, os._exit, [1])
    ender.daemon = True
    ender.start()
    report = {}
    try:
        answer = load(path)
        for size in RANKS:
            group = world.Split(0 if world.rank < size else MPI.UNDEFINED)
            if world.rank < size:
                report[size] = observe(answer, group)
    except NotImplementedError as error:
        report = {"task": str(error)}
    except Exception as error:
        place = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = f", {path.name} line {place[-1].lineno}" if place else ""
        report = {"error": f"rank {world.rank} of {world.size}{line}: "
                           f"{type(error).__name__}: {error}"}  # fmt: skip
    unfinished = notes / f"rank{world.rank}.part"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(notes / f"rank{world.rank}.json")
    if "error" in report or "task" in report:
        world.Abort(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]))
