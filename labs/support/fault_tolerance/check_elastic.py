"""Given: what the check of exercise b looks at.

Crews of 1 to 6 real ranks train small networks with your `train`, several crews at once: some of
their ranks are killed, stopped, late, or lose a connection (`fates.py`) where the case says so. The
weights must equal those of one rank that has all rows.
"""

import dataclasses
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from labs.support.fault_tolerance import disturbed
from labs.support.fault_tolerance.crew import Settings, alone, store_server
from labs.support.fault_tolerance.fates import Fate
from utils.course.assertions import Wrong, a_number, bitwise_equal, close, described
from utils.course.runner import Group, Trial
from utils.ranks.pool import Dead, RankError

LIMIT, PATIENCE = 0.7, 2.0  # seconds, of a crew
LATE = 0.43  # of the patience: more than LIMIT, and with LIMIT less than all of it
AGAIN = 4.0  # times as long where a rank that lives was left out: this machine may be busy
SECONDS = 12.0  # until a run is ended, beside what its recoveries may wait for
SLACK = 4096  # roundings: a step adds some to those before
SMALL = 128  # bytes of the numbers that go beside the gradients of a step
MEETING = 1024  # bytes that a rank says and reads in a meeting
LIBRARY = (
    "torchft", "torch.distributed.elastic", "DistributedDataParallel", "torch.nn.parallel",
    "utils.parallel", "utils.training", "utils.ranks", "labs.support.fault_tolerance.fates",
    "labs.support.fault_tolerance.disturbed", "labs.support.fault_tolerance.check_elastic",
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
HANG = "Does every wait have a time limit, and does every rank get to the same call?"


class LeftOut(Wrong):
    """A rank that lives was left out, or a failure was seen that nobody made."""


@dataclass(frozen=True)
class Case:
    """fates: by rank."""

    settings: Settings
    fates: dict[int, tuple[Fate, ...]] = field(default_factory=dict)

    def __str__(self):
        s, by_fate = self.settings, {}
        for rank, fates in sorted(self.fates.items()):
            for fate in fates:
                by_fate.setdefault(fate, []).append(rank)
        told = [fate.of(ranks) for fate, ranks in by_fate.items()]
        about = f"with {s.size} rank{'s' * (s.size > 1)}, {s.steps} steps and batches of {s.batch}"
        return about + ";\n" * bool(told) + ",\n".join(told)

    def lost(self, act: str) -> list[int]:
        """The ranks that one fate ends."""
        return [rank for rank, fates in self.fates.items() if any(f.act == act for f in fates)]

    def quiet(self, step: int) -> bool:
        """Whether nothing happens in this step, nor can what has happened before still be felt."""
        near = [f.step for fates in self.fates.values() for f in fates]
        return all(step not in (one, one + 1, one + 2) for one in near)

    def members(self, step: int) -> list[int]:
        """Who is left in a quiet step."""
        gone = {
            rank
            for rank, fates in self.fates.items()
            for f in fates
            if f.act in ("dies", "stops") and f.step < step
        }
        return [rank for rank in range(self.settings.size) if rank not in gone]

    def slower(self) -> "Case":
        """The same with more time for everything."""
        s = self.settings
        settings = dataclasses.replace(s, limit=AGAIN * s.limit, patience=AGAIN * s.patience)
        fates = {
            rank: tuple(dataclasses.replace(f, seconds=AGAIN * f.seconds) for f in theirs)
            for rank, theirs in self.fates.items()
        }
        return Case(settings, fates)


def elastic(trial: Trial) -> str:
    """Judges `train` in the file."""
    trial.forbid(LIBRARY)
    draw = Draw(trial.draw)
    taken = _judged_together(trial, draw.first_round())
    _judged_together(trial, draw.second_round(taken))
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


class Draw:
    """Two rounds of cases. Every kind of moment is in each check, where and to whom is drawn."""

    def __init__(self, draw: random.Random):
        self._draw = draw
        self._moments = iter(draw.sample(["rows", "after", *2 * ["before", "during"]], 6))

    def first_round(self) -> list[Case]:
        """Deaths in steps."""
        draw = self._draw
        cases = [self._case(1, draw.randrange(3, 6)), self._case(draw.choice([3, 4]), 6)]
        step = draw.randrange(1, 4)
        cases.append(self._case(2, step + 4, {draw.randrange(2): (self._death(step),)}))
        step, later = draw.randrange(3), draw.choice([1, 2])
        fates = {0: (self._death(step),), later: (self._death(step + 4),)}
        cases.append(self._case(3, step + 8, fates))  # one is left, and it is not rank 0
        size, step = draw.choice([4, 5]), draw.randrange(1, 4)
        _, _, fates = self._one_ahead(size, step)
        cases.append(self._case(size, step + 4, fates))
        step, (one, other) = draw.randrange(1, 4), self._some(6, 2)
        fates = {one: (self._death(step),), other: (self._death(step, "before"),)}
        cases.append(self._case(6, step + 5, fates))
        step, (one, late) = draw.randrange(1, 3), self._some(3, 2)
        fates = {
            one: (Fate("fails", "before", step, share=draw.random()),),
            late: (Fate("waits", "meeting", step, seconds=LATE * PATIENCE),),
        }
        cases.append(self._case(3, step + 5, fates))  # a failure of which nobody died
        return cases

    def second_round(self, taken: int) -> list[Case]:
        """What is harder. taken: collectives of a recovery in which a state was handed over."""
        draw, cases = self._draw, []
        size, step = draw.choice([3, 4]), draw.randrange(2, 5)
        _, _, fates = self._one_ahead(size, step)
        cases.append(self._case(size, step + 1, fates))  # it was the last step
        size, step = draw.choice([3, 4]), draw.randrange(1, 3)
        (stopped,) = self._some(size, 1)
        fates = {stopped: (Fate("stops", draw.choice(["rows", "before"]), step),)}
        cases.append(self._case(size, step + 7, fates))
        counts = {max(0, taken - 1), draw.randrange(max(1, taken))}
        for size, count in zip((5, 4), sorted(counts, reverse=True)):
            step = draw.randrange(1, 3)
            ahead, dead, fates = self._one_ahead(size, step)
            torn = draw.choice([rank for rank in range(size) if rank not in (ahead, dead)])
            fates[ahead] = (Fate("dies", "handing over", step, count=count + 1),)
            fates[torn] += (Fate("fails", "handing over", step, count=count),)
            cases.append(self._case(size, step + 6, fates))
        step, (first, second) = draw.randrange(1, 3), self._some(6, 2)
        start = Fate("dies", "start", -1, count=draw.randrange(1, 6))
        cases.append(self._case(6, step + 4, {first: (start,), second: (self._death(step),)}))
        for size, share in zip((3, 5), draw.sample([0.0, 0.5, 1.0], 2)):
            step, (first, second) = draw.randrange(1, 3), self._some(size, 2)
            later = Fate("dies", "meeting", step, share=share)
            fates = {first: (self._death(step, "before"),), second: (later,)}
            cases.append(self._case(size, step + 5, fates))
        return cases

    def _case(self, size, steps, fates=None):
        draw = self._draw
        uneven = [rows for rows in range(max(1, size - 2), 4 * size) if rows % size]
        settings = Settings(
            size=size,
            steps=steps,
            batch=draw.choice(uneven or [3, 4, 5]),
            widths=(draw.randrange(5, 9), draw.randrange(9, 14), draw.randrange(3, 6)),
            seed=draw.getrandbits(20),
            lr=draw.uniform(0.02, 0.06),
            momentum=draw.uniform(0.6, 0.9),
            limit=LIMIT,
            patience=PATIENCE,
        )
        return Case(settings, fates or {})

    def _some(self, size, number):
        return self._draw.sample(range(size), number)

    def _death(self, step, moment=None):
        """In a step."""
        draw, moment = self._draw, moment or next(self._moments, "before")
        return Fate("dies", moment, step, share=draw.random(), seconds=draw.uniform(0, 2e-3))

    def _one_ahead(self, size, step):
        """(who is ahead, who is dead, fates): one has made the step, the others lost it."""
        ahead, dead = self._draw.sample(range(1, size), 2)
        lost = Fate("fails", "before", step, share=0.999)
        fates = {rank: (lost,) for rank in range(size) if rank not in (ahead, dead)}
        return ahead, dead, fates | {dead: (Fate("dies", "after", step),)}


# ---- runs


def _judged_together(trial: Trial, cases: list[Case]) -> int:
    """Each case with ranks of its own, all at once; those in which a busy machine may be to blame
    again, with more time. Returns the most collectives that a recovery took."""
    taken, again = [], []
    with ExitStack() as stack:
        groups = []
        for case in cases:
            own = Trial(trial.path, trial.new_seed())  # threads must not draw from one generator
            own.by_hand(LIBRARY)
            groups.append(_ranks(stack, own, case))
        with ThreadPoolExecutor(len(cases)) as threads:
            runs = {
                threads.submit(_judged, group, case): case for group, case in zip(groups, cases)
            }
            for run in as_completed(runs):
                try:
                    taken.append(run.result())
                except LeftOut:
                    again.append(runs[run].slower())
                except BaseException:  # nobody needs the rest
                    for group in groups:
                        group.kill()
                    raise
    for case in again:
        with ExitStack() as stack:
            taken.append(_judged(_ranks(stack, trial, case), case))
    return max(taken)


def _ranks(stack: ExitStack, trial: Trial, case: Case) -> Group:
    """Those of a case. On a busy machine they may not all be there in time: then once more."""
    try:
        return stack.enter_context(trial.ranks(case.settings.size, HANG, may_die=True))
    except RankError:
        return stack.enter_context(trial.ranks(case.settings.size, HANG, may_die=True))


def _judged(group: Group, case: Case) -> int:
    """The most collectives that a recovery took."""
    server = store_server()
    settings = dataclasses.replace(case.settings, port=server.port)
    recoveries = len(case.lost("dies")) + len(case.lost("stops")) + 1
    seconds = SECONDS + recoveries * (2 * settings.limit + settings.patience)
    given = settings, case.fates, group.pids
    try:
        ranks = group.run(str(case), disturbed.train, *given, seconds=seconds)
    except Wrong as wrong:
        question = "a wait longer than crew.limit or crew.patience,\nor an endless loop?"
        raise type(wrong)(str(wrong).replace("an endless loop?", question)) from None
    _right_ends(case, ranks)
    left = {rank: one for rank, one in enumerate(ranks) if not isinstance(one, Dead)}
    stayed = {rank: one for rank, one in left.items() if one["stayed"]}
    try:
        _right_rows(case, stayed)
        _right_values(case, stayed)
        _right_bytes(case, stayed)
    except Wrong as wrong:
        if _failures(stayed) > sum(map(len, case.fates.values())):  # a busy machine's, perhaps
            raise LeftOut(str(wrong)) from None
        raise
    notes = [note for one in stayed.values() for note in one["notes"]]
    return max((note[2] for note in notes if note[1] == "recovered"), default=0)


def _failures(stayed: dict[int, dict]) -> int:
    """The most failures that a rank saw."""
    counts = [sum(note[1] == "failed" for note in one["notes"]) for one in stayed.values()]
    return max(counts, default=0)


def _right_ends(case: Case, ranks: list) -> None:
    """Those live that were not killed; and they know whether they are in the crew."""
    stopped, killed = case.lost("stops"), case.lost("dies")
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
            own = next(f.step for f in case.fates[rank] if f.act == "stops")
            made = [note[2] for note in one["notes"] if note[1] == "after"]
            if any(step >= own for step in made):
                raise Wrong(f"{case}: rank {rank} makes a further step when it wakes, alone.")
            if own and not made:  # the others began without it
                raise LeftOut(
                    f"{case}: rank {rank} makes no step before it is stopped.\n"
                    "Do those who meet wait for crew.patience until they close the list, each time?"
                )
        elif rank in killed and stayed:
            raise Wrong(
                f"{case}: rank {rank} got to the end and was not killed: it calls no collective,\n"
                "computes no losses, or tells crew.after of no step."
            )
        elif not stayed:
            raise LeftOut(
                f"{case}: rank {rank} lives, and train returns False on it.\n"
                "Do those who meet wait for crew.patience until they close the list, each time?"
            )


def _right_rows(case: Case, stayed: dict[int, dict]) -> None:
    """Each row once in a step, shared evenly; no step again that somebody left has made."""
    settings, made, asked = case.settings, {}, {}
    for rank, one in stayed.items():
        for when, what, *more in one["notes"]:
            if what == "after":
                made.setdefault(more[0], (when, rank))
                made[more[0]] = min(made[more[0]], (when, rank))
            elif what == "losses":
                asked.setdefault(more[0], {}).setdefault(rank, []).extend(more[1])
    for rank, one in stayed.items() if case.fates else ():
        for when, what, *more in one["notes"]:
            first, maker = made.get(more[0], (math.inf, None)) if what == "losses" else (0, 0)
            if what == "losses" and when > first:
                raise Wrong(
                    f"{case}: rank {rank} computes step {more[0]} when rank {maker} has made it.\n"
                    "Whose state is the furthest, and do the others take it over?"
                )
    recoveries = sum(map(len, case.fates.values()))
    for step in range(settings.steps):
        here = asked.get(step, {})
        used = Counter(row for rows in here.values() for row in rows)
        quiet, members = case.quiet(step), case.members(step)
        if not quiet:
            for rank, rows in here.items():
                most = (recoveries + 1) * math.ceil(settings.batch / len(stayed))
                if len(rows) > most:
                    raise Wrong(
                        f"{case}: in step {step} rank {rank} asks for {len(rows)} rows.\nWho is "
                        "left shares the rows; nobody computes all of them."
                    )
            continue
        for rank in stayed:
            rows = here.get(rank, [])
            share = settings.batch / len(members)
            if not math.floor(share) <= len(rows) <= math.ceil(share):
                raise Wrong(
                    f"{case}: in step {step} rank {rank} computes {len(rows)} rows, and "
                    f"{len(members)} ranks have {settings.batch} to share."
                )
        twice = [row for row, times in used.items() if times > 1]
        if twice or (len(members) == len(stayed) and len(used) < settings.batch):
            which = twice or [r for r in range(settings.batch) if r not in used]
            raise Wrong(
                f"{case}: row {which[0]} of step {step} is computed "
                f"{used[which[0]] or 'no'} time{'s' * (used[which[0]] != 1)}."
            )


def _right_values(case: Case, stayed: dict[int, dict]) -> None:
    """After each step and in the end: one rank's weights, equal bits."""
    weights, losses = alone(case.settings)
    first = min((f.step for fates in case.fates.values() for f in fates), default=math.inf)
    ends, by_step = [], {}
    for rank, one in stayed.items():
        told = [note[2:] for note in one["notes"] if note[1] == "after"]
        steps = [step for step, _, _ in told]
        if steps != sorted(set(steps)) or not set(steps) <= set(range(case.settings.steps)):
            raise Wrong(
                f"{case}: rank {rank} tells crew.after of the steps {steps}, in this order.\n"
                "A step is made once, and the next one comes after it."
            )
        for step in range(case.settings.steps):
            if case.quiet(step) and step not in steps:
                raise Wrong(f"{case}: rank {rank} does not tell crew.after of step {step}.")
        for step, found, loss in told:
            where = f"{case}: after step {step}, rank {rank}"
            hint = RECOVERY if step >= first else FORMULA
            close(where, "the vector of weights", found, weights[step], hint=hint, slack=SLACK)
            loss = torch.tensor(a_number(where, "the loss", loss), dtype=torch.float64)
            right = torch.tensor(losses[step], dtype=torch.float64)
            hint = "It is the mean over the whole batch, with the weights before the step."
            close(where, "the loss", loss, right, hint=hint, slack=SLACK)
            by_step.setdefault(f"after step {step}", []).append(found)
        where, hint = f"{case}: in the end, rank {rank}", RECOVERY if case.fates else FORMULA
        close(where, "the vector of weights", one["weights"], weights[-1], hint=hint, slack=SLACK)
        ends.append(one["weights"])
    for when, found in [*by_step.items(), ("in the end", ends)]:
        if len(found) > 1 and not all(bitwise_equal(one, found[0]) for one in found):
            raise Wrong(
                f"{case}: the ranks that are left do not hold the same bits {when}.\n"
                "Was the step made twice, in two groups or by one rank alone? Where one rank has\n"
                "made a step and the others have not, who tells them, also after the last step?"
            )


def _right_bytes(case: Case, stayed: dict[int, dict]) -> None:
    """Of each rank: the gradients once an attempt, the state once a group."""
    settings = case.settings
    gradients = 8 * sum(p.numel() for p in settings.network().parameters())
    recoveries = sum(map(len, case.fates.values()))
    ring = 2 * (settings.size - 1) / settings.size
    for rank, one in stayed.items():
        failed = sum(note[1] == "failed" for note in one["notes"])
        if failed > 2 * recoveries:
            raise LeftOut(
                f"{case}: rank {rank} saw {failed} failures.\n"
                "Is a collective allowed crew.limit seconds, and does everybody come to it?"
            )
        sent = float(sum(event.sent for event in one["events"]))
        most = (settings.steps + recoveries) * (ring * gradients + SMALL)
        most += (recoveries + 1) * (2 * gradients * (settings.size > 1) + MEETING)
        if sent > most:
            raise Wrong(
                f"{case}: rank {rank} sends {sent:,.0f} bytes, and {most:,.0f} will do:\n"
                f"in a step the gradients once ({gradients:,} bytes, all-reduced), in a new group "
                "weights and\nvelocity once, and some numbers."
            )
