"""Given: the notebook's run of your `train` in which ranks are killed, and its clock."""

from dataclasses import dataclass
from pathlib import Path

from labs.support.fault_tolerance import fault_injection
from labs.support.fault_tolerance.fault_injection import Fault
from labs.support.fault_tolerance.worker_group import Settings, alone, store_server
from utils.course.assertions import Wrong
from utils.course.runner import Trial
from utils.drawing import figures
from utils.ranks.pool import Dead


@dataclass(frozen=True)
class Run:
    """losses: by step; seconds: when each step was completed, since the first one began; still:
    seconds from each failed step to its next attempt, as seen by a remaining rank; ended: how each
    rank ended, by rank."""

    losses: list[float]
    seconds: list[float]
    still: list[float]
    ended: list[str]


def one_rank(steps: int = 24) -> list[float]:
    """The losses of one rank with all rows."""
    return alone(Settings(1, steps))[1]


def run(
    file: str | Path, size: int = 4, steps: int = 24, killed: dict[int, int] | None = None
) -> Run | None:
    """Trains on `size` ranks. killed: {rank: the step in which it is killed}, by SIGKILL, when it
    has computed its gradients. None, and a sentence, where `train` does not get to the end."""
    server = store_server()
    settings = Settings(size, steps, port=server.port)
    moment, killed, case = "in a collective of step", killed or {}, f"{size} ranks"
    faults = {rank: Fault("is killed", moment, step) for rank, step in killed.items()}
    with Trial(file).ranks(size, may_die=True) as group:
        try:
            ranks = group.run(case, fault_injection.train, settings, faults, seconds=8.0)
        except (NotImplementedError, Wrong) as error:
            print(f"Come back when the check says [ok]. {error}")
            return None
    left = [one for one in ranks if not isinstance(one, Dead) and one["stayed"] is True]
    made = {n[2]: n for one in reversed(left) for n in one["notes"] if n[1] == "after"}
    if not left or sorted(made) != list(range(steps)):
        print("Come back when the check says [ok]: no remaining rank has completed some steps.")
        return None
    begin = min(note[0] for one in left for note in one["notes"])
    return Run(
        losses=[float(made[step][4]) for step in range(steps)],
        seconds=[made[step][0] - begin for step in range(steps)],
        still=_stood_still(left[0]["notes"]),
        ended=[_ended(one, killed.get(rank)) for rank, one in enumerate(ranks)],
    )


def draw(undisturbed: Run, run: Run) -> None:
    """The losses of both, by step and by time."""
    _, (left, right) = figures.figure("normal", columns=2)
    runs = {"no rank dies": undisturbed, "two are killed": run}
    by_step = {name: (range(len(one.losses)), one.losses) for name, one in runs.items()}
    by_time = {name: (one.seconds, one.losses) for name, one in runs.items()}
    shared = {"y": "loss", "dashed": ["two are killed"]}
    figures.curves(by_step, x="step", title="by step", ax=left, **shared)
    figures.curves(by_time, x="seconds", title="by the clock", ax=right, **shared)
    figures.show()


def _stood_still(notes: list[tuple]) -> list[float]:
    """Seconds from the first attempt at a step that has failed to the last one."""
    tries: dict[int, list[float]] = {}
    for when, what, step, *_ in notes:
        if what == "losses":
            tries.setdefault(step, []).append(when)
    return [whens[-1] - whens[0] for whens in tries.values() if len(whens) > 1]


def _ended(one: object, step: int | None) -> str:
    if isinstance(one, Dead):
        return f"killed in step {step}"
    return "completed all steps" if one["stayed"] is True else "was left out"
