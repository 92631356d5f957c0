"""Given: the notebook's measurements of your answers to exercises a and d."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from labs.support.fault_tolerance import checkpointing
from utils.course.runner import load_answer
from utils.drawing import figures
from utils.planner import failures

MINUTE = 60.0
SAVE, MEMORY, RESTART, LIGHT = MINUTE, 5.0, 10 * MINUTE, 0.9  # for exercise d's machine
NUMBERS = 16_000_000  # elements of exercise e's state, 4 bytes each
TURNS = 3


@dataclass(frozen=True)
class TwoKinds:
    """lines: your plans in words; earlier: % by which memory and disk shorten a run."""

    lines: list[str]
    earlier: float


def two_kinds(file: str | Path) -> TwoKinds | None:
    """Your plans for Llama 3's failures. If `best_plan` is not written, say so and return None."""
    between = failures.LLAMA_3.between(failures.LLAMA_3.devices)
    answer, takes, lines = load_answer(Path(file).resolve()), [], []
    for name, memory, light in (("disk only", SAVE, 0.0), ("memory too", MEMORY, LIGHT)):
        given = (memory, SAVE, RESTART, between, light)
        try:
            interval, every = answer.best_plan(*given)
        except NotImplementedError as error:
            print(f"Come back when the check says [ok]. {error}")
            return None
        takes.append(checkpointing.stretch_of(interval, every, *given))
        lines.append(
            f"{name}: every {interval / MINUTE:.1f} min, 1 in {every} to disk: "
            f"{takes[-1] - 1:.1%} longer than without faults"
        )
    return TwoKinds(lines, 100 * (1 - takes[1] / takes[0]))


def saving(file: str | Path) -> None:
    """Show how long your `save`, your `save_later` if it exists, and plain writing take."""
    answer = load_answer(Path(file).resolve())
    state = {"weights": torch.rand(NUMBERS)}
    times = {"write and sync only": [], "your save": []}
    if hasattr(answer, "save_later"):
        times |= {"save_later returns": [], "save_later is done": []}
    with tempfile.TemporaryDirectory(prefix="saving-") as place:
        data = memoryview(state["weights"].numpy()).cast("B")
        for turn in range(1, TURNS + 1):
            start = time.perf_counter()
            with open(f"{place}/plain", "wb") as plain:
                plain.write(data)
                plain.flush()
                os.fsync(plain.fileno())
            times["write and sync only"].append(time.perf_counter() - start)
            start = time.perf_counter()
            try:
                answer.save(Path(place) / "run", state, turn)
            except NotImplementedError as error:
                print(f"Come back when the check of a says [ok]. {error}")
                return
            times["your save"].append(time.perf_counter() - start)
            if hasattr(answer, "save_later"):
                start = time.perf_counter()
                pending = answer.save_later(Path(place) / "later", state, turn)
                times["save_later returns"].append(time.perf_counter() - start)
                pending.wait()
                times["save_later is done"].append(time.perf_counter() - start)
    best = {name: 1e3 * min(seconds) for name, seconds in times.items()}
    figures.bars(best, unit="ms", title=f"{4 * NUMBERS / 1e6:.0f} MB, the best of {TURNS}")
    slower = best["your save"] / best["write and sync only"]
    print(f"Your save takes {slower:.1f} times as long as just writing and syncing.")
