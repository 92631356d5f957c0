"""Given: one MPI rank of the check of exercise 01a, which starts six of them:

    mpirun -n 6 python mpi_rank.py FILE FOLDER SEED

In groups of 1 to 6, side by side, the ranks call the functions in FILE. Each compares what it gets
with sums by hand, and with training on one rank; what is wrong goes to FOLDER. No torch is
imported, so that a rank starts quickly.
"""

import contextlib
import faulthandler
import importlib.util
import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from labs.support.data_parallel import digits

GROUPS = ((2, 3, 1), (4, 2), (5, 1), (6,))  # ranks of groups side by side, in four turns
HANG = 8.0  # seconds in which a function has to come to its next collective, or to its end
SLACK = 64 * np.finfo(float).eps
QUIET = ("rank", "size", "name", "Get_rank", "Get_size", "Get_name")  # these say nothing to others


class Wrong(Exception):
    """As that of utils.course.assertions, which imports torch."""


class Counted:
    """A communicator that notes each call, its bytes, and what was not waited for."""

    def __init__(self, comm, limit):
        self._comm, self._limit, self.calls, self._requests = comm, limit, [], []

    def __getattr__(self, name):
        attribute = getattr(self._comm, name)
        if name in QUIET or not callable(attribute):
            return attribute

        def collective(*args, **keywords):
            self.calls.append((name, max(map(nbytes, [*args, *keywords.values()]), default=0)))
            self._limit()
            result = attribute(*args, **keywords)
            self._limit()
            if hasattr(result, "Wait"):
                self._requests.append((result, args, keywords))  # its buffers must live
            return result

        return collective

    def right(self, where: str, expected: list[str], data: int) -> None:
        """Raises Wrong unless these were called, with so many bytes each, and waited for. One rank
        alone may call nothing."""
        left = [request for request, *_ in self._requests if request]
        for request in left:
            request.Wait()
        if left:
            raise Wrong(f"{where}: nobody waits for {self.calls[-1][0]}, which has only begun.")
        made = [name[1:].capitalize() if name[0] == "I" else name for name, _ in self.calls]
        made = re.sub(r"Reduce_scatter(_block)? Allgatherv?", "Allreduce", " ".join(made))
        right = made == " ".join(expected) and {count for _, count in self.calls} == {data}
        if right or (self._comm.size == 1 and not made):
            return
        hint = ""
        if any(name[0].islower() for name, _ in self.calls):
            hint = "\nA method with a small letter pickles what it sends."
        shown = ", ".join(f"{name} ({count:,} bytes)" for name, count in self.calls[:6])
        names, more = " and ".join(dict.fromkeys(expected)), "s in all" * (len(expected) > 1)
        raise Wrong(
            f"{where} calls {shown or 'nothing'}.\n{len(expected)} call{more}, {names} of the "
            f"whole vector, {data:,} bytes, will do.{hint}"
        )


def nbytes(given: Any) -> int:
    """Bytes of a buffer, or of the largest one in a list such as [array, MPI.DOUBLE]."""
    if isinstance(given, list | tuple):
        return max(map(nbytes, given), default=0)
    try:
        return memoryview(given).nbytes
    except TypeError:  # a number, a type, an operation
        return 0


class Group:
    """Judges the answer on the ranks of one communicator, all of which do the same."""

    def __init__(self, answer, comm, seed: int, folder: Path):
        self.answer, self.comm, self.seed, self.folder = answer, comm, seed, folder
        self.own = comm.Dup()  # the answer's messages and the judge's never meet
        self.rank, self.size = comm.rank, comm.size
        self.draw = random.Random(seed)  # draws the same on each rank
        self.name = f"with {comm.size} rank{'s' * (comm.size > 1)}"

    def judge(self) -> None:
        """Raises Wrong."""
        if self.rank == 0:
            with ends(self.folder, "shard"):
                self.shards()
        self.vectors()
        self.training()

    def called(self, function: str, case: str, *args: Any, **options: Any) -> tuple[Any, Counted]:
        """What the function returns, when all ranks are through; and its calls."""
        with ends(self.folder, f"{function}: {case}") as limit:
            counted = Counted(self.own, limit)
            result = getattr(self.answer, function)(*args, counted, **options)
        self.comm.Barrier()
        return result, counted

    def shards(self) -> None:
        """Few rows, many ranks, many rows."""
        draw, size = random.Random(self.seed), self.size
        cases = [(draw.randrange(2000), size) for _ in range(4)]
        cases += [(rows, size) for rows in (0, 1, 1797)]
        cases += [(draw.randrange(100), draw.randrange(1, 65)) for _ in range(25)]
        cases += [(draw.randrange(10**5, 10**6), draw.randrange(2, 8))]
        cases += [(2**24 + draw.randrange(1, 1000, 2), 2)]  # no fp32 number
        for rows, size in cases:
            cuts = [self.answer.shard(rows, rank, size) for rank in range(size)]
            case = f"shard: {rows} rows on {size} ranks are cut into {shortened(cuts)}"
            if not all(isinstance(cut, slice) for cut in cuts):
                raise Wrong(f"{case}, which are no slices.")
            parts, end = [range(rows)[cut] for cut in cuts], 0
            for part in (*filter(len, parts), range(rows, rows)):
                if part.step != 1 or part.start < end:
                    raise Wrong(f"{case}: some rows belong to several ranks, or are not in order.")
                if part.start > end:
                    raise Wrong(f"{case}: {part.start - end} rows belong to no rank.")
                end = part.stop
            lengths = [len(part) for part in parts]
            if max(lengths) - min(lengths) > 1:
                raise Wrong(
                    f"shard: {rows} rows on {size} ranks are cut into {shortened(lengths)} rows: "
                    "the others wait for the longest.\nLengths may differ by one at most."
                )

    def layouts(self) -> list[tuple[int, list[int]]]:
        """(length of a vector, rows by rank): different numbers of rows, a rank with none, the same
        ones, very different ones, a rank with all."""
        draw, ranks = self.draw, range(self.size)
        without, only = draw.choice(ranks), draw.choice(ranks)
        rows = [
            [draw.randrange(1, 60) for _ in ranks],
            [draw.randrange(1, 60) * (rank != without) for rank in ranks],
            [draw.randrange(1, 60)] * self.size,
            [draw.randrange(1, 10 ** draw.randrange(1, 7)) for _ in ranks],
            [draw.randrange(1, 60) * (rank == only) for rank in ranks],
        ]
        lengths = [draw.randrange(2000, 4000) for _ in rows[2:]]
        large = draw.randrange(50_000, 70_000) if self.size == 3 else 7
        return [(n, r) for n, r in zip([1, large, *lengths], rows) if sum(r)]

    def vectors(self) -> None:
        """broadcast and all_reduce_gradient for all layouts, with a NaN in the last one."""
        layouts = self.layouts()
        for number, (length, rows) in enumerate(layouts):
            own = [np.random.default_rng([self.seed, number, rank]).normal(size=length)
                   * (rows[rank] > 0) for rank in range(self.size)]
            if number == len(layouts) - 1:
                own[np.argmax(rows)][length // 3] = np.nan
            hints = [(None, "It does not have rank 0's parameters: it would train another model.")]
            case = f"{self.name} and {length} numbers"
            self.one("broadcast", "Bcast", case, own, own[0], (), hints)
            hints = [
                (own[self.rank], f"Rank {self.rank} still has its own gradient."),
                (sum(own), "It is the sum of the ranks' means: steps get N times too long."),
                (sum(own) / self.size, "A rank with more rows must weigh more."),
                (None, "Is each gradient weighted by its rank's share of the rows?"),
            ]
            mean = sum(g * (r / sum(rows)) for g, r in zip(own, rows))
            case, more = f"{self.name} that have {rows} rows", (rows[self.rank], sum(rows))
            self.one("all_reduce_gradient", "Allreduce", case, own, mean, more, hints)

    def one(self, function: str, collective: str, case: str, own: list[np.ndarray],
            right: np.ndarray, more: tuple, symptoms: list) -> None:
        """A call that changes a vector in place, by one collective.

        own: what each rank has before; symptoms: [(vector, what to say where that is seen)].
        """
        got, where = own[self.rank].copy(), f"{function}: {case}, rank {self.rank}"
        _, counted = self.called(function, case, got, *more)
        with np.errstate(invalid="ignore"):
            same = np.abs(got - right) <= SLACK * np.nanmax(np.abs(own))
        same |= (got == right) | (np.isnan(got) & np.isnan(right))
        if not same.all():
            at = int(np.argmin(same))
            hint = next(words for seen, words in symptoms
                        if seen is None or np.allclose(got, seen, equal_nan=True))
            raise Wrong(
                f"{where}: at [{at}] it has {got[at]:.9g}, and {right[at]:.9g} is right "
                f"({(~same).sum():,} of {len(got):,} numbers differ).\n{hint}"
            )
        counted.right(where, [collective], got.nbytes)

    def training(self) -> None:
        """Compares the learning curve with that of one process that knows no ranks."""
        draw, everything = self.draw, digits.load()
        batch = draw.choice([draw.randrange(1, self.size + 3), draw.randrange(20, 120)])
        number = batch * draw.randrange(3, 12) + draw.randrange(batch)
        images, labels = (part[:number] for part in everything)
        options = {"epochs": draw.randrange(1, 4), "batch": batch, "lr": draw.uniform(0.05, 0.4)}
        alone = train_alone(images, labels, **options) if self.rank == 0 else None
        alone, case = self.comm.bcast(alone), f"{self.name}, {number} images and {options}"
        with mock.patch.object(digits, "load", lambda: (images.copy(), labels.copy())):
            curve, counted = self.called("train", case, **options)
        where = f"train: {case}, rank {self.rank}"
        for step, (got, right) in enumerate(zip(curve, alone, strict=True)):
            if not np.isclose(got, right, rtol=1e-9):
                raise Wrong(
                    f"{where}: the learning curve leaves that of one rank at step {step}:\n"
                    f"{got:.6f} where {right:.6f} is right. Do all ranks hold the same parameters?"
                )
        counted.right(where, ["Bcast", *["Allreduce"] * len(alone)], 8 * digits.SIZE)


def train_alone(
    images: np.ndarray, labels: np.ndarray, epochs: int, batch: int, lr: float
) -> list[float]:
    """The learning curve of one process that has never heard of ranks."""
    parameters, curve = digits.new_parameters(seed=0), []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))
        for first in range(0, len(images), batch):
            rows = order[first : first + batch]
            parameters -= lr * digits.loss_and_gradient(parameters, images[rows], labels[rows])[1]
            curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
    return curve


@contextlib.contextmanager
def ends(folder: Path, case: str) -> Iterator[Callable[[], None]]:
    """Inside, the answer runs. HANG seconds after the last call of what this gives, the process is
    ended, whatever it waits for; the case and the stack are then in a file."""
    with open(folder / f"process{os.getpid()}.stack", "w") as file:
        file.write(f"{case}\n")
        file.flush()

        def limit() -> None:
            faulthandler.dump_traceback_later(HANG, exit=True, file=file)

        limit()
        try:
            yield limit
        except (NotImplementedError, Wrong):
            raise
        except BaseException as error:  # SystemExit too
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if frame.filename == sys.argv[1]][-1:]
            place = "".join(f" in {Path(f.filename).name} line {f.lineno}: {f.line}" for f in own)
            raise Wrong(f"{case}: {type(error).__name__}{place}\n{error}") from None
        finally:
            faulthandler.cancel_dump_traceback_later()


def shortened(listed: list, most: int = 8) -> str:
    shown = ", ".join(str(item) for item in listed[:most])
    return f"[{shown}{' …' if len(listed) > most else ''}]"


def main(path: Path, folder: Path, seed: int) -> None:
    """Judges the answer in groups, one after another."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    try:
        with ends(folder, "loading the file"):
            sys.path.insert(0, str(path.parent))
            spec = importlib.util.spec_from_file_location("answer", path)
            answer = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(answer)
        for turn, sizes in enumerate(GROUPS):
            group = [group for group, size in enumerate(sizes) for _ in range(size)][world.rank]
            Group(answer, world.Split(group), 100 * seed + 10 * turn + group, folder).judge()
    except (NotImplementedError, Wrong) as error:
        kind = "wrong" if isinstance(error, Wrong) else "task"
        (folder / f"rank{world.rank}.{kind}").write_text(str(error))
        world.Abort(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
