"""Given: what the check cell of exercise 01a looks at.

One `mpirun` starts four ranks that run your functions and note results, messages and bytes
(mpi_rank.py). They are compared here with training on one rank, without any MPI.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from labs.support.data_parallel import digits
from labs.support.data_parallel.mpi_rank import BATCH, EPOCHS, LR, RANKS, ROWS
from utils.course.checks import Wrong

LIMIT = 60.0  # seconds until mpirun is ended
HANG = 15.0  # seconds until the ranks of a check count as waiting for each other


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
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT)
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


def data_parallel(path: Path) -> str:
    """Judges the three functions and the training in the file."""
    with tempfile.TemporaryDirectory() as notes:
        program = str(Path(__file__).with_name("mpi_rank.py"))
        done = mpirun(max(RANKS), program, str(path), notes, str(HANG), folder=path.parent)
        _show(done.stdout)
        reports = _read(Path(notes), done, path)
    alone = train_alone()
    for size in RANKS:
        ranks = [report[str(size)] for report in reports[:size]]
        _right_shards([rank["shards"] for rank in ranks], size)
        _right_broadcast([rank["broadcast"] for rank in ranks], size)
        _right_gradient([rank["gradient"] for rank in ranks], size)
        _right_training([rank["train"] for rank in ranks], size, alone)
    return (
        "the learning curve of 1, 2, 3 and 4 ranks is that of one rank;\n"
        "1797 images and 7, 3, 1 or 0 rows are shared out, every row once;\n"
        f"one broadcast, then one all-reduce of {digits.SIZE * 8:,} bytes a step on each rank."
    )


def _show(printed: str, most: int = 20) -> None:
    """What the answer prints, shortened."""
    lines = printed.splitlines()
    if lines:
        print("\n".join([*lines[:most], "…"] if len(lines) > most else lines))


def train_alone() -> list[float]:
    """The learning curve of one process that has never heard of ranks."""
    images, labels = digits.load()
    parameters, curve = digits.new_parameters(seed=0), []
    for epoch in range(EPOCHS):
        order = np.random.default_rng(epoch).permutation(len(images))
        for first in range(0, len(images), BATCH):
            rows = order[first : first + BATCH]
            parameters -= LR * digits.loss_and_gradient(parameters, images[rows], labels[rows])[1]
            curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
    return curve


# ── what is wrong, in words ───────────────────────────────────────────────────────────────────


def _right_shards(shards: list[list], size: int) -> None:
    for case, rows in enumerate(ROWS):
        slices = [rank[case] for rank in shards]
        covered = [row for first, last in slices for row in range(first, last)]
        if covered != list(range(rows)):
            twice = len(covered) > len(set(covered))
            what = "some rows belong to several ranks" if twice else (
                f"{rows - len(set(covered))} rows belong to no rank")  # fmt: skip
            raise Wrong(f"shard: {rows} rows on {size} ranks are cut into {slices}: {what}.")
        lengths = [last - first for first, last in slices]
        if max(lengths) - min(lengths) > 1:
            raise Wrong(
                f"shard: {rows} rows on {size} ranks are cut into {lengths}: the others wait for "
                "the longest.\nLengths may differ by one at most."
            )


def _right_broadcast(results: list[dict], size: int) -> None:
    for rank, result in enumerate(results):
        if not result["same"]:
            raise Wrong(
                f"broadcast: with {size} ranks, rank {rank} does not have rank 0's parameters "
                "afterwards:\neach rank would train another model."
            )
    for rank, result in enumerate(results):
        _one_call("broadcast", result["calls"], size, rank)


def _right_gradient(results: list[dict], size: int) -> None:
    for rank, result in enumerate(results):
        got, mean = np.array(result["got"]), np.array(result["mean"])
        if not np.allclose(got, mean, rtol=1e-9, atol=1e-12):
            case = f"all_reduce_gradient: with {size} ranks that have {result['rows']} rows,"
            ratios = got / mean
            if np.allclose(got, result["own"]):
                hint = f"rank {rank} still has its own gradient."
            elif np.allclose(got, result["sum"]):
                hint = "you return the sum of the ranks' means: steps get N times too long."
            elif np.allclose(got, np.array(result["sum"]) / size):
                hint = "you divide by the ranks, but a rank with more rows must weigh more."
            elif np.allclose(ratios, ratios[0]):
                hint = f"the gradient is {ratios[0]:.3g} times the mean over the global batch."
            else:
                hint = f"rank {rank} has not the mean over the global batch."
            raise Wrong(f"{case}\n{hint}")
        _one_call("all_reduce_gradient", result["calls"], size, rank)


def _one_call(name: str, calls: list, size: int, rank: int) -> None:
    data = digits.SIZE * 8
    moved = sum(count for _, count in calls)
    if size > 1 and (len(calls) != 1 or moved != data):
        listed = ", ".join(f"{call} ({count:,} bytes)" for call, count in calls) or "nothing"
        raise Wrong(
            f"{name}: with {size} ranks, rank {rank} calls {listed}.\nOne collective of the whole "
            f"vector, {data:,} bytes, is enough, and no rank has to hold the others' data."
        )


def _right_training(results: list[dict], size: int, alone: list[float]) -> None:
    for rank, result in enumerate(results):
        if not np.allclose(result["curve"], alone, rtol=1e-9):
            step = int(np.argmin(np.isclose(result["curve"], alone, rtol=1e-9)))
            raise Wrong(
                f"train: with {size} ranks the learning curve leaves that of one rank at step "
                f"{step}:\n{result['curve'][step]:.6f} in place of {alone[step]:.6f}. "
                "Do all ranks hold the same parameters?"
            )
        fair = len(alone) + sum(-(-rows // size) for rows in result["batches"])
        if result["passes"] > fair:
            raise Wrong(
                f"train: with {size} ranks, rank {rank} computes gradients of {result['passes']:,} "
                f"images, its share is {fair - len(alone):,}:\nthe work is not shared."
            )
        extra = len(result["calls"]) - len(alone) - 1
        if size > 1 and extra:
            raise Wrong(f"train: with {size} ranks, rank {rank} makes {extra:+d} collectives more "
                        "than one a step and one before the first.")  # fmt: skip


def _read(notes: Path, done: subprocess.CompletedProcess, path: Path) -> list[dict]:
    """The notes of the ranks, or what kept them from writing some."""
    files = [notes / f"rank{rank}.json" for rank in range(max(RANKS))]
    reports = [json.loads(file.read_text()) for file in files if file.exists()]
    for report in reports:
        if "task" in report:
            raise NotImplementedError(report["task"])
    for report in reports:
        if "error" in report:
            raise Wrong(report["error"])
    if len(reports) == max(RANKS):
        return reports
    waits = []
    for rank in range(max(RANKS)):
        stack = notes / f"stack{rank}"
        text = stack.read_text() if stack.exists() else ""
        lines = re.findall(rf'"[^"]*{re.escape(path.name)}", line (\d+) in (\w+)', text)
        if lines:
            waits.append(f"rank {rank} waits in {lines[0][1]}, {path.name} line {lines[0][0]}")
    if waits:
        raise Wrong("the ranks wait for each other:\n" + "\n".join(waits)
                    + "\nEvery rank must call the same collectives in the same order.")  # fmt: skip
    raise Wrong(f"mpirun ended with code {done.returncode}:\n{done.stderr.strip()[-600:]}")
