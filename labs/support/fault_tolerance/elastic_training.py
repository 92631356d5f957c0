"""Given: the contract of exercise b of lab 13, and the judge behind its check cell.

Crews of 1 to 6 real ranks train small networks with your `train`, several crews at once; in some
cases ranks are killed, slow, or lose a connection (`fault_injection.py`). The weights must equal
those of one rank that has all rows.
"""

import dataclasses
import functools
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass

from labs.support.fault_tolerance import fault_injection
from labs.support.fault_tolerance.fault_injection import Fault
from labs.support.fault_tolerance.worker_group import Settings, alone, store_server
from utils.course.assertions import Wrong, a_number, close, same_bits
from utils.course.runner import Group, Trial
from utils.ranks.pool import Dead

WAITS = (0.35, 2.3), (1.5, 10.0)  # a crew's limit and patience, seconds; and on a busy machine
SECONDS = 18.0  # of wall-clock time until a run is ended, not counting its recoveries' waits
SLACK = 4096  # roundings: each step adds some
SMALL = 128  # bytes of the values sent with a step's gradients
LIBRARY = (
    "torchft", "torch.distributed.elastic", "DistributedDataParallel", "torch.nn.parallel",
    "utils.parallel", "utils.training", "utils.ranks",
)
VALUES = (
    "Is g the gradient of the mean over all rows of the batch, v = momentum·v + g, and\n"
    "weights -= lr·v? Before a failed step is repeated: are the gradients reset, are all rows\n"
    "divided among the remaining ranks, and do all of these hold the complete weights and\n"
    "velocity of the rank that is furthest ahead?"
)
MEETING = "Do the ranks that meet wait crew.patience before they close the list, each time?"
HANG = "Does every wait have a time limit, and does every rank reach the same call?"
NO_END = "too long a wait, or an error of yours that is caught each time? Print what you catch."


class LeftOut(Wrong):
    """A live rank was left out, or a failure was seen that was not injected."""


@dataclass(frozen=True)
class Case:
    """faults: by rank."""

    settings: Settings
    faults: dict[int, Fault]

    def __str__(self) -> str:
        s, told = self.settings, [f"rank {rank} {one}" for rank, one in sorted(self.faults.items())]
        about = f"with {s.size} rank{'s' * (s.size > 1)}, {s.steps} steps and batches of {s.batch}"
        return "\n".join([about, *told])

    @property
    def calm(self) -> range:
        """The steps that no fault can affect any more."""
        last = max((fault.step for fault in self.faults.values()), default=-3)
        return range(last + 3, self.settings.steps)


def elastic(trial: Trial) -> str:
    """Judge `train` in the file."""
    trial.forbid(LIBRARY)
    seed = trial.new_seed()
    cases, longer = (list(drawn_cases(random.Random(seed), *waits)) for waits in WAITS)
    for part in (slice(6), slice(6, None)):
        judged_together(trial, cases[part], longer[part])
    return (
        "on 1 to 6 ranks, killed before they meet, in a step, at its end, in a later meeting and\n"
        "in a new group, two at once, rank 0 too, down to a single one: after each step the\n"
        "weights equal one rank's, with the same bits on all; each row is used once per step,\n"
        "rows are divided evenly, no completed step is repeated; a late rank stays, one that is\n"
        "too late ends; a step sends the gradients once, a new group the state."
    )


# ---- cases


def drawn_cases(draw: random.Random, limit: float, patience: float) -> Iterator[Case]:
    """A case for every kind of moment; step and rank are drawn. limit, patience: the crews'."""
    killed, slow = (functools.partial(Fault, act) for act in ("is killed", "is slow"))

    def case(size: int, steps: int, faults: dict[int, Fault] | None = None) -> Case:
        uneven = [rows for rows in range(max(1, size - 2), 4 * size) if rows % size]
        settings = Settings(
            size, steps, batch=draw.choice(uneven or [3, 4, 5]),
            widths=(draw.randrange(5, 9), draw.randrange(9, 14), draw.randrange(3, 6)),
            seed=draw.getrandbits(20), lr=draw.uniform(0.02, 0.06),
            momentum=draw.uniform(0.6, 0.9), limit=limit, patience=patience,
        )
        return Case(settings, faults or {})

    def one_ahead(size: int, step: int) -> tuple[int, dict[int, Fault]]:
        """(rank, faults): this rank has completed the step, one died then, the others lost it."""
        ahead, dead = draw.sample(range(1, size), 2)
        lost = Fault("loses its connection", "in a collective of step", step)
        faults = dict.fromkeys(range(size), lost) | {dead: killed("at the end of step", step)}
        del faults[ahead]
        return ahead, faults

    yield case(1, 4)
    yield case(draw.choice([3, 4]), 6)
    step = draw.randrange(1, 4)
    yield case(2, step + 4, {draw.randrange(2): killed("in a collective of step", step)})
    step, other = draw.randrange(3), draw.choice([1, 2])  # one is left
    soon = killed("in step", step, seconds=draw.uniform(1e-4, 2e-3))
    yield case(3, step + 8, {0: soon, other: killed("in step", step + 4)})
    size, step = draw.choice([4, 5]), draw.randrange(1, 4)
    yield case(size, step + 5, one_ahead(size, step)[1])
    step = draw.randrange(2, 5)
    yield case(3, step + 1, one_ahead(3, step)[1])  # it was the last step

    size, step = draw.choice([3, 4]), draw.randrange(1, 3)  # asleep until the others continued
    asleep = slow("in step", step, seconds=limit + 2 * patience)
    yield case(size, step + 7, {draw.randrange(size): asleep})
    step, late = draw.randrange(1, 3), draw.randrange(3)
    yield case(3, step + 5, {late: slow("in step", step, seconds=limit + 0.6 * patience)})
    for count in (1, 2):  # the rank ahead dies before, then while, it hands over its state
        step = draw.randrange(1, 3)
        ahead, faults = one_ahead(4, step)
        faults[ahead] = killed("in the new group after step", step, count=count)
        yield case(4, step + 6, faults)
    step, (first, second, third) = draw.randrange(1, 3), draw.sample(range(6), 3)
    yield case(6, step + 5, {
        first: killed("in the beginning"),
        second: killed("in a collective of step", step),
        third: killed("in step", step, seconds=draw.uniform(0.2, 0.8) * patience),  # as they meet
    })


# ---- runs


def judged_together(trial: Trial, cases: list[Case], longer: list[Case]) -> None:
    """Judge all cases at once, each with its own ranks; repeat those in which a busy machine may be
    to blame, with more time."""
    again = []
    with ExitStack() as stack, ThreadPoolExecutor(len(cases)) as threads:
        groups = []
        for case in cases:  # all before the first death, which Python asks about at each start
            own = Trial(trial.path, trial.new_seed())  # threads must not draw from one generator
            groups.append(stack.enter_context(own.ranks(case.settings.size, HANG, may_die=True)))
        runs = {threads.submit(judged, *one): slower for *one, slower in zip(groups, cases, longer)}
        for run in as_completed(runs):
            try:
                run.result()
            except LeftOut:
                again.append(runs[run])
            except BaseException:  # the rest is not needed
                for group in groups:
                    group.kill()
                raise
    for case in again:
        with trial.ranks(case.settings.size, HANG, may_die=True) as group:
            judged(group, case)


def judged(group: Group, case: Case) -> None:
    server = store_server()
    settings = dataclasses.replace(case.settings, port=server.port)
    recoveries = (len(case.faults) + 1) * (6 * settings.limit + settings.patience)
    clock = SECONDS + recoveries
    try:
        ranks = group.run(str(case), fault_injection.train, settings, case.faults, clock=clock)
    except Wrong as wrong:
        raise type(wrong)(str(wrong).replace("an endless loop?", NO_END)) from None
    stayed = {}
    for rank, one in enumerate(ranks):
        fault, gone = case.faults.get(rank), settings.limit + settings.patience
        asleep = fault is not None and fault.act == "is slow" and fault.seconds > gone
        if isinstance(one, Dead):
            continue
        if one["stayed"] and asleep:
            raise LeftOut(
                f"{case}: rank {rank} wakes after the others have continued without it, and\n"
                "continues too: two crews that know nothing of each other. A rank that is not on\n"
                "a generation's one list must end."
            )
        if one["stayed"]:
            stayed[rank] = one
        elif not asleep and not (fault and fault.act == "is killed"):
            raise LeftOut(
                f"{case}: rank {rank} is alive, but train returns {one['stayed']} on it.\n{MEETING}"
            )
    try:
        right_rows(case, stayed)
        right_values(case, stayed)
        right_bytes(case, stayed)
    except Wrong as wrong:
        if max(one["again"] for one in stayed.values()) > len(case.faults):
            raise LeftOut(str(wrong)) from None
        raise


def right_rows(case: Case, stayed: dict[int, dict]) -> None:
    """No step that a remaining rank has completed is repeated; in calm steps each row is used once,
    and rows are divided evenly."""
    made: dict[int, int] = {}  # step: the first rank that completed it
    rows = {step: {rank: [] for rank in stayed} for step in range(case.settings.steps)}
    notes = [(*note, rank) for rank, one in stayed.items() for note in one["notes"]]
    for _, what, step, *more, rank in sorted(notes, key=lambda note: note[0]):
        if what == "after":
            made.setdefault(step, rank)
        elif step in made and case.faults:
            raise Wrong(
                f"{case}: rank {rank} computes step {step} after rank {made[step]} has completed "
                "it.\nWhich rank is furthest ahead, and do the others take over its state?"
            )
        else:
            rows[step][rank] += more[0]
    for step in case.calm:
        by_rank, counts = list(rows[step].values()), [len(own) for own in rows[step].values()]
        every = sorted(row for own in by_rank for row in own)
        if every != list(range(case.settings.batch)) or max(counts) > min(counts) + 1:
            raise Wrong(
                f"{case}: in step {step} the remaining ranks compute the rows {by_rank}.\n"
                f"Each of {case.settings.batch} rows goes to one of them, and they are divided "
                "evenly."
            )


def right_values(case: Case, stayed: dict[int, dict]) -> None:
    """Weights equal one rank's after each step and at the end, with the same bits on all ranks."""
    weights, losses = alone(case.settings)
    for rank, one in stayed.items():
        told = {step: more for _, what, step, *more in one["notes"] if what == "after"}
        if missing := set(case.calm) - told.keys():
            raise Wrong(f"{case}: rank {rank} does not tell crew.after of step {min(missing)}.")
        for step, (found, loss) in told.items():
            where = f"{case}: after step {step}, rank {rank}"
            close(where, "the vector of weights", found, weights[step], hint=VALUES, slack=SLACK)
            if not math.isclose(a_number(where, "the loss", loss), losses[step], rel_tol=1e-9):
                raise Wrong(
                    f"{where}: the loss is {float(loss):.9g}, and {losses[step]:.9g} is right,\n"
                    "the mean over the whole batch with the weights before the step."
                )
        where, found = f"{case}: at the end, rank {rank}", one["weights"]
        close(where, "the vector of weights", found, weights[-1], hint=VALUES, slack=SLACK)
    same_bits(
        f"{case}; at the end", "the weights", [one["weights"] for one in stayed.values()],
        "Was a step taken twice, in two groups or by one rank on its own? If one rank has\n"
        "completed a step and the others have not, how do they learn of it, even after the last?",
    )


def right_bytes(case: Case, stayed: dict[int, dict]) -> None:
    """Each rank sends the gradients once per attempt and the state once per group."""
    s, groups = case.settings, len(case.faults) + 1
    gradients = 8 * sum(p.numel() for p in s.network().parameters())
    most = (s.steps + len(case.faults)) * (2 * (s.size - 1) / s.size * gradients + SMALL)
    most += groups * (2 * gradients * (s.size > 1) + SMALL)
    for rank, one in stayed.items():
        if one["sent"] > most:
            raise Wrong(
                f"{case}: rank {rank} sends {one['sent']:,.0f} bytes; {most:,.0f} are enough:\n"
                f"in a step the gradients once ({gradients:,} bytes, all-reduced), in a new group "
                "weights and\nvelocity once, and a few values."
            )
