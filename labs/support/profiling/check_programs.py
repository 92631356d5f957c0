"""Given: what the check cells of the mended programs look at: real ranks run them, on machines with
other rows and other troubles, and compare with one rank that has all rows.

What a late rank costs is counted in questions to its machine, not in time: nothing sleeps here.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch

from labs.support.profiling import programs, reference, scenarios
from labs.support.profiling.check_diagnosis import LIBRARY
from labs.support.profiling.machine import EPOCH, OFTEN, ROWS, Troubles
from labs.support.profiling.programs import HUGE, OUTLIER, Program, Settings
from labs.support.profiling.scenarios import Case
from utils.course.expect import Wrong, same_bits
from utils.course.trial import Trial

SIZES = (2, 4, 1)  # ranks
NEAR = 1e-10  # a loss may be so far off, as a share: sums in another order
SMALL = 64  # bytes of a small message: a loss, a count


def slow(trial: Trial) -> str:
    """Judges slow.py."""
    program = _program(trial, programs.slow)
    service = next(s for s, cause in programs.LATE.items()
                   if cause == program.truth["late"]["cause"])  # fmt: skip

    def drawn(size, number):
        steps = trial.draw.randrange(2, 4) * OFTEN + trial.draw.randrange(OFTEN)
        return Case(program.settings.widths, trial.new_seed(), steps, Troubles())

    for size, case, ranks in _runs(trial, drawn, scenarios.slow):
        where = f"with {size} rank{'s' * (size > 1)} and {case.steps} steps"
        losses, saved = reference.slow(program.settings, case.machine(0, 1), case.steps)
        for rank, one in enumerate(ranks):
            _right_losses(where, rank, one["losses"], losses)
            _right_services(f"{where}, rank {rank}", one, losses, saved)
            _right_messages(where, one["events"], case.steps)
            _right_bytes(where, one["events"], program.settings, case.steps, size)
            _right_cost(where, one["calls"].get(service, 0), service, case.steps)
        for step in saved:
            same_bits(where, f"the weights of step {step}", [one["saved"][step] for one in ranks])
    return (
        "the losses, the checkpoints and the log of one rank on 2, 4 and 1; a step sends the\n"
        "gradients once; and no rank pays for more than one step in four what made one late."
    )


def hanging(trial: Trial) -> str:
    """Judges hanging.py."""
    program = _program(trial, programs.hanging)
    often = _constant(program, "OFTEN")

    def drawn(size, number):
        troubles = _troubles(trial, size, stops=number == 0)
        return Case(program.settings.widths, trial.new_seed(), 10, troubles)

    for size, case, ranks in _runs(trial, drawn, scenarios.hanging):
        where = f"with {size} rank{'s' * (size > 1)}{_told(case.troubles, size)}"
        right = reference.hanging(program.settings, case.machine(0, 1), case.steps, often)
        for rank, one in enumerate(ranks):
            _right_rows(f"{where}, rank {rank}", one["rows"], right)
            _right_bytes(where, one["events"], program.settings, case.steps, size)
    return (
        "it comes to an end on 2, 4 and 1 ranks, and every rank returns what one rank does, when\n"
        "shares are empty, gradients large, metrics in another order, and one is asked to stop."
    )


def wrong(trial: Trial) -> str:
    """Judges wrong.py."""
    program = _program(trial, programs.wrong)

    def drawn(size, number):
        steps = trial.draw.sample(range(1, 7), 2)
        outliers = {s: (trial.draw.randrange(ROWS), f) for s, f in zip(steps, (OUTLIER, HUGE))}
        troubles = Troubles(outliers=outliers)
        return Case(program.settings.widths, trial.new_seed(), 8, troubles)

    for size, case, ranks in _runs(trial, drawn, scenarios.wrong):
        where = f"with {size} rank{'s' * (size > 1)}{_told(case.troubles, size)}"
        losses, weights = reference.wrong(program.settings, case.machine(0, 1), case.steps)
        for one in ranks:
            if len(one["weights"]) < case.steps + 1:
                raise Wrong(
                    f"{where}: `watching(model)` sees {max(0, len(one['weights']) - 1)} of "
                    f"{case.steps} steps.\nLeave `with watching(model) as watch:` around them, and "
                    "`watch.step()` in each."
                )
        for step, right in enumerate(weights):
            seen = [one["weights"][step] for one in ranks]
            same_bits(where, f"the weights before step {step}", seen)
            if not _equal(seen[0], right):
                raise Wrong(
                    f"{where}: before step {step} the weights are not those of one rank.\n"
                    "Where do `first_difference` and `first_between` see the first difference?"
                )
        same_bits(where, "the weights at the end", [one["weights"][-1] for one in ranks])
        for rank, one in enumerate(ranks):
            _right_losses(where, rank, one["losses"], losses)
            _right_bytes(where, one["events"], program.settings, case.steps, size)
    return (
        "on 2, 4 and 1 ranks, before each step, the weights of one rank, and on all ranks the\n"
        "same bits; the losses are those of one rank, also when one rank has a row far off."
    )


# ---- cases


def _program(trial: Trial, make: Callable[[int], Program]) -> Program:
    trial.by_hand(LIBRARY)
    return make(programs.number_in(trial.path.parent))


def _runs(trial: Trial, drawn: Callable[[int, int], Case], scenario: Callable):
    """(ranks, case, what each rank found), of two cases in one group of each size."""
    hang = (
        "Who has left the others, by which line? What decides there must be the same on all ranks."
    )
    for group in trial.groups(SIZES, hang=hang):
        cases = [drawn(group.size, number) for number in range(2)]
        told = [_told(case.troubles, group.size) for case in cases]
        either = f" (run 1{told[0]}; run 2{told[1]})" if any(told) else ""
        found = group.run(group.case() + either, scenario, cases)
        for number, case in enumerate(cases):
            yield group.size, case, [one[number] for one in found]


def _troubles(trial: Trial, size: int, stops: bool) -> Troubles:
    """Empty shares, a row far off, turned metrics, a request to stop: at different steps."""
    draw = trial.draw
    one, all_, far, turned = draw.sample(range(1, 7), 4)
    stop = draw.randrange(7, 9)  # of 10 steps, after all else
    rank = draw.randrange(size)
    return Troubles(
        silent={one: tuple(range(rank, ROWS, size)), all_: tuple(range(ROWS))},
        outliers={far: (draw.randrange(ROWS), OUTLIER)},
        turned={turned: draw.randrange(size)},
        stops={stop: draw.randrange(size)} if stops else {},
        leader=draw.randrange(size),
    )


def _told(troubles: Troubles, size: int) -> str:
    """What happens in a case, in words."""
    found = [f"empty shares in steps {sorted(troubles.silent)}"] * bool(troubles.silent)
    found += [f"step {s}: row {row}, of rank {row % size}, far off"
              for s, (row, _) in troubles.outliers.items()]  # fmt: skip
    found += [f"step {s}: metrics turned on rank {r}" for s, r in troubles.turned.items()]
    found += [f"rank {r} asked to stop in step {s}" for s, r in troubles.stops.items()]
    return "".join(f", {one}" for one in found)


def _constant(program: Program, name: str) -> int:
    line = next(one for one in program.text.splitlines() if one.startswith(f"{name} = "))
    return int(line.split(" = ")[1])


# ---- what is right


def _equal(found: torch.Tensor, right: torch.Tensor) -> bool:
    """The same numbers, but for sums in another order."""
    return found.shape == right.shape and torch.allclose(found, right, rtol=1e-9, atol=1e-11)


def _right_losses(where: str, rank: int, found: list[float], right: list[float]) -> None:
    if len(found) != len(right):
        raise Wrong(f"{where}, rank {rank}: {len(found)} losses of {len(right)} steps.")
    for step, (mine, one) in enumerate(zip(found, right)):
        if not math.isclose(mine, one, rel_tol=NEAR):
            raise Wrong(
                f"{where}, rank {rank}: the loss of step {step} is {mine:.9g}; one rank that has "
                f"all rows finds {one:.9g}."
            )


def _right_services(where: str, one: dict, losses: list[float], saved: dict) -> None:
    if one["ended"] != len(losses):
        raise Wrong(f"{where}: `after` is called {one['ended']} times; each step calls it once.")
    for step, weights in saved.items():
        if step not in one["saved"]:
            raise Wrong(f"{where}: there is no checkpoint of step {step}; it is needed.")
        if not _equal(one["saved"][step], weights):
            raise Wrong(f"{where}: the checkpoint of step {step} has not the weights after it.")
    lines = [f"step {step}: loss {loss:.6f}" for step, loss in enumerate(losses)]
    if len(one["lines"]) != len(lines) or any(
        a.split(":")[0] != b.split(":")[0] or abs(_last(a) - _last(b)) > 2e-6
        for a, b in zip(one["lines"], lines)
    ):
        raise Wrong(
            f"{where}: the log has {len(one['lines'])} lines; every step's must be there at the "
            f'end, in order,\nlike "{lines[0]}".'
        )
    looks = [-1, *one["looked_at"], len(losses)]
    if any(b - a > OFTEN for a, b in pairwise(looks)):
        raise Wrong(
            f"{where}: the temperature is looked at in steps {one['looked_at']}: {OFTEN} steps or "
            "more without a look."
        )


def _last(line: str) -> float:
    try:
        return float(line.split()[-1])
    except (ValueError, IndexError):
        return math.inf


def _right_messages(where: str, events: list, steps: int) -> None:
    if len(events) > 2 * steps + 6:  # DDP has five more when it begins
        ops = ", ".join(sorted({op for op, _ in events}))
        raise Wrong(
            f"{where}: a rank calls {len(events) / steps:.3g} collectives a step ({ops}).\n"
            "The gradients need one; the loss may have one of its own."
        )


def _right_bytes(where: str, events: list, settings: Settings, steps: int, size: int) -> None:
    """The gradients once a step, and the weights once before, by a ring."""
    gradients = 8 * sum(settings.sizes)
    ring = 2 * (size - 1) / size * (gradients + 4 * SMALL)
    sent = sum(sent for _, sent in events)
    if sent > steps * ring + (size - 1) * gradients + 1e-6:
        raise Wrong(
            f"{where}: a rank sends {sent / steps:,.0f} bytes a step; to all-reduce gradients of "
            f"{gradients:,} bytes it needs {ring:,.0f}.\nWhat else goes round, or goes twice?"
        )


def _right_cost(where: str, calls: int, service: str, steps: int) -> None:
    """calls: questions to the service that makes a rank late."""
    needed = EPOCH if service == "unpack" else steps // OFTEN + 1
    if calls > needed:
        raise Wrong(
            f"{where}: what made a rank late is still paid for {calls} times in {steps} steps; "
            f"{needed} times are enough.\nWhat does the machine's own text say of the service?"
        )


def _right_rows(where: str, found: list[dict], right: list[dict]) -> None:
    steps = [[int(row.get("step", -1)) for row in rows] for rows in (found, right)]
    if steps[0] != steps[1]:
        raise Wrong(f"{where}: it returns the steps {steps[0]}; one rank does {steps[1]}.")
    for mine, one in zip(found, right):
        if mine.keys() != one.keys():
            odd = sorted(mine.keys() ^ one.keys())
            raise Wrong(
                f"{where}, step {one['step']}: {', '.join(odd)} is on one side only: it returns "
                f"{', '.join(mine)}; one rank {', '.join(one)}."
            )
        for key, value in one.items():
            if not math.isclose(mine[key], value, rel_tol=NEAR, abs_tol=1e-12):
                raise Wrong(
                    f"{where}, step {one['step']}: {key} is {mine[key]:.9g}; one rank finds "
                    f"{value:.9g}."
                )
