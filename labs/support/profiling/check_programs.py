"""Given: what the check cells of the mended programs look at: real ranks run them, on machines with
other rows and other troubles, and compare with one rank that has all rows.

What a late rank costs is counted in questions to its machine, not in time: nothing sleeps here.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from labs.support.profiling import programs, reference, scenarios
from labs.support.profiling.check_diagnosis import LIBRARY
from labs.support.profiling.machine import EPOCH, OFTEN, ROWS, Troubles
from labs.support.profiling.programs import HUGE, OUTLIER, SPIKE, Program, Settings
from labs.support.profiling.scenarios import Case
from utils.course.assertions import Wrong, same_bits
from utils.course.runner import Trial

SIZES = (2, 3)  # ranks: one of them, besides MANY and 1; there, runs are long, too
MANY = 6  # ranks, who share the rows evenly
NEAR = 1e-10  # a loss may be so far off, as a share: sums in another order
AFTER_CLIP = 1e-5  # … once a gradient was clipped: torch adds 1e-6 to its norm, others do not
SMALL = 64  # bytes of a small message: a loss, a count
SAVING = 0.05  # seconds
SIGNS = {"send": 1, "recv": -1}
WHO = "on {} ranks, on {} and on 1"


def slow(trial: Trial) -> str:
    """Judges slow.py."""
    program = _program(trial, programs.slow)
    service = next(s for s, cause in programs.LATE.items()
                   if cause == program.truth["late"]["cause"])

    def drawn(size):
        def case(steps, **more):
            return Case(program.settings.widths, trial.new_seed(), steps, **more)

        yield case(OFTEN * trial.draw.randrange(2, 4), saving=SAVING)  # the last step saves
        if size in SIZES:
            yield case(20 + trial.draw.randrange(1, 2 * OFTEN))
        if size == 1:  # else the others would wait for the one that ends
            hot = 80 + trial.draw.randrange(4 * OFTEN)
            yield case(hot + 2 * OFTEN, hot=hot)

    few = trial.draw.choice(SIZES)
    for size, case, ranks in _runs(trial, (few, MANY, 1), drawn, scenarios.slow):
        where = f"with {size} rank{'s' * (size > 1)} and {case.steps} steps"
        if case.hot < case.steps:
            if ranks[0]["losses"] is not None:
                raise Wrong(
                    f"{where}: the machine has {scenarios.HOT:g} °C from step {case.hot} on, and "
                    "train goes on to the end.\nWhat does the machine's own text want then?"
                )
            done, lines = len(ranks[0]["weights"]), len(ranks[0]["lines"])
            if lines < done:
                raise Wrong(
                    f"{where}: it ends when the machine is too hot, after {done} steps, and the "
                    f"log has {lines} lines.\nThe log of a run that fails is the one that is "
                    "needed: `try:`, and `finally:` around what is logged late."
                )
            continue
        losses, weights = reference.slow(program.settings, case.machine(0, 1), case.steps)
        for rank, one in enumerate(ranks):
            _right_losses(where, rank, one["losses"], losses)
            _right_services(f"{where}, rank {rank}", one, losses, weights)
            _right_messages(where, one["events"], case.steps)
            _right_cost(where, one["calls"].get(service, 0), service, case.steps)
            if size > 1 and one["unseen"] >= OFTEN * 8 * sum(program.settings.sizes):
                raise Wrong(
                    f"{where}, rank {rank}: the gradients of {OFTEN} steps were sent before the "
                    "first look at the temperature."
                )
        _right_bytes(where, ranks, program.settings, case.steps)
        for step in range(case.steps):
            same_bits(where, f"the weights after step {step}", [o["weights"][step] for o in ranks])
    return (
        f"{WHO.format(few, MANY)}: the weights after each step, the checkpoints and the log of one "
        "rank;\na step sends the gradients once; who is too hot ends; and no rank pays for more "
        "than one\nstep in four what made one late."
    )


def hanging(trial: Trial) -> str:
    """Judges hanging.py."""
    program = _program(trial, programs.hanging)
    often = _constant(program, "OFTEN")

    def drawn(size):
        few = size in SIZES
        stop = trial.draw.choice((0, size - 1))  # the rank that is asked; next time the other one
        end, late = trial.draw.randrange(7, 9), trial.draw.randrange(64, 73)
        stops = {end: (stop,)} if few else {}  # else it does all steps
        cases = [
            (end + 1 + 2 * few, _troubles(trial, size, range(7), stops, infinite=end)),
            (2, Troubles(stops={0: (size - 1 - stop,)})),
        ]
        if few:
            stops = {late: (0, size - 1)}
            cases.append((late + 2, _troubles(trial, size, range(late - 7, late), stops, empty=0)))
        for steps, troubles in cases:
            yield Case(program.settings.widths, trial.new_seed(), steps, troubles)

    few, many = trial.draw.choice(SIZES), trial.draw.choice((MANY - 1, MANY))
    for size, case, ranks in _runs(trial, (few, many, 1), drawn, scenarios.hanging):
        where = f"with {size} rank{'s' * (size > 1)}{_told(case.troubles, size)}"
        right = reference.hanging(program.settings, case.machine(0, 1), case.steps, often)
        for rank, one in enumerate(ranks):
            _right_rows(f"{where}, rank {rank}", one["rows"], right)
            if one["threads"]:
                raise Wrong(
                    f"{where}: a thread that train has begun on rank {rank} goes on when train has "
                    "returned.\nWhat does it wait for?"
                )
        _right_bytes(where, ranks, program.settings, case.steps)
    return (
        f"{WHO.format(few, many)}: it comes to an end, and every rank returns what one rank does, "
        "when\nrows do not count, are far off or infinite, metrics come in another order, and one "
        "or two are\nasked to stop."
    )


def wrong(trial: Trial) -> str:
    """Judges wrong.py."""
    program = _program(trial, programs.wrong)

    def drawn(size):
        draw = trial.draw
        runs = [(6, range(6))]
        if size == 2:
            last = draw.randrange(70, 79)
            runs.append((last, range(last - 6, last)))
        for steps, among in runs:
            case = Case(program.settings.widths, trial.new_seed(), steps)
            far = zip(draw.sample(among, 4), (OUTLIER, HUGE, 0.9 * SPIKE, 1.4 * SPIKE))
            outliers = {}
            for step, factor in far:
                row = draw.randrange(ROWS)
                if factor > HUGE:
                    factor = _far_enough(case, step, row, factor)
                outliers[step] = {row: factor}
            yield Case(case.widths, case.seed, steps, Troubles(outliers=outliers))

    for size, case, ranks in _runs(trial, (2, MANY, 1), drawn, scenarios.wrong):
        where = f"with {size} rank{'s' * (size > 1)}{_told(case.troubles, size)}"
        machine = case.machine(0, 1)
        losses, weights, clipped = reference.wrong(program.settings, machine, case.steps)
        for one in ranks:
            if len(one["weights"]) < case.steps + 1:
                raise Wrong(
                    f"{where}: `watching(model)` sees {max(0, len(one['weights']) - 1)} of "
                    f"{case.steps} steps.\nLeave `with watching(model) as watch:` around them, and "
                    "`watch.step()` in each."
                )
        for step, right in enumerate(weights):
            when = f"before step {step}" if step < case.steps else "in the end"
            seen = [one["weights"][step if step < case.steps else -1] for one in ranks]
            same_bits(where, f"the weights {when}", seen)
            if not _equal(seen[0], right, clipped=step > clipped):
                raise Wrong(
                    f"{where}: {when} the weights are not those of one rank.\n"
                    "Where do `first_difference` and `first_between` see the first difference?"
                )
        for rank, one in enumerate(ranks):
            _right_losses(where, rank, one["losses"], losses, clipped)
        _right_bytes(where, ranks, program.settings, case.steps, beside=2 * SMALL)
    return (
        f"{WHO.format(2, MANY)}: before each step, and in the end, the weights of one rank, and "
        "on all\nranks the same bits; the losses are those of one rank, also when one rank has a "
        "row far off."
    )


# ---- cases


def _program(trial: Trial, make: Callable[[int], Program]) -> Program:
    trial.forbid(LIBRARY)
    return make(programs.number_in(trial.path.parent))


def _runs(
    trial: Trial, sizes: tuple[int, ...], drawn: Callable[[int], Iterator[Case]], scenario: Callable
) -> Iterator[tuple[int, Case, list[dict]]]:
    """(ranks, case, what each rank found), of some cases in one group of each size, run by run: a
    rank that has done a run waits for the others, not in the next one."""
    hang = (
        "Who has left the others, by which line? What decides there must be the same on all ranks."
    )
    for group in trial.groups(sizes, hang=hang):
        for case in list(drawn(group.size)):
            where = group.case() + _told(case.troubles, group.size)
            ranks = group.run(where, scenario, case)
            _right_ends(where, ranks)
            yield group.size, case, ranks


def _troubles(
    trial: Trial,
    size: int,
    steps: range,
    stops: dict[int, tuple[int, ...]],
    empty: int | None = None,
    infinite: int | None = None,
) -> Troubles:
    """A share that is empty, a step that is (`empty`, or one of these), a row far off, beside one
    that is farther off and does not count, and metrics turned round: in different steps."""
    draw = trial.draw
    one, all_, far, turned = draw.sample(steps, 4)
    rank, row = draw.randrange(size), draw.randrange(ROWS)
    silent = [n for n in range(ROWS) if n % size == rank and n != row]
    outliers = {far: {row: OUTLIER, silent[0]: 2 * OUTLIER}}
    if infinite is not None:
        outliers[infinite] = {draw.randrange(ROWS): math.inf}
    return Troubles(
        silent={
            one: tuple(range(rank, ROWS, size)),
            all_ if empty is None else empty: tuple(range(ROWS)),
            far: tuple(silent[:2]),
        },
        outliers=outliers,
        turned={turned: draw.randrange(size)},
        stops=stops,
        leader=draw.randrange(size),
    )


def _far_enough(case: Case, step: int, row: int, loss: float) -> float:
    """The factor that makes the mean loss of a step so large."""
    y = case.machine(0, 1).rows(step)[1]
    return (y[row].abs().max() * (loss * y.numel() / y[row].square().sum()).sqrt()).item()


def _told(troubles: Troubles, size: int) -> str:
    """What happens in a case, in words."""
    found = [f"rows that do not count in steps {sorted(troubles.silent)}"] * bool(troubles.silent)
    far = [f"{step} ({', '.join(f'row {row} of rank {row % size}' for row in rows)})"
           for step, rows in sorted(troubles.outliers.items())]
    found += [f"rows far off in steps {', '.join(far)}"] * bool(far)
    found += [f"step {s}: metrics turned on rank {r}" for s, r in troubles.turned.items()]
    found += [f"rank{'s' * (len(r) > 1)} {' and '.join(map(str, r))} asked to stop in step {s}"
              for s, r in troubles.stops.items()]
    return "".join(f", {one}" for one in found)


def _constant(program: Program, name: str) -> int:
    line = next(one for one in program.text.splitlines() if one.startswith(f"{name} = "))
    return int(line.split(" = ")[1])


# ---- what is right


def _equal(found: torch.Tensor, right: torch.Tensor, clipped: bool = False) -> bool:
    """The same numbers, but for sums in another order."""
    near = (AFTER_CLIP, 0.1 * AFTER_CLIP) if clipped else (1e-9, 1e-11)
    return found.shape == right.shape and torch.allclose(found, right, *near)


def _right_ends(where: str, ranks: list[dict]) -> None:
    """What one rank calls, all others answer."""
    calls = [
        Counter((op, group) for op, _, group, _ in one["events"] if group and op not in SIGNS)
        for one in ranks
    ]
    for rank, own in enumerate(calls):
        for op, group in own.keys() | calls[0].keys():
            mine, first = own[op, group], calls[0][op, group]
            if mine != first:
                raise Wrong(
                    f"{where}: rank {rank} calls {op} {mine} times, and rank 0 {first} times: "
                    "somebody is left without an answer."
                )
    between = Counter()
    for op, _, group, to in (event for one in ranks for event in one["events"]):
        between[group, to] += SIGNS.get(op, 0)
    for (_, to), left in between.items():
        if left:
            more, less = ("sent", "received")[:: 1 if left > 0 else -1]
            whom = "" if to is None else f" to rank {to}"
            raise Wrong(
                f"{where}: messages{whom}: {abs(left)} more {more} than {less}: somebody is left "
                "without an answer."
            )


def _right_losses(
    where: str, rank: int, found: list[float], right: list[float], clipped: float = math.inf
) -> None:
    if len(found) != len(right):
        raise Wrong(f"{where}, rank {rank}: {len(found)} losses of {len(right)} steps.")
    for step, (mine, one) in enumerate(zip(found, right)):
        if not math.isclose(mine, one, rel_tol=NEAR if step <= clipped else AFTER_CLIP):
            raise Wrong(
                f"{where}, rank {rank}: the loss of step {step} is {mine:.9g}; one rank that has "
                f"all rows finds {one:.9g}."
            )


def _right_services(where: str, one: dict, losses: list[float], weights: list) -> None:
    if len(one["weights"]) != len(losses):
        raise Wrong(
            f"{where}: `after` is called {len(one['weights'])} times; each step calls it once."
        )
    for step, (mine, right) in enumerate(zip(one["weights"], weights)):
        if not _equal(mine, right):
            raise Wrong(f"{where}: `after` sees other weights than one rank has after step {step}.")
    for step in range(OFTEN - 1, len(losses), OFTEN):
        if step not in one["saved"]:
            raise Wrong(
                f"{where}: there is no checkpoint of step {step} when train returns; it is needed."
            )
        if not _equal(one["saved"][step], weights[step]):
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
        ops = ", ".join(sorted({event[0] for event in events}))
        raise Wrong(
            f"{where}: a rank calls {len(events) / steps:.3g} collectives a step ({ops}).\n"
            "The gradients need one; the loss may have one of its own."
        )


def _right_bytes(
    where: str, ranks: list[dict], settings: Settings, steps: int, beside: int = 4 * SMALL
) -> None:
    """All ranks together send the gradients once a step, the weights once before, in any way.

    beside: bytes that may be all-reduced besides, a step."""
    gradients, others = 8 * sum(settings.sizes), len(ranks) - 1
    needed = 2 * others * (gradients + beside)  # to all-reduce: to one and back, or in a ring
    sent = sum(event[1] for one in ranks for event in one["events"])
    if sent > steps * needed + others * gradients + 1e-6:
        raise Wrong(
            f"{where}: all ranks together send {sent / steps:,.0f} bytes a step; to all-reduce "
            f"gradients of {gradients:,} bytes they need {needed:,}.\nWhat else goes round, or "
            "goes twice?"
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
        few = [f"{one[:3]} … {one[-3:]}" if len(one) > 12 else one for one in steps]
        raise Wrong(f"{where}: it returns the steps {few[0]}; one rank does {few[1]}.")
    for mine, one in zip(found, right):
        if mine.keys() != one.keys():
            odd = sorted(mine.keys() ^ one.keys())
            raise Wrong(
                f"{where}, step {one['step']}: {', '.join(odd)} is on one side only: it returns "
                f"{', '.join(mine)}; one rank {', '.join(one)}."
            )
        for key, value in one.items():
            both_nan = math.isnan(value) and math.isnan(mine[key])
            if not both_nan and not math.isclose(mine[key], value, rel_tol=NEAR, abs_tol=1e-12):
                raise Wrong(
                    f"{where}, step {one['step']}: {key} is {mine[key]:.9g}; one rank finds "
                    f"{value:.9g}."
                )
