"""Given: one MPI rank of the check of exercise 01a, which starts six of them:

    mpirun -n 6 python mpi_rank.py FILE FOLDER SEED

In concurrent groups of 1 to 6, the ranks call the functions in FILE. Each compares its results with
sums computed by hand, and with training on one rank; errors are written to FOLDER. Nothing imports
torch, so ranks start quickly.
"""

import faulthandler
import functools
import importlib
import os
import random
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from labs.support.data_parallel import digits

GROUPS = ((2, 3, 1), (4, 2), (5, 1), (6,))  # sizes of the concurrent groups, in four turns
HANG = 8.0  # seconds in which a function must reach its next collective or return


class Wrong(Exception):
    """Like utils.course.assertions.Wrong, whose module imports torch."""


class Noted:
    """A communicator that records the names of its calls; limit: called at each of them."""

    def __init__(self, comm: MPI.Comm, limit: Callable[[], None]):
        self._comm, self._limit, self.calls = comm, limit, []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._comm, name)
        if name.startswith("Get_") or not callable(attribute):  # these do not communicate
            return attribute

        def collective(*args, **keywords):
            self.calls.append(name)
            self._limit()
            return attribute(*args, **keywords)

        return collective


class Group:
    """Checks the answer on the ranks of one communicator, all of which do the same.

    place: path of this rank's files, without suffix; limit: restarts the clock. HANG seconds after
    its last call the process ends, whatever it is waiting for, and its stack is in a file.
    """

    def __init__(
        self, answer, comm: MPI.Comm, seed: int, place: Path, limit: Callable[[], None]
    ):
        self.answer, self.comm = answer, comm
        self.case, self.limit = place.with_suffix(".case"), limit
        self.own = comm.Dup()  # keeps the answer's messages apart from the check's
        self.rank, self.size = comm.rank, comm.size
        self.draw = random.Random(seed)  # draws the same on each rank
        self.name = f"with {comm.size} rank{'s' * (comm.size > 1)}"

    def called(self, function: str, case: str, collectives: list[str], *args, **options) -> Any:
        """Call the function and return its result. Raises Wrong if its calls are not `collectives`;
        a single rank may make none."""
        self.case.write_text(f"{function}: {case}")
        self.limit()
        noted = Noted(self.own, self.limit)
        result = getattr(self.answer, function)(*args, noted, **options)
        faulthandler.cancel_dump_traceback_later()
        made = " ".join(name[1:].capitalize() if name[0] == "I" else name for name in noted.calls)
        made = re.sub(r"Reduce_scatter(_block)? Allgatherv?", "Allreduce", made)
        if made != " ".join(collectives) and (made or self.size > 1):
            names = " and ".join(dict.fromkeys(collectives))
            small = any(name[0].islower() for name in noted.calls)
            raise Wrong(
                f"{function}: {case}, rank {self.rank} calls "
                f"{', '.join(noted.calls[:6]) or 'nothing'}.\n{names} of the whole vector, "
                f"{len(collectives)} in total, is enough."
                + "\nA method with a small letter pickles its argument." * small
            )
        return result

    def vectors(self) -> None:
        """broadcast and all_reduce_gradient change a vector in place, by one collective, even if
        one rank has no rows."""
        draw, ranks = self.draw, range(self.size)
        for idle in (None, *[draw.randrange(self.size)] * (self.size > 1)):
            rows = [draw.randrange(1, 60) * (rank != idle) for rank in ranks]
            drawn = np.random.default_rng(draw.getrandbits(31))
            own = drawn.normal(size=(self.size, 3000)) * (np.array(rows) > 0)[:, None]
            self.one("broadcast", "Bcast", own, own[0], [], [
                (None, "It does not have rank 0's parameters: it would train another model."),
            ])
            self.one("all_reduce_gradient", "Allreduce", own, rows @ own / sum(rows), rows, [
                (own.sum(0), "It is the sum of the ranks' means: steps become N times too long."),
                (own.mean(0), "A rank with more rows must weigh more."),
                (None, "Is each gradient weighted by its rank's fraction of the rows?"),
            ])

    def one(
        self, function: str, collective: str, own: np.ndarray, right: np.ndarray,
        rows: list[int], hints: list,
    ) -> None:
        """Check one call. own: each rank's vector before it; right: the vector after it; rows: of
        each rank, if the function takes them; hints: [(wrong vector or None for any, hint)]."""
        case = f"{self.name}" + f" that have {rows} rows" * bool(rows)
        got, more = own[self.rank].copy(), [rows[self.rank], sum(rows)] if rows else []
        self.called(function, case, [collective], got, *more)
        seen = got.copy()  # before an unfinished operation can complete
        self.comm.Barrier()
        wrong = np.abs(seen - right) > 1e-13 * np.abs(own).max()
        if wrong.any():
            at = int(np.argmax(wrong))
            hint = next(words for x, words in hints if x is None or np.allclose(seen, x))
            raise Wrong(
                f"{function}: {case}, rank {self.rank}: at [{at}] it has {seen[at]:.9g}, and "
                f"{right[at]:.9g} is right ({wrong.sum():,} of {len(seen):,} elements differ).\n"
                f"{hint}"
            )

    def training(self) -> None:
        """Compare the learning curve with that of one rank."""
        options = {"epochs": 1, "batch": self.draw.randrange(100, 900)}
        alone = self.answer.train(MPI.COMM_SELF, **options)
        case, calls = f"{self.name} and {options}", ["Bcast", *["Allreduce"] * len(alone)]
        curve = self.called("train", case, calls, **options)
        self.comm.Barrier()
        if not np.allclose(curve, alone, rtol=1e-9):
            raise Wrong(
                f"train: {case}, rank {self.rank}: the learning curve differs from one rank's.\n"
                "Do all ranks hold the same parameters?"
            )


def shards(answer, draw: random.Random) -> None:
    """Check `shard` with few and many rows and ranks."""
    cases = [(rows, draw.randrange(1, 7)) for rows in (0, 1, 1797, draw.randrange(2000))]
    cases += [(draw.randrange(100), draw.randrange(1, 65)) for _ in range(100)]
    for rows, size in cases:
        cuts = [answer.shard(rows, rank, size) for rank in range(size)]
        case = f"shard: {rows} rows on {size} ranks are split into"
        parts = [range(rows)[cut] for cut in cuts]
        if [row for part in parts for row in part] != list(range(rows)):
            raise Wrong(
                f"{case} {cuts[:8]}: some rows belong to no rank, or to several, or are not in "
                "order."
            )
        lengths = [len(part) for part in parts]
        if max(lengths) - min(lengths) > 1:
            raise Wrong(
                f"{case} {lengths[:8]} rows: the other ranks wait for the longest.\nLengths may "
                "differ by at most one."
            )


def main(path: Path, folder: Path, seed: int) -> None:
    """Check the answer in each of GROUPS in turn."""
    world = MPI.COMM_WORLD
    place = folder / f"rank{world.rank}"
    place.with_suffix(".case").write_text("loading the file")
    stack = os.open(place.with_suffix(".stack"), os.O_WRONLY | os.O_CREAT)
    limit = functools.partial(faulthandler.dump_traceback_later, HANG, exit=True, file=stack)
    try:
        limit()
        digits.load = functools.cache(digits.load)
        sys.path.insert(0, str(path.parent))
        answer = importlib.import_module(path.stem)
        shards(answer, random.Random(seed))
        for turn, sizes in enumerate(GROUPS):
            group = [group for group, size in enumerate(sizes) for _ in range(size)][world.rank]
            seed_of_group = 100 * seed + 10 * turn + group
            ranks = Group(answer, world.Split(group), seed_of_group, place, limit)
            ranks.vectors()
            ranks.training()
    except Exception as error:
        kind, said = "wrong", str(error)
        if isinstance(error, NotImplementedError):
            kind = "task"
        elif not isinstance(error, Wrong):
            frames = traceback.extract_tb(error.__traceback__)
            own = [f"line {x.lineno}: {x.line}" for x in frames if x.filename == str(path)]
            said = "\n".join([f"{type(error).__name__} in {path.name}: {said}", *own[-1:]])
        place.with_suffix(f".{kind}").write_text(said)
        world.Abort(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
