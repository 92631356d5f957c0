"""Given: one MPI rank of the check of exercise 01a (check_mpi.py starts six of them).

The ranks form groups that run your functions side by side, and each rank writes down what it has
seen. It imports no torch, so that it starts quickly.
"""

import contextlib
import importlib.util
import linecache
import os
import pickle
import random
import sys
import threading
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from labs.support.data_parallel import digits

HANG = 6.0  # seconds in one collective until it counts as hanging
TOO_LONG = 10.0  # seconds without a collective until a function counts as an endless loop
IN_ALL = 30.0  # seconds of one call, whatever it does
GRACE = 1.0  # seconds in which all ranks write down their place, once one of them hangs
QUIET = ("rank", "size", "name", "Get_rank", "Get_size", "Get_name")  # these say nothing to others


@dataclass(frozen=True)
class Training:
    """What `train` is asked for, and on what."""

    images: int  # so many of the first ones
    hidden: int
    epochs: int
    batch: int
    lr: float

    def __str__(self):
        return (
            f"{self.images} images, {self.hidden} hidden units, epochs={self.epochs}, "
            f"batch={self.batch}, lr={self.lr:.3f}"
        )

    @contextlib.contextmanager
    def given(self, images: np.ndarray, labels: np.ndarray) -> Iterator[None]:
        """Inside, `digits` has these images and a network of this size."""
        before = {name: getattr(digits, name) for name in ("load", "HIDDEN", "SHAPES", "SIZE")}
        shapes = digits.layers(self.hidden)
        digits.load = lambda: (images[: self.images].copy(), labels[: self.images].copy())
        digits.HIDDEN, digits.SHAPES = self.hidden, shapes
        digits.SIZE = sum(int(np.prod(shape)) for shape in shapes)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(digits, name, value)


@dataclass(frozen=True)
class Case:
    """What one group of ranks tries. Lengths are those of the vectors."""

    ranks: range  # of MPI.COMM_WORLD
    seed: int
    anew: int  # this rank of the group loads the file again
    shards: list[tuple[int, int]]  # (rows, size) that `shard` is asked for
    lengths: list[int]  # of broadcasts
    layouts: list[tuple[int, list[int], bool]]  # (length, rows by rank, one NaN on one rank)
    kept: int  # length of the vectors of which nothing may be kept
    training: Training

    def numbers(self, what: int, rank: int, length: int) -> np.ndarray:
        """The random vector number `what` of a rank."""
        return np.random.default_rng([self.seed, what, rank]).normal(size=length)


def broadcast_input(case: Case, number: int, rank: int) -> np.ndarray:
    """What a rank has before the broadcast: not always numbers."""
    values = case.numbers(100 + number, rank, case.lengths[number])
    if (number + rank) % 3 == 1:
        values[len(values) // 2] = (np.nan, np.inf)[rank % 2]
    return values


def gradient_input(case: Case, number: int, rank: int) -> np.ndarray:
    """A rank's mean gradient: zeros without rows, and one NaN where the layout says so."""
    length, rows, odd = case.layouts[number]
    values = case.numbers(200 + number, rank, length) * (rows[rank] > 0)
    if odd and rank == max(r for r in range(len(rows)) if rows[r]):
        values[length // 3] = np.nan
    return values


class Counted:
    """A communicator that notes each call, its bytes, and what was not waited for."""

    def __init__(self, comm, watch: "Watch"):
        self._comm, self._watch, self.calls, self._requests = comm, watch, [], []

    def __getattr__(self, name):
        attribute = getattr(self._comm, name)
        if name in QUIET or not callable(attribute):
            return attribute

        def call(*args, **keywords):
            self.calls.append((name, max(map(_nbytes, [*args, *keywords.values()]), default=0)))
            with self._watch.inside(name):
                result = attribute(*args, **keywords)
            if hasattr(result, "Wait"):
                self._requests.append((result, args, keywords))  # its buffers must live
            return result

        return call

    def unfinished(self) -> int:
        """Asynchronous calls that nobody has waited for. Waits for them."""
        left = [request for request, *_ in self._requests if request]
        for request in left:
            request.Wait()
        return len(left)


def _nbytes(given: Any) -> int:
    """Bytes of a buffer, or of the largest one in a list such as [array, MPI.DOUBLE]."""
    if isinstance(given, (list, tuple)):
        return max(map(_nbytes, given), default=0)
    if isinstance(given, (str, bytes)):
        return len(given)
    try:
        return memoryview(given).nbytes
    except TypeError:  # a number, a type, an operation
        return 0


class Watch(threading.Thread):
    """Ends this process when the answer hangs; nothing that the answer catches can prevent it."""

    def __init__(self, notes: Path, rank: int):
        super().__init__(daemon=True)
        self._notes, self._rank, self._main = notes, rank, threading.main_thread().ident
        self._case, self._collective, self._since, self._end = "", "", None, 0.0

    @contextlib.contextmanager
    def calling(self, case: str) -> Iterator[None]:
        """Inside, the answer runs."""
        self._case, self._since, self._end = case, time.monotonic(), time.monotonic() + IN_ALL
        (self._notes / f"rank{self._rank}.case").write_text(case)
        try:
            yield
        finally:
            self._since = None

    @contextlib.contextmanager
    def inside(self, collective: str) -> Iterator[None]:
        """Inside, the answer may wait for others."""
        self._collective, self._since = collective, time.monotonic()
        try:
            yield
        finally:
            self._collective, self._since = "", time.monotonic()

    def run(self):
        """Until the process ends."""
        alarm = self._notes / "alarm"
        while not alarm.exists():
            time.sleep(0.05)
            since, limit = self._since, HANG if self._collective else TOO_LONG
            if since is not None and time.monotonic() > min(since + limit, self._end):
                alarm.touch()
        if self._since is not None:  # mpirun ends all ranks when the first one exits
            frames = traceback.extract_stack(sys._current_frames()[self._main])
            place = [(frame.filename, frame.lineno, frame.name) for frame in frames]
            write(self._notes / f"rank{self._rank}.hangs", (self._case, self._collective, place))
        time.sleep(GRACE)
        os._exit(1)


def observe(answer, comm, case: Case, images: tuple, watch: Watch) -> dict:
    """Everything that the judge wants to know from this rank of a group."""
    rank, size = comm.rank, comm.size
    where = f"with {size} rank{'s' * (size > 1)}"
    own = comm.Dup()  # the answer's messages and the judge's never meet

    def called(name: str, text: str, *args) -> tuple[list, int]:
        counted = Counted(own, watch)
        comm.Barrier()
        with watch.calling(f"{name} {text}"):
            getattr(answer, name)(*args, counted)
        return counted.calls, counted.unfinished()

    shards = {}
    with watch.calling("shard"):
        for rows, ranks in random.sample(case.shards, len(case.shards)):
            cuts = [answer.shard(rows, other, ranks) for other in range(ranks)]
            shards[rows, ranks] = [
                cut.indices(rows) if isinstance(cut, slice) else repr(cut)[:60] for cut in cuts
            ]
    broadcasts, gradients, kept = [], [], []
    for number, length in enumerate(case.lengths):
        parameters = broadcast_input(case, number, rank)
        told = called("broadcast", f"{where} and {length} numbers", parameters)
        broadcasts.append((parameters, *told))
    for number, (_, rows, _) in enumerate(case.layouts):
        gradient, text = gradient_input(case, number, rank), f"{where} that have {rows} rows"
        told = called("all_reduce_gradient", text, gradient, rows[rank], sum(rows))
        gradients.append((gradient, *told))
    tracemalloc.start()
    for number in range(4):
        vector = case.numbers(300 + number, rank, case.kept)
        text = f"{where} and {case.kept} numbers"
        called("broadcast", text, vector)
        called("all_reduce_gradient", text, vector, 1 + rank, size * (size + 1) // 2)
        del vector
        kept.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    comm.Barrier()
    with watch.calling(f"train {where} and {case.training}"):
        trained = _train(answer, Counted(own, watch), case.training, images)
    comm.Barrier()
    return {"shards": shards, "broadcasts": broadcasts, "gradients": gradients, "kept": kept,
            "train": trained}


def _train(answer, counted: Counted, training: Training, images: tuple) -> dict:
    passes, original = [], digits.loss_and_gradient

    def counting(parameters, images, labels):
        if len(labels) < training.images:  # the loss on all is no work that could be shared
            passes.append(len(labels))
        return original(parameters, images, labels)

    with training.given(*images):
        digits.loss_and_gradient = counting
        try:
            curve = answer.train(
                counted, epochs=training.epochs, batch=training.batch, lr=training.lr
            )
        finally:
            digits.loss_and_gradient = original
    return {"curve": curve, "passes": sum(passes), "calls": counted.calls,
            "unfinished": counted.unfinished()}


def load(path: Path):
    """The answer as a module."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("answer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, report: Any) -> None:
    """All of the report, or no file."""
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(report))
    unfinished.rename(path)


def failure(error: BaseException, path: Path, case: str, rank: int) -> str:
    """An exception of the answer, in a sentence."""
    place = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = ""
    if place:
        code = linecache.getline(str(path), place[-1].lineno).strip()
        line = f" in {path.name} line {place[-1].lineno} (`{code}`)"
    if isinstance(error, SystemExit):
        what = f"the code leaves the program{line}; a function that is called returns."
    else:
        what = f"{type(error).__name__}{line}: {error}"
    return f"{case}, rank {rank}: {what}"


def main(path: Path, notes: Path) -> None:
    """On a rank of `mpirun`: observes the answer in groups, one after another."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    phases: list[list[Case]] = pickle.loads((notes / "cases").read_bytes())
    watch = Watch(notes, world.rank)
    watch.start()
    images, reports, case, rank = digits.load(), [], None, 0
    try:
        with watch.calling("loading the file"):
            answer = load(path)
        for phase in phases:
            color = next(g for g, case in enumerate(phase) if world.rank in case.ranks)
            case, group = phase[color], world.Split(color)
            rank = group.rank
            for module in (random, np.random):
                module.seed((case.seed + world.rank) % 2**32)
            if rank == case.anew:
                with watch.calling("loading the file"):
                    answer = load(path)
            reports.append(observe(answer, group, case, images, watch))
        report = {"seen": reports}
    except NotImplementedError as error:
        report = {"task": str(error)}
    except BaseException as error:  # SystemExit too
        where = (notes / f"rank{world.rank}.case").read_text()
        report = {"error": failure(error, path, where, rank)}
    write(notes / f"rank{world.rank}.seen", report)
    if "seen" not in report:
        world.Abort(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
