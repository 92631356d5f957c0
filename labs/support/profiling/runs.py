"""Given: the functions with which the notebook runs the three programs on real ranks.

Each takes a program's file, such as "broken/slow.py" or your "slow.py". If nothing has been handed
out yet, it says so and returns None.
"""

import cProfile
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from labs.support.profiling import programs
from labs.support.profiling.machine import Machine
from labs.support.profiling.programs import RANKS, STEPS, Program
from utils.course.runner import load_answer
from utils.measure.divergence import Entry, Watch
from utils.measure.profile import tracing
from utils.ranks import RankError, Ranks

STANDS_STILL = 3.0  # seconds until a collective counts as hanging


def traced(file: str | Path, steps: int = STEPS) -> str | None:
    """Write a trace of each rank (`utils.measure.profile.tracing`), of all steps but the first two,
    and return the folder, broken/traces."""
    folder = _own_folder(file) / "broken" / "traces"
    return str(folder) if _on_ranks(file, _trace, str(folder), steps) else None


def profiled(file: str | Path, rank: int, most: int = 12) -> str | None:
    """The report of Python's own profiler (cProfile) for one rank: calls and milliseconds, with
    callees, of each function of the program and its machine, slowest first."""
    found = _on_ranks(file, _profile, STEPS)
    return found and "\n".join([f"{'calls':>7}{'ms':>10}  function", *found[rank][:most]])


def stands_still(file: str | Path) -> str | None:
    """The report of the ranks when a collective has not ended within STANDS_STILL seconds, or
    "all ranks have ended"."""
    try:
        return _on_ranks(file, _train, STEPS, timeout=STANDS_STILL) and "all ranks have ended"
    except RankError as error:
        return str(error)


def watched(file: str | Path) -> tuple[list[Entry], list[list[Entry]]] | None:
    """The entries of a run on one rank, which has all rows, and those of RANKS ranks, by rank."""
    alone = _on_ranks(file, _watch, STEPS, ranks=1)
    return alone and (alone[0], _on_ranks(file, _watch, STEPS))


def ms_a_step(file: str | Path) -> float | None:
    """The slowest rank's mean time per step after the first two steps, in ms."""
    found = _on_ranks(file, _time, 4 * STEPS)
    return found and round(max(found), 1)


def _own_folder(file: str | Path) -> Path:
    """The folder of diagnosis.py."""
    folder = Path(file).resolve().parent
    return folder.parent if folder.name == "broken" else folder


def _on_ranks(file, function: Callable, *args, ranks=RANKS, timeout=30.0) -> list[Any] | None:
    """The results of `function(train, machine, *args)`, by rank."""
    path = Path(file).resolve()
    try:
        number = programs.number_in(_own_folder(path))
        if programs.not_begun(path):
            raise NotImplementedError(f"programs.hand_out() writes {file}")
    except NotImplementedError as error:
        print(f"Nothing is handed out yet: {error}.")
        return None
    program = programs.FAULTY[path.stem](number)
    with Ranks(ranks, device="cpu", timeout=timeout) as group:
        return group.run(_perform, str(path), number, program, function, args)


# ---- on a rank


def _perform(path: str, number: int, program: Program, function: Callable, args: tuple) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ms = program.ms.get(rank) if ranks > 1 else None
    machine = Machine(rank, ranks, program.widths, number, ms, program.troubles)
    return function(load_answer(Path(path)).train, machine, *args)


def _train(train: Callable, machine: Machine, steps: int) -> list:
    return train(machine, steps)


def _trace(train: Callable, machine: Machine, folder: str, steps: int) -> None:
    with tracing(folder, steps=steps - 2, skip=2) as profiler:
        train(machine, steps, lambda model: profiler.step())


def _profile(train: Callable, machine: Machine, steps: int) -> list[str]:
    profile = cProfile.Profile()
    profile.runcall(train, machine, steps)
    rows, own = [], (train.__code__.co_filename, machine.read.__code__.co_filename)
    for (file, line, name), (_, calls, _, seconds, _) in pstats.Stats(profile).stats.items():
        if file in own and name[0] not in "_<":
            rows.append((seconds, f"{calls:>7}{1e3 * seconds:>10.1f}  {name} "
                         f"({Path(file).name}:{line})"))
    return [text for _, text in sorted(rows, reverse=True)]


def _watch(train: Callable, machine: Machine, steps: int) -> list[Entry]:
    watches = []

    def watching(model: nn.Module) -> Watch:
        watches.append(Watch(model))
        return watches[0]

    train(machine, steps, watching)
    return watches[0].entries


def _time(train: Callable, machine: Machine, steps: int) -> float:
    ends = []
    train(machine, steps, lambda model: ends.append(time.perf_counter()))
    return 1e3 * (ends[-1] - ends[1]) / (steps - 2)
