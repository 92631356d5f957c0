"""Given: what the check cell of exercise 01a looks at.

One `mpirun` starts six ranks. In groups of 1 to 6, side by side, they run your functions and note
results, messages and bytes (mpi_rank.py). They are compared here with sums by hand, and with
training on one rank, without any MPI.
"""

import contextlib
import itertools
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from labs.support.data_parallel import digits
from labs.support.data_parallel.mpi_rank import (
    Case,
    Training,
    broadcast_input,
    gradient_input,
)
from utils.course.assertions import Wrong, close
from utils.course.runner import Trial

LIMIT = 60.0  # seconds until mpirun is ended, whatever its ranks do
SIZES = ((2, 3, 1), (4, 2), (5, 1), (6,))  # groups of ranks, side by side


def mpirun(ranks: int, *command: str, folder: Path) -> subprocess.CompletedProcess:
    """Runs `python command` on MPI ranks, as in a terminal; ends them all at the time limit."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise Wrong("there is no mpirun: install the packages again with `make setup`.")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores
    }
    if os.geteuid() == 0:  # Open MPI asks twice before it runs as root (in a container, say)
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.Popen(
        [program, "-n", str(ranks), sys.executable, *command],
        cwd=folder, env=environment, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise Wrong(f"no end after {LIMIT:.0f} s: an endless loop?") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
        process.wait(10)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run(ranks: int, file: str) -> None:
    """Runs your file on MPI ranks, and shows the command and what it prints."""
    print(f"$ mpirun -n {ranks} python {file}")
    done = mpirun(ranks, file, folder=Path.cwd())
    task = re.search(r"NotImplementedError: (.*)", done.stderr)
    if task:
        print(f"[ ] not started. Your task: {task[1]}")
    else:
        print(done.stdout if done.returncode == 0 else done.stderr[-1500:], end="")


def data_parallel(trial: Trial) -> str:
    """Judges the three functions and the training in the file."""
    phases = _draw(trial)
    with tempfile.TemporaryDirectory() as folder:
        notes, program = Path(folder), str(Path(__file__).with_name("mpi_rank.py"))
        (notes / "cases").write_bytes(pickle.dumps(phases))
        world = sum(SIZES[0])
        done = mpirun(world, program, str(trial.path), folder, folder=trial.path.parent)
        _show(done.stdout)
        seen = _read(notes, done, trial.path, world)
    images, labels = digits.load()
    for phase, cases in enumerate(phases):
        for case in cases:
            ranks = [seen[rank][phase] for rank in case.ranks]
            for rank in ranks:
                _right_shards(rank["shards"])
            _right_broadcasts(case, [rank["broadcasts"] for rank in ranks])
            _right_gradients(case, [rank["gradients"] for rank in ranks])
            _nothing_kept(case, [rank["kept"] for rank in ranks])
            alone = train_alone(case.training, images, labels)
            _right_training(case, [rank["train"] for rank in ranks], alone)
    return (
        "the learning curve of 1 to 6 ranks is that of one rank, for networks and batches of\n"
        "many sizes; up to 64 ranks share out many numbers of rows, every row once; ranks have\n"
        "different numbers of rows, or none; one broadcast, then one all-reduce a step on each\n"
        "rank, of as many bytes as the parameters."
    )


def _draw(trial: Trial) -> list[list[Case]]:
    draw, phases = trial.draw, []
    for sizes in SIZES:
        first, cases = 0, []
        for size in sizes:
            batch = draw.choice([draw.randrange(1, size + 3), draw.randrange(20, 120)])
            large = range(50_000, 70_000) if size == 3 else range(2, 4000)
            images = batch * draw.randrange(3, 12) + draw.randrange(batch)
            training = Training(
                images, draw.randrange(3, 40), draw.randrange(1, 4), batch, draw.uniform(0.05, 0.4)
            )
            cases.append(
                Case(
                    ranks=range(first, first + size),
                    seed=trial.new_seed(),
                    anew=draw.randrange(size),
                    shards=_shards(draw, size),
                    lengths=[1, *(draw.randrange(2, 4000) for _ in range(2)), draw.choice(large)],
                    layouts=[
                        (draw.choice(range(1, 4000) if number else large), *rows)
                        for number, rows in enumerate(_layouts(draw, size))
                    ],
                    kept=draw.randrange(4000, 6000),
                    training=training,
                )
            )
            first += size
        phases.append(cases)
    return phases


def _shards(draw, size: int) -> list[tuple[int, int]]:
    """(rows, ranks) that `shard` is asked for: few rows, many ranks, many rows."""
    many = [draw.randrange(1, 65) for _ in range(25)]
    return [
        *((draw.randrange(3 * ranks), ranks) for ranks in many),
        *((draw.randrange(2000), size) for _ in range(4)),
        (0, size), (1, size), (1797, size), (draw.randrange(10**5, 10**6), draw.randrange(2, 8)),
        *[(2**24 + draw.randrange(1, 1000, 2), 2)] * (size == 1),  # no fp32 number
    ]


def _layouts(draw, size: int) -> list[tuple[list[int], bool]]:
    """Rows by rank, and whether a number is NaN on one rank."""
    several = [draw.randrange(1, 60) for _ in range(size)]
    without, only = draw.randrange(size), draw.randrange(size)
    return [
        ([draw.randrange(1, 60) for _ in range(size)], False),
        ([rows * (rank != without) or (size == 1) for rank, rows in enumerate(several)], False),
        ([several[0]] * size, False),
        ([draw.randrange(1, 10 ** draw.randrange(1, 7)) for _ in range(size)], False),
        ([several[0] * (rank == only) for rank in range(size)], False),
        ([draw.randrange(1, 60) for _ in range(size)], True),
    ]


def _show(printed: str, most: int = 20) -> None:
    """What the answer prints, shortened."""
    lines = printed.splitlines()
    if lines:
        print("\n".join([*lines[:most], "…"] if len(lines) > most else lines))


def train_alone(training: Training, images: np.ndarray, labels: np.ndarray) -> list[float]:
    """The learning curve of one process that has never heard of ranks."""
    with training.given(images, labels):
        images, labels = digits.load()
        parameters, curve = digits.new_parameters(seed=0), []
        for epoch in range(training.epochs):
            order = np.random.default_rng(epoch).permutation(len(images))
            for first in range(0, len(images), training.batch):
                rows = order[first : first + training.batch]
                gradient = digits.loss_and_gradient(parameters, images[rows], labels[rows])[1]
                parameters -= training.lr * gradient
                curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
    return curve


# ── what is wrong, in words ───────────────────────────────────────────────────────────────────


def _right_shards(shards: dict[tuple[int, int], list]) -> None:
    for (rows, size), cuts in shards.items():
        for rank, cut in enumerate(cuts):
            if isinstance(cut, str):
                raise Wrong(f"shard({rows}, {rank}, {size}) returns {cut}, which is no slice.")
        case = f"shard: {rows} rows on {size} ranks are cut into {_shortened(cuts)}"
        if any(step != 1 for _, _, step in cuts):
            raise Wrong(f"{case} (first, last, step): a slice takes rows that follow one another.")
        lengths = [max(0, last - first) for first, last, _ in cuts]
        starts = [first for first, last, _ in cuts if last > first]
        if starts != sorted(starts):
            raise Wrong(f"{case}: a later rank has earlier rows; the slices come in order.")
        place = 0
        for length, (first, last, _) in zip(lengths, cuts):
            if length and first != place:
                what = "some rows belong to several ranks" if first < place else (
                    f"{first - place} rows belong to no rank")
                raise Wrong(f"{case}: {what}.")
            place = last if length else place
        if place != rows:
            raise Wrong(f"{case}: {rows - place} rows belong to no rank.")
        if max(lengths) - min(lengths) > 1:
            raise Wrong(
                f"shard: {rows} rows on {size} ranks are cut into {_shortened(lengths)} rows: the "
                "others wait for the longest.\nLengths may differ by one at most."
            )


def _shortened(listed: list, most: int = 8) -> str:
    shown = ", ".join(str(item) for item in listed[:most])
    return f"[{shown}{' …' if len(listed) > most else ''}]"


def _right_broadcasts(case: Case, ranks: list) -> None:
    for number, length in enumerate(case.lengths):
        root = broadcast_input(case, number, 0)
        where = f"broadcast: {_with(case)} and {length} numbers, rank"
        for rank, results in enumerate(ranks):
            got, calls, unfinished = results[number]
            _waited_for(f"{where} {rank}", calls, unfinished)
            if not np.array_equal(got, root, equal_nan=True):
                raise Wrong(
                    f"{where} {rank} does not have rank 0's parameters afterwards:\n"
                    f"{_differing(got, root)} Each rank would train another model."
                )
        for rank, results in enumerate(ranks):
            _one_call(f"{where} {rank}", results[number][1], "Bcast", 8 * length, len(ranks))


def _right_gradients(case: Case, ranks: list) -> None:
    for number, (length, rows, _) in enumerate(case.layouts):
        own = [gradient_input(case, number, rank) for rank in range(len(rows))]
        mean = sum(g * (r / sum(rows)) for g, r in zip(own, rows))
        where = f"all_reduce_gradient: {_with(case)} that have {rows} rows, rank"
        for rank, results in enumerate(ranks):
            got, calls, unfinished = results[number]
            _waited_for(f"{where} {rank}", calls, unfinished)
            hint = _why(got, mean, own, rank)
            gradient = torch.from_numpy(np.asarray(got))
            close(f"{where} {rank}", "the gradient", gradient, torch.from_numpy(mean), hint=hint)
        for rank, results in enumerate(ranks):
            _one_call(f"{where} {rank}", results[number][1], "Allreduce", 8 * length, len(ranks))


def _why(got: np.ndarray, mean: np.ndarray, own: list[np.ndarray], rank: int) -> str:
    """What a wrong gradient looks like."""

    def same(other):
        return np.allclose(got, other, equal_nan=True)

    if len(own) > 1 and same(own[rank]):
        return f"Rank {rank} still has its own gradient."
    if same(sum(own)):
        return "It is the sum of the ranks' means: steps get N times too long."
    if same(sum(own) / len(own)):
        return "It is divided by the ranks, but a rank with more rows must weigh more."
    with np.errstate(all="ignore"):
        ratios = (got / mean)[np.isfinite(mean) & (mean != 0)]
    if len(ratios) and np.allclose(ratios, ratios[0]):
        return f"The gradient is {ratios[0]:.3g} times the mean over the global batch."
    return "Is each rank's gradient weighted by its share of the rows, and are these summed?"


def _differing(got: np.ndarray, right: np.ndarray) -> str:
    place = int(np.argmax(~((got == right) | (np.isnan(got) & np.isnan(right)))))
    return f"at [{place}] it has {got[place]:.6g}, and {right[place]:.6g} is right."


def _waited_for(where: str, calls: list, unfinished: int) -> None:
    if unfinished:
        raise Wrong(
            f"{where}: nobody waits for {calls[-1][0]}, which has only begun when the function "
            "returns."
        )


def _one_call(where: str, calls: list, name: str, data: int, size: int) -> None:
    """One collective of this name moves so many bytes; one rank alone may call nothing."""
    if _whole(calls) != [(name, data)] and (size > 1 or calls):
        hint = ""
        if any(call[0].islower() for call, _ in calls):
            hint = "\nA method with a small letter pickles what it sends."
        elif any("ather" in call for call, _ in calls):
            hint = "\nNo rank has to hold the others' data."
        raise Wrong(
            f"{where} calls {_listed(calls)}.\nOne {name} of the whole vector, {data:,} bytes, is "
            f"enough.{hint}"
        )


def _whole(calls: list) -> list[tuple[str, int]]:
    """The calls by what they are: asynchronous ones too; a reduce-scatter with the all-gather
    after it is an all-reduce."""
    whole = []
    for name, count in calls:
        if name in ("Ibcast", "Iallreduce"):
            name = name[1:].capitalize()
        if name.startswith("Allgather") and whole and whole[-1][0].startswith("Reduce_scatter"):
            name, count = "Allreduce", max(whole.pop()[1], count)
        whole.append((name, count))
    return whole


def _listed(calls: list) -> str:
    return ", ".join(f"{call} ({count:,} bytes)" for call, count in calls[:6]) or "nothing"


def _nothing_kept(case: Case, ranks: list[list[int]]) -> None:
    for rank, held in enumerate(ranks):
        grown = [after - before for before, after in itertools.pairwise(held[1:])]
        if min(grown) > 4 * case.kept:  # half of a vector
            raise Wrong(
                f"{_with(case)}, rank {rank}: broadcast and all_reduce_gradient hold "
                f"{min(grown):,} bytes more after each step.\nWhat is put into a list, and never "
                "taken out?"
            )


def _right_training(case: Case, results: list[dict], alone: list[float]) -> None:
    size, training = len(results), case.training
    starts = range(0, training.images, training.batch)
    batches = [min(training.batch, training.images - first) for first in starts]
    fair = training.epochs * sum(-(-rows // size) for rows in batches)
    for rank, result in enumerate(results):
        where, curve = f"train: {_with(case)} and {training}, rank {rank}", result["curve"]
        if len(curve) != len(alone):
            raise Wrong(f"{where} returns {len(curve)} losses, for {len(alone)} steps.")
        if not np.allclose(curve, alone, rtol=1e-9):
            step = int(np.argmin(np.isclose(curve, alone, rtol=1e-9)))
            raise Wrong(
                f"{where}: the learning curve leaves that of one rank at step {step}:\n"
                f"{curve[step]:.6f} in place of {alone[step]:.6f}. "
                "Do all ranks hold the same parameters?"
            )
        if result["passes"] > fair + len(alone):
            raise Wrong(
                f"{where} computes gradients of {result['passes']:,} images, its share is "
                f"{fair:,}:\nthe work is not shared."
            )
        with training.given(*(np.empty(0),) * 2):
            data = 8 * digits.SIZE
        right = [("Bcast", data)] + [("Allreduce", data)] * len(alone)
        calls = _whole(result["calls"])
        if (calls != right and (size > 1 or calls)) or result["unfinished"]:
            raise Wrong(
                f"{where} calls {len(calls)} collectives: {_listed(calls)} …\nOne Bcast at the "
                f"beginning and one Allreduce in each of {len(alone)} steps, of {data:,} bytes, "
                "are enough."
            )


def _with(case: Case) -> str:
    return f"with {len(case.ranks)} rank{'s' * (len(case.ranks) > 1)}"


def _read(notes: Path, done: subprocess.CompletedProcess, path: Path, world: int) -> list:
    """What the ranks have seen, or what kept them from writing it down."""
    files = {rank: notes / f"rank{rank}.seen" for rank in range(world)}
    reports = {rank: pickle.loads(f.read_bytes()) for rank, f in files.items() if f.exists()}
    for report in reports.values():
        if "task" in report:
            raise NotImplementedError(report["task"])
    for report in reports.values():
        if "error" in report:
            raise Wrong(report["error"])
    if len(reports) == world:
        return [reports[rank]["seen"] for rank in range(world)]
    waits, loops = [], []
    for rank in range(world):
        file = notes / f"rank{rank}.hangs"
        if file.exists():
            case, collective, stack = pickle.loads(file.read_bytes())
            own = [f"line {line} ({name})" for at, line, name in stack if at == str(path)]
            place = f"{case}: one rank is in {path.name} {own[-1] if own else 'itself'}"
            (waits if collective else loops).append(place + f", in {collective}" * bool(collective))
    if waits:
        raise Wrong("the ranks wait for each other:\n" + "\n".join(dict.fromkeys(waits))
                    + "\nEvery rank must call the same collectives in the same order.")
    if loops:
        raise Wrong(f"no end: an endless loop?\n{loops[0]}")
    ended = re.search(r"rank (\d+)|Process name: \[.*,\s*(\d+)\]", done.stderr)
    last = notes / f"rank{ended and (ended[1] or ended[2])}.case"
    if last.exists():
        raise Wrong(f"{last.read_text()}: the process has ended here (code {done.returncode}).")
    raise Wrong(f"mpirun ended with code {done.returncode}:\n{done.stderr.strip()[-600:]}")
