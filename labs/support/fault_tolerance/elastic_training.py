"""Given: what exercise b of lab 13 asks for, and how its check cell judges it.

Crews of 1 to 6 real ranks train small networks with your `train`, several crews at once: some of
their ranks are killed, stopped, slow, or lose a connection (`fault_injection.py`) where the case
says so. The weights must equal those of one rank that has all rows.
"""

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from labs.support.fault_tolerance import fault_injection
from labs.support.fault_tolerance.fault_injection import Fault
from labs.support.fault_tolerance.worker_group import Settings, alone, store_server
from utils.course.assertions import Wrong, a_number, close, described, same_bits
from utils.course.runner import ASLEEP, Group, Trial
from utils.ranks.pool import Dead

LIMIT, PATIENCE = 0.7, 2.0  # seconds, of a crew
AGAIN = 4.0  # times as long where a rank that lives was left out: this machine may be busy
SECONDS = 12.0  # by the clock, until a run is ended, without what its recoveries may wait for
BUSY = 3.0  # seconds of processor time at least
SLACK = 4096  # roundings: a step adds some to those before
SMALL = 128  # bytes of the numbers that go with the gradients of a step
LIBRARY = (
    "torchft", "torch.distributed.elastic", "DistributedDataParallel", "torch.nn.parallel",
    "utils.parallel", "utils.training", "utils.ranks",
)
FORMULA = (
    "Is g the gradient of the mean over all rows of the batch, v = momentum·v + g, and\n"
    "weights -= lr·v?"
)
RECOVERY = (
    "Before a failed step is computed again: are the gradients new ones, are all rows shared out\n"
    "over the ranks that are left, do all of them hold the weights and the velocity of the\n"
    "furthest, and whole ones?"
)
MEETING = "Do those who meet wait for crew.patience until they close the list, each time?"
HANG = "Does every wait have a time limit, and does every rank get to the same call?"


class LeftOut(Wrong):
    """A rank that lives was left out, or a failure was seen that nobody made."""


@dataclass(frozen=True)
class Case:
    """faults: by rank."""

    settings: Settings
    faults: dict[int, tuple[Fault, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        s, listed = self.settings, sorted(self.faults.items())
        told = [f"rank {rank} {fault}" for rank, faults in listed for fault in faults]
        about = f"with {s.size} rank{'s' * (s.size > 1)}, {s.steps} steps and batches of {s.batch}"
        return "\n".join([about, *told])

    @property
    def number(self) -> int:
        """Of faults."""
        return sum(map(len, self.faults.values()))

    @property
    def calm(self) -> int:
        """The first step in which no fault can be felt any more."""
        return max((f.step + 3 for faults in self.faults.values() for f in faults), default=0)

    def suffer(self, act: str) -> list[int]:
        return [rank for rank, faults in self.faults.items() if any(f.act == act for f in faults)]

    def slower(self) -> "Case":
        """The same with more time for everything."""
        s = self.settings
        settings = dataclasses.replace(s, limit=AGAIN * s.limit, patience=AGAIN * s.patience)
        longer = {
            rank: tuple(dataclasses.replace(f, seconds=AGAIN * f.seconds) for f in faults)
            for rank, faults in self.faults.items()
        }
        return Case(settings, longer)


def elastic(trial: Trial) -> str:
    """Judges `train` in the file."""
    trial.forbid(LIBRARY)
    cases = list(drawn_cases(trial.draw))
    judged_together(trial, cases[:6])
    judged_together(trial, cases[6:])
    return (
        "on 1 to 6 ranks, killed in the first meeting, in a step, at its end, in a later meeting\n"
        "and in the new group, one after the other and two at once, rank 0 too, down to a single\n"
        "one: the weights after each step and in the end are those of one rank, with equal bits;\n"
        "each row is used once in a step, the rows are shared evenly, and no step that somebody\n"
        "has made is computed again;\n"
        "who is late stays, and who was stopped until the others had gone on ends;\n"
        "a step sends the gradients once, a new group the state once at most."
    )


# ---- cases


def drawn_cases(draw: random.Random) -> Iterator[Case]:
    """Every kind of moment; where and to whom is drawn."""

    def case(size: int, steps: int, faults: dict | None = None) -> Case:
        uneven = [rows for rows in range(max(1, size - 2), 4 * size) if rows % size]
        settings = Settings(
            size, steps, batch=draw.choice(uneven or [3, 4, 5]),
            widths=(draw.randrange(5, 9), draw.randrange(9, 14), draw.randrange(3, 6)),
            seed=draw.getrandbits(20), lr=draw.uniform(0.02, 0.06),
            momentum=draw.uniform(0.6, 0.9), limit=LIMIT, patience=PATIENCE,
        )
        return Case(settings, faults or {})

    def one_ahead(size: int, step: int) -> tuple[int, dict]:
        """(its rank, faults): one has made the step, one died then, the others lost it."""
        ahead, dead = draw.sample(range(1, size), 2)
        faults = {rank: (Fault("loses", "sending", step),) for rank in range(size)}
        return ahead, faults | {ahead: (), dead: (Fault("dies", "after", step),)}

    yield case(1, 4)
    yield case(draw.choice([3, 4]), 6)
    step = draw.randrange(1, 4)
    yield case(2, step + 4, {draw.randrange(2): (Fault("dies", "sending", step),)})
    step, other = draw.randrange(3), draw.choice([1, 2])
    soon = Fault("dies", "rows", step, seconds=draw.uniform(1e-4, 2e-3))
    yield case(3, step + 8, {0: (soon,), other: (Fault("dies", "rows", step + 4),)})  # one is left
    size, step = draw.choice([4, 5]), draw.randrange(1, 4)
    yield case(size, step + 5, one_ahead(size, step)[1])
    step = draw.randrange(2, 5)
    yield case(3, step + 1, one_ahead(3, step)[1])  # it was the last step

    size, step = draw.choice([3, 4]), draw.randrange(1, 3)
    yield case(size, step + 7, {draw.randrange(size): (Fault("stops", "rows", step),)})
    step, late = draw.randrange(1, 3), draw.randrange(3)
    yield case(3, step + 5, {late: (Fault("sleeps", "rows", step, LIMIT + 0.6 * PATIENCE),)})
    for count in (1, 2):  # the one that is ahead dies before, and while, it hands over its state
        step = draw.randrange(1, 3)
        ahead, faults = one_ahead(4, step)
        faults[ahead] = (Fault("dies", "handing over", step, count=count),)
        yield case(4, step + 6, faults)
    step, (first, second, third) = draw.randrange(1, 3), draw.sample(range(6), 3)
    in_the_meeting = Fault("dies", "rows", step, seconds=draw.uniform(0.2, 0.8) * PATIENCE)
    yield case(6, step + 5, {
        first: (Fault("dies", "start", seconds=draw.uniform(0, 0.1)),),
        second: (Fault("dies", "sending", step),), third: (in_the_meeting,),
    })


# ---- runs


def judged_together(trial: Trial, cases: list[Case]) -> None:
    """Each case with ranks of its own, all at once; those in which a busy machine may be to blame
    again, with more time."""
    again = []
    with ExitStack() as stack, ThreadPoolExecutor(len(cases)) as threads:
        runs = {}
        for case in cases:
            own = Trial(trial.path, trial.new_seed())  # threads must not draw from one generator
            group = stack.enter_context(own.ranks(case.settings.size, HANG, may_die=True))
            runs[threads.submit(judged, group, case)] = group, case
        for run in as_completed(runs):
            try:
                run.result()
            except LeftOut:
                again.append(runs[run][1].slower())
            except BaseException:  # nobody needs the rest
                for group, _ in runs.values():
                    group.kill()
                raise
    for case in again:
        with trial.ranks(case.settings.size, HANG, may_die=True) as group:
            judged(group, case)


def judged(group: Group, case: Case) -> None:
    server = store_server()
    settings = dataclasses.replace(case.settings, port=server.port)
    seconds = SECONDS + (case.number + 1) * (2 * settings.limit + settings.patience)
    given = settings, case.faults, group.pids
    try:
        ranks = group.run(
            str(case), fault_injection.train, *given, seconds=max(BUSY, seconds / ASLEEP)
        )
    except Wrong as wrong:
        question = "a wait longer than crew.limit or crew.patience,\nor an endless loop?"
        raise type(wrong)(str(wrong).replace("an endless loop?", question)) from None
    right_ends(case, ranks)
    stayed = {
        rank: one for rank, one in enumerate(ranks) if not isinstance(one, Dead) and one["stayed"]
    }
    try:
        right_rows(case, stayed)
        right_values(case, stayed)
        right_bytes(case, stayed)
    except Wrong as wrong:
        if max(one["recoveries"] for one in stayed.values()) > case.number:  # a busy machine's?
            raise LeftOut(str(wrong)) from None
        raise


def right_ends(case: Case, ranks: list) -> None:
    """Those live that were not killed; and they know whether they are in the crew."""
    stopped, killed = case.suffer("stops"), case.suffer("dies")
    for rank, one in enumerate(ranks):
        if isinstance(one, Dead):
            if rank not in killed:
                raise Wrong(f"{case}: rank {rank} has killed itself.")
            continue
        stayed = one["stayed"]
        if not isinstance(stayed, bool):
            raise Wrong(
                f"{case}: on rank {rank} train returns {described(stayed)}.\n"
                "True says that it has done all steps, False that the others went on without it."
            )
        if stayed and rank in stopped:
            raise Wrong(
                f"{case}: rank {rank} wakes when the others have gone on without it, and goes on\n"
                "too: two crews, which know nothing of each other. Who is not on the one list of\n"
                "a generation has to end."
            )
        if rank in stopped:
            (fault,) = case.faults[rank]
            made = [note[2] for note in one["notes"] if note[1] == "after"]
            if any(step >= fault.step for step in made):
                raise Wrong(f"{case}: rank {rank} makes a further step when it wakes, alone.")
            if not made:  # the others began without it
                raise LeftOut(f"{case}: rank {rank} makes no step before it is stopped.\n{MEETING}")
        elif rank in killed and stayed:
            raise Wrong(
                f"{case}: rank {rank} got to the end and was not killed: it calls no collective,\n"
                "computes no losses, or tells crew.after of no step."
            )
        elif rank not in killed and not stayed:
            raise LeftOut(f"{case}: rank {rank} lives, and train returns False on it.\n{MEETING}")


def right_rows(case: Case, stayed: dict[int, dict]) -> None:
    """No step is computed again that somebody left has made; in calm steps each row once, shared
    evenly."""
    made = {}  # step: (when, rank)
    for rank, one in stayed.items():
        for when, what, step, *_ in one["notes"]:
            if what == "after":
                made[step] = min(made.get(step, (when, rank)), (when, rank))
    rows = {step: {rank: [] for rank in stayed} for step in range(case.settings.steps)}
    for rank, one in stayed.items():
        for when, what, step, *more in one["notes"]:
            first, maker = made.get(step, (math.inf, None))
            if what == "losses" and when > first and case.faults:
                raise Wrong(
                    f"{case}: rank {rank} computes step {step} when rank {maker} has made it.\n"
                    "Whose state is the furthest, and do the others take it over?"
                )
            if what == "losses":
                rows[step][rank] += more[0]
    batch, share = case.settings.batch, case.settings.batch / len(stayed)
    for step in range(case.calm, case.settings.steps):
        for rank, own in rows[step].items():
            if not math.floor(share) <= len(own) <= math.ceil(share):
                raise Wrong(
                    f"{case}: in step {step} rank {rank} computes {len(own)} rows, and "
                    f"{len(stayed)} ranks have {batch} to share."
                )
        times = Counter(row for own in rows[step].values() for row in own)
        for row in range(batch):
            if times[row] != 1:
                raise Wrong(
                    f"{case}: row {row} of step {step} is computed {times[row] or 'no'} "
                    f"time{'s' * (times[row] != 1)}."
                )


def right_values(case: Case, stayed: dict[int, dict]) -> None:
    """After each step and in the end: one rank's weights, equal bits."""
    weights, losses = alone(case.settings)
    first = min((f.step for faults in case.faults.values() for f in faults), default=math.inf)
    by_step = {}
    for rank, one in stayed.items():
        told = [note[2:] for note in one["notes"] if note[1] == "after"]
        steps = [step for step, _, _ in told]
        if steps != sorted(set(steps)) or not set(steps) <= set(range(case.settings.steps)):
            raise Wrong(
                f"{case}: rank {rank} tells crew.after of the steps {steps}, in this order.\n"
                "A step is made once, and the next one comes after it."
            )
        if missing := set(range(case.calm, case.settings.steps)) - set(steps):
            raise Wrong(f"{case}: rank {rank} does not tell crew.after of step {min(missing)}.")
        for step, found, loss in told:
            where = f"{case}: after step {step}, rank {rank}"
            hint = RECOVERY if step >= first else FORMULA
            close(where, "the vector of weights", found, weights[step], hint=hint, slack=SLACK)
            loss = torch.tensor(a_number(where, "the loss", loss), dtype=torch.float64)
            right = torch.tensor(losses[step], dtype=torch.float64)
            hint = "It is the mean over the whole batch, with the weights before the step."
            close(where, "the loss", loss, right, hint=hint, slack=SLACK)
            by_step.setdefault(f"after step {step}", []).append(found)
        where, hint = f"{case}: in the end, rank {rank}", RECOVERY if case.faults else FORMULA
        close(where, "the vector of weights", one["weights"], weights[-1], hint=hint, slack=SLACK)
        by_step.setdefault("in the end", []).append(one["weights"])
    for when, found in by_step.items():
        same_bits(f"{case}; {when}", "the weights", found, hint=(
            "Was the step made twice, in two groups or by one rank alone? Where one rank has\n"
            "made a step and the others have not, who tells them, also after the last step?"
        ))


def right_bytes(case: Case, stayed: dict[int, dict]) -> None:
    """Of each rank: the gradients once an attempt, the state once a group."""
    s, tries = case.settings, case.settings.steps + case.number
    gradients = 8 * sum(p.numel() for p in s.network().parameters())
    most = tries * (2 * (s.size - 1) / s.size * gradients + SMALL)
    most += (case.number + 1) * (2 * gradients * (s.size > 1) + SMALL)
    for rank, one in stayed.items():
        if one["recoveries"] > 2 * case.number:
            raise LeftOut(
                f"{case}: rank {rank} saw {one['recoveries']} failures.\n"
                "Is a collective allowed crew.limit seconds, and does everybody come to it?"
            )
        if one["sent"] > most:
            raise Wrong(
                f"{case}: rank {rank} sends {one['sent']:,.0f} bytes, and {most:,.0f} will do:\n"
                f"in a step the gradients once ({gradients:,} bytes, all-reduced), in a new group "
                "weights and\nvelocity once, and some numbers."
            )
