"""Given: the contracts of the exercises, and the judges behind their check cells.

A fixed program runs on real ranks, with new rows and new troubles, and is compared with the sound
program of the same number on one rank. The cost of a late rank is counted in calls, not in time.
"""

import ast
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector

from labs.support.profiling import programs
from labs.support.profiling.machine import EPOCH, OFTEN, ROWS, Machine, Troubles
from labs.support.profiling.programs import HUGE, OUTLIER, Program
from utils.course.assertions import Wrong, close, same_bits
from utils.course.properties import equal
from utils.course.runner import Trial
from utils.measure.traffic import Event, Traffic

# ---- a, b, c: the diagnoses

CAUSES = [*programs.LATE.values(), *programs.MESSAGES, *programs.HANGS, *programs.WRONGS]


def _diagnosed(name: str, what: str, trial: Trial) -> str:
    """Judge the function `name` in diagnosis.py."""
    number = programs.number_in(trial.path.parent)
    truth, said = programs.FAULTY[name](number).truth, _written(trial.path, name)
    if missing := [key for key in truth if key not in said]:
        raise Wrong(f"{name}() does not say {', '.join(missing)}.")
    for key in truth:
        if "cause" in key and _words(said[key]) not in map(_words, CAUSES):
            raise Wrong(f"{name}(): {key} is {said[key]!r}, and should be one of those listed.")
    if wrong := [key for key in truth if not _holds(key, said[key], truth[key])]:
        raise Wrong(
            f"{len(truth) - len(wrong)} of the {len(truth)} entries of {name}() hold for your "
            f"program, but not {', '.join(wrong)}.\nWhich figure, line or report does each of "
            "them come from? The hints name a tool for each."
        )
    return f"{what.format(number)}: all {len(truth)} entries hold."


slow_diagnosis = partial(
    _diagnosed, "slow", "the late rank and the messages of the slow program of learner {}"
)
hanging_diagnosis = partial(
    _diagnosed, "hanging", "which rank left the others in the hanging program of learner {}"
)
wrong_diagnosis = partial(
    _diagnosed, "wrong", "where the values of learner {}'s program first go wrong, and why"
)


def _written(path: Path, name: str) -> dict[str, Any]:
    """The dictionary that the function `name` returns, as written in the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    last = own[-1].body[-1]
    if isinstance(last, ast.Raise):  # a stub
        raise NotImplementedError(last.exc.args[0].value)
    try:
        said = eval(ast.unparse(last.value), {"__builtins__": {"dict": dict}})
    except (AttributeError, NameError):
        raise Wrong(
            f"{path.name} line {last.lineno}: {name}() is not a literal. It is only read, never "
            "run:\nwrite one `return` of a dictionary of numbers, strings and None."
        ) from None
    return said if isinstance(said, dict) else {}


def _words(value: Any) -> str:
    return " ".join(str(value).lower().replace("-", " ").replace("_", " ").split())


def _holds(key: str, said: Any, right: Any) -> bool:
    """Whether an entry is right; if `right` is a list, any of its values is."""
    if "cause" in key:
        return _words(said) == _words(right)
    if key in ("ms", "message_bytes") and isinstance(said, int | float):
        # a busy machine adds ms; a report shows three digits of the bytes
        room = max(8.0, 0.25 * right) if key == "ms" else 0.01 * right
        return abs(said - right) <= room
    return said in right if isinstance(right, list) else said == right


# ---- a, b, c: the fixed programs

FEW, MANY = 3, 6  # ranks; the rows are divided evenly among them
BESIDE = 256  # bytes that a step may all-reduce in addition to the gradients: losses, counts
NEAR, AFTER_CLIP = 1e6, 1e11  # roundings; torch adds 1e-6 to a clipped gradient's norm
NO_SPIKE = 4700.0  # a target whose loss is below SPIKE, but far above it in a mean of few rows
HANG = "Which rank has left the others, at which line? That decision must be the same on all ranks."


@dataclass(frozen=True)
class Case:
    """A run of a program."""

    widths: tuple[int, ...]
    seed: int
    steps: int
    troubles: Troubles = field(default_factory=Troubles)

    def __str__(self):
        usual = vars(Troubles())
        odd = {name: x for name, x in vars(self.troubles).items() if x != usual[name]}
        told = [f"; {name} {list(x) if isinstance(x, dict) else x}" for name, x in odd.items()]
        return f"{self.steps} steps{''.join(told)}"


@dataclass(frozen=True)
class Run:
    """What a program did on a rank.

    returned   losses or dictionaries, or None if it ended with a RuntimeError
    weights    after each step (slow), or before each step and at the end (wrong)
    calls …    what its machine had recorded when train returned
    """

    returned: list | None
    weights: torch.Tensor
    events: list[Event]
    calls: Counter[str]
    saved: dict[int, torch.Tensor]
    lines: list[str]
    looked_at: list[int]


def sound_runs(answer, name: str, text: str, cases: list[Case]) -> list[Run]:
    """Run the sound program on one rank."""
    exec(text, sound := {})
    return [run(SimpleNamespace(**sound), name, case) for case in cases]


def run(answer, name: str, case: Case) -> Run:
    """On a rank: run the program on a machine with the case's troubles."""
    weights, returned = [], None
    machine = Machine(
        dist.get_rank(), dist.get_world_size(), case.widths, case.seed, troubles=case.troubles
    )
    write = machine.save

    def save(step: int, model: nn.Module) -> None:
        begun = len(weights)
        for _ in range(50 * (threading.current_thread() is not threading.main_thread())):
            if len(weights) > begun + 1:  # the disk is slower than two steps
                break
            time.sleep(0.01)
        write(step, model)

    def note(model: nn.Module) -> None:
        weights.append(parameters_to_vector(model.parameters()).detach())

    @contextlib.contextmanager
    def watching(model: nn.Module):
        yield SimpleNamespace(step=partial(note, model))
        note(model)

    machine.save = save
    more = {"slow": [note], "hanging": [], "wrong": [watching]}[name]
    with Traffic() as traffic:
        try:
            returned = [_numbers(one) for one in answer.train(machine, case.steps, *more)]
        except RuntimeError:
            if case.troubles.hot == math.inf:
                raise
    return Run(returned, torch.stack(weights or [torch.zeros(0)]), traffic.events, machine.calls,
               dict(machine.saved), list(machine.lines), machine.looked_at)


def _program(trial: Trial, name: str) -> Program:
    """The learner's own program."""
    return programs.FAULTY[name](programs.number_in(trial.path.parent))


def _numbers(row: Any) -> Any:
    """A step's result in Python numbers: one, or a dictionary of them."""
    return {k: float(x) for k, x in row.items()} if isinstance(row, dict) else float(row)


def _judged(trial: Trial, name: str, drawn: dict[int, list[Case]], looks: Callable) -> None:
    """Judge a program. looks(where, case, Run of a rank, Run of one rank that has all rows)."""
    program = _program(trial, name)
    cases = [case for some in drawn.values() for case in some]
    rights = iter(trial.alone("one rank", sound_runs, name, program.sound, cases))
    for group in trial.groups(list(drawn), hang=HANG):
        for case in drawn[group.size]:
            where, right = group.case(str(case)), next(rights)
            ranks = group.run(where, run, name, case)
            same_bits(where, "the weights", [one.weights for one in ranks])
            for rank, one in enumerate(ranks):
                looks(f"{where}, rank {rank}", case, one, right)
            _frugal(where, ranks, 8 * sum(programs.sizes_of(program.widths)), case.steps)


def slow(trial: Trial) -> str:
    """Judge slow.py."""
    program, hot = _program(trial, "slow"), 5 + trial.draw.randrange(OFTEN)
    service = {cause: name for name, cause in programs.LATE.items()}[program.truth["cause"]]

    def case(steps: int, **more: Any) -> Case:
        return Case(program.widths, trial.new_seed(), steps, **more)

    def looks(where: str, case: Case, one: Run, right: Run) -> None:
        if right.returned is None:
            return _ended(where, one)
        _learns(where, one, right, "after")
        _served(where, one, right)
        if len(one.events) > 2 * case.steps + 6:  # DDP has five more at the start
            ops = ", ".join(sorted({event.op for event in one.events}))
            raise Wrong(
                f"{where}: it calls {len(one.events) / case.steps:.3g} collectives per step "
                f"({ops}).\nThe gradients need one; the loss may have one of its own."
            )
        asked, needed = one.calls[service], case.steps // OFTEN + 1
        if asked > (EPOCH if service == "unpack" else needed):
            raise Wrong(
                f"{where}: the service that made a rank late is still called {asked} times in "
                f"{case.steps} steps.\nWhat does the machine's docstring say about it?"
            )

    _judged(trial, "slow", {
        FEW: [case(3 * OFTEN), case(hot + 2 * OFTEN, troubles=Troubles(hot=hot))],
        MANY: [case(2 * OFTEN + trial.draw.randrange(1, OFTEN))],
    }, looks)
    return (
        f"on {FEW} ranks and on {MANY}: weights after each step, checkpoints and log equal one "
        "rank's;\na step sends the gradients once; a machine that is too hot stops the run; and "
        "the delay is paid\nin at most one step in four."
    )


def hanging(trial: Trial) -> str:
    """Judge hanging.py."""
    draw, widths, last = trial.draw, _program(trial, "hanging").widths, 7

    def case(size: int, stopped: tuple[int, ...]) -> Case:
        one, all_, far, turned = draw.sample(range(last), 4)
        return Case(widths, trial.new_seed(), last + 2, Troubles(
            silent={one: tuple(range(draw.randrange(size), ROWS, size)), all_: tuple(range(ROWS))},
            outliers={far: {draw.randrange(ROWS): OUTLIER}, last: {draw.randrange(ROWS): math.inf}},
            turned={turned: draw.randrange(size)},
            stops={last: stopped},
            leader=draw.randrange(size),
        ))

    def looks(where: str, case: Case, one: Run, right: Run) -> None:
        for found, row in zip_longest(one.returned, right.returned, fillvalue={}):
            for key in row | found:
                if not equal(found.get(key), row.get(key)):
                    raise Wrong(
                        f"{where}: in a row {key} is {found.get(key)}, and {row.get(key)} is "
                        f"right.\nIt returns {found}; one rank returns {row}."
                    )

    _judged(trial, "hanging", {
        FEW: [case(FEW, (0, FEW - 1))], MANY: [case(MANY, (draw.randrange(MANY),))],
    }, looks)
    return (
        f"on {FEW} ranks and on {MANY}: it ends, and every rank returns what one rank does, even "
        "when rows\ndo not count, are outliers or infinite, metrics come in another order, and one "
        "or two ranks\nare asked to stop."
    )


def wrong(trial: Trial) -> str:
    """Judge wrong.py."""
    draw, widths = trial.draw, _program(trial, "wrong").widths

    def case() -> Case:
        far = zip(draw.sample(range(5), 3), (OUTLIER, HUGE, NO_SPIKE))
        outliers = {step: {draw.randrange(ROWS): target} for step, target in far}
        return Case(widths, trial.new_seed(), 6, Troubles(outliers=outliers))

    def looks(where: str, case: Case, one: Run, right: Run) -> None:
        hint = "Where do `first_difference` and `first_between` find the first difference?"
        _learns(where, one, right, "watching", AFTER_CLIP, hint)

    _judged(trial, "wrong", {FEW: [case()], MANY: [case()]}, looks)
    return (
        f"on {FEW} ranks and on {MANY}: before each step and at the end, the weights equal one "
        "rank's, with\nthe same bits on all ranks; the losses equal one rank's, even when one rank "
        "has an outlier."
    )


# ---- the contracts


def _learns(
    where: str, one: Run, right: Run, seen_by: str, slack: float = NEAR, hint: str = ""
) -> None:
    """Weights and losses equal one rank's."""
    what = f"the list of the weights that `{seen_by}` sees"
    close(where, what, one.weights, right.weights, slack=slack, hint=hint)
    losses, wanted = (torch.tensor(r.returned, dtype=torch.float64) for r in (one, right))
    close(where, "the list of the losses", losses, wanted, slack=slack)


def _served(where: str, one: Run, right: Run) -> None:
    """Checkpoints, log and temperature readings are as they should be."""
    steps = len(right.weights)
    for step in range(OFTEN - 1, steps, OFTEN):
        if step not in one.saved:
            raise Wrong(f"{where}: there is no checkpoint of step {step} when train returns.")
        close(where, f"the checkpoint of step {step}", one.saved[step], right.weights[step],
              slack=NEAR, hint="It does not hold the weights after the step.")
    if one.lines != right.lines:
        raise Wrong(
            f"{where}: the log has {len(one.lines)} lines; at the end it must have one per step, "
            f'in order,\nlike "{right.lines[0]}".'
        )
    if any(b - a > OFTEN for a, b in pairwise([-1, *one.looked_at, steps])):
        raise Wrong(
            f"{where}: the temperature is read in steps {one.looked_at}: at least {OFTEN} steps "
            "pass without a reading."
        )


def _ended(where: str, one: Run) -> None:
    """A run on a machine that is too hot ends, with a complete log."""
    if one.returned is not None:
        raise Wrong(f"{where}: train runs to the end. What does the machine's docstring ask for?")
    if len(one.lines) < len(one.weights):
        raise Wrong(
            f"{where}: it ends after {len(one.weights)} steps, but the log has {len(one.lines)} "
            "lines.\nThe log matters most when a run fails."
        )


def _frugal(where: str, ranks: list[Run], gradients: int, steps: int) -> None:
    """All ranks together send the gradients once per step and the weights once at the start, by any
    algorithm."""
    others = len(ranks) - 1
    needed = 2 * others * (gradients + BESIDE)  # an all-reduce: via one rank, or in a ring
    sent = float(sum(event.sent for one in ranks for event in one.events))
    if sent > steps * needed + others * gradients + 1e-6:
        raise Wrong(
            f"{where}: all ranks together send {sent / steps:,.0f} bytes per step; to all-reduce "
            f"gradients of {gradients:,} bytes they need {needed:,}.\nWhat else is sent, or sent "
            "twice?"
        )
