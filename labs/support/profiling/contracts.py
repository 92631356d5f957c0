"""Given: what the exercises ask for, and how their check cells judge it.

A diagnosis is compared with what was planted: the check says which entries do not hold, and not
what would. The file is read, and nothing in it runs.

A mended program runs on real ranks, with other rows and other troubles, beside the sound program of
the same number on one rank that has all rows. What a late rank costs is counted in questions to its
machine, not in time.
"""

import ast
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.support.profiling import programs
from labs.support.profiling.machine import EPOCH, OFTEN, ROWS, Machine, Troubles, weights_of
from labs.support.profiling.programs import HUGE, OUTLIER, SPIKE
from utils.course.assertions import Wrong, close, same_bits
from utils.course.runner import Trial
from utils.measure.traffic import Event, Traffic

LIBRARY = ("labs.support.profiling.programs", "labs.support.profiling.contracts")

# ---- a, b, c: the diagnoses

ROOM_MS, ROOM = 8.0, 0.25  # what ms may be off, at least, and as a share: a busy machine
ROOM_BYTES = 0.01  # a report shows three digits
CAUSES = {
    "slow": tuple(programs.LATE.values()), "hanging": tuple(programs.HANGS),
    "wrong": programs.WRONGS, "message": tuple(programs.MESSAGES),
}


def slow_diagnosis(trial: Trial) -> str:
    """Judges `slow` in diagnosis.py."""
    number = programs.number_in(trial.path.parent)
    truth = programs.slow(number).truth
    messages = {f"message_{key}": value for key, value in truth["messages"].items()}
    _diagnosed(trial.path, "slow", truth["late"] | messages)
    return f"the late rank and the messages of the slow program of learner {number}: all 8 hold."


def hanging_diagnosis(trial: Trial) -> str:
    """Judges `hanging` in diagnosis.py."""
    number = programs.number_in(trial.path.parent)
    _diagnosed(trial.path, "hanging", programs.hanging(number).truth["hanging"])
    return f"who left the others waiting in the hanging program of learner {number}: all 4 hold."


def wrong_diagnosis(trial: Trial) -> str:
    """Judges `wrong` in diagnosis.py."""
    number = programs.number_in(trial.path.parent)
    _diagnosed(trial.path, "wrong", programs.wrong(number).truth["wrong"])
    return f"where the numbers of learner {number} first go wrong, and why: all 5 hold."


def _diagnosed(path: Path, name: str, truth: dict[str, Any]) -> None:
    said = _written(path, name)
    if missing := sorted(truth.keys() - said.keys()):
        raise Wrong(f"{name}() does not say {', '.join(missing)}.")
    for key in truth:
        value = said[key]
        known = CAUSES["message" if key == "message_cause" else name]
        if "cause" in key and _words(value) not in map(_words, known):
            listed = ", ".join(f'"{one}"' for one in known)
            raise Wrong(f"{name}(): {key} is {value!r}, and should be one of {listed}.")
        if "cause" not in key and key != "name" and not isinstance(value, int | float | None):
            raise Wrong(f"{name}(): {key} is {value!r}, and should be a number, or None for all.")
    if wrong := [key for key in truth if not _holds(key, said[key], truth[key])]:
        raise Wrong(
            f"{len(truth) - len(wrong)} of the {len(truth)} entries of {name}() hold for your "
            f"program, and not {', '.join(wrong)}.\nWhich figure, line or report does each of "
            "them come from? The hints name a tool for each."
        )


def _written(path: Path, name: str) -> dict[str, Any]:
    """The dictionary that the function `name` returns, as it is written there.

    Raises NotImplementedError with the task of a stub.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    if not found:
        raise Wrong(f"there is no function {name} in {path.name}.")
    last = found[-1].body[-1]
    if isinstance(last, ast.Raise) and "NotImplementedError" in (text := ast.unparse(last)):
        raise NotImplementedError(ast.literal_eval(text.split("NotImplementedError")[1]))
    value = last.value if isinstance(last, ast.Return) else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and not value.args:
        value = ast.Dict([ast.Constant(k.arg) for k in value.keywords],
                         [k.value for k in value.keywords])
    try:
        said = ast.literal_eval(value)
    except (ValueError, TypeError):
        raise Wrong(
            f"{path.name} line {last.lineno}: {name}() is not written out. It is read, and nothing "
            "in it runs:\none `return` of a dictionary with numbers, texts and None."
        ) from None
    if not isinstance(said, dict):
        raise Wrong(f"{name}(): a {type(said).__name__} comes back, and should be a dictionary.")
    return said


def _words(value: Any) -> str:
    return " ".join(str(value).lower().replace("-", " ").replace("_", " ").split())


def _holds(key: str, said: Any, right: Any) -> bool:
    """Whether an entry is right; where `right` is a list, one of them is meant."""
    if "cause" in key:
        return _words(said) == _words(right)
    if isinstance(right, list):
        return said in right
    if said is None or right is None:
        return said is right
    if key == "ms":
        return abs(said - right) <= max(ROOM_MS, ROOM * right)
    if key == "message_bytes":
        return abs(said - right) <= ROOM_BYTES * right
    return said == right


# ---- a, b, c: the mended programs

SIZES = (2, 3)  # ranks: one of them, besides MANY and 1
MANY = 6  # ranks, who share the rows evenly
SMALL = 64  # bytes of a small message: a loss, a count
NEAR, AFTER_CLIP = 1e6, 1e11  # roundings; torch adds 1e-6 to a clipped gradient's norm
HANG = "Who has left the others, by which line? What decides there must be the same on all ranks."


@dataclass(frozen=True)
class Case:
    """A run of a program."""

    widths: tuple[int, ...]
    seed: int
    steps: int
    troubles: Troubles = field(default_factory=Troubles)

    def __str__(self):
        told = [
            f"; {name} in steps {sorted(value)}" for name, value in vars(self.troubles).items()
            if isinstance(value, dict) and value
        ]
        hot = f"; hot from step {self.troubles.hot} on" * (self.troubles.hot < self.steps)
        return f"{self.steps} steps{''.join(told)}{hot}"


@dataclass(frozen=True)
class Run:
    """What a program did on a rank. weights: after each step (slow), or before each and in the end
    (wrong); machine: what its machine has noted, when train returns; early: bytes sent before the
    first look at the temperature."""

    returned: Any
    weights: torch.Tensor
    events: list[Event]
    machine: SimpleNamespace
    early: int

    def losses(self) -> torch.Tensor:
        """One for each step, float64."""
        if not isinstance(self.returned, list | tuple | torch.Tensor):
            raise Wrong(f"train returns a {type(self.returned).__name__}, not the losses.")
        return torch.tensor([float(loss) for loss in self.returned], dtype=torch.float64)


def sound_runs(answer, name: str, text: str, cases: list[Case]) -> list[Run]:
    """Of the sound program, on one rank."""
    exec(text, sound := {})
    return [run(SimpleNamespace(**sound), name, case) for case in cases]


def run(answer, name: str, case: Case) -> Run:
    """On a rank."""
    rank, ranks, weights, early = dist.get_rank(), dist.get_world_size(), [], []
    stops = dict.fromkeys(case.troubles.stops, (0,)) if ranks == 1 else case.troubles.stops
    machine = Machine(rank, ranks, case.widths, case.seed,
                      troubles=replace(case.troubles, stops=stops))
    ask, write = machine.temperature, machine.save

    def temperature(step: int) -> float:
        early.append(traffic.payload() - traffic.payload("broadcast"))
        return ask(step)

    def save(step: int, model: nn.Module) -> None:
        begun = len(weights)
        for _ in range(50 * (threading.current_thread() is not threading.main_thread())):
            if len(weights) > begun + 1:  # a disk that is slower than two steps
                break
            time.sleep(0.01)
        write(step, model)

    @contextlib.contextmanager
    def watching(model):
        model.register_forward_pre_hook(lambda *_: weights.append(weights_of(model)))
        yield SimpleNamespace(step=lambda: None)
        weights.append(weights_of(model))

    machine.temperature, machine.save = temperature, save
    more = {
        "slow": [lambda model: weights.append(weights_of(model))], "wrong": [watching]
    }.get(name, [])
    with Traffic() as traffic:
        try:
            returned = answer.train(machine, case.steps, *more)
        except RuntimeError:
            if case.troubles.hot > max(machine.looked_at, default=0):
                raise
            returned = None
    kept = SimpleNamespace(calls=machine.calls, saved=dict(machine.saved),
                           lines=list(machine.lines), looked_at=list(machine.looked_at))
    return Run(returned, torch.stack(weights or [torch.zeros(0)]), traffic.events, kept,
               early[0] if early else 0)


def _judged(trial: Trial, name: str, drawn: dict[int, list[Case]], looks: Callable) -> None:
    """looks(where, case, [a Run of each rank], the Run of one rank that has all rows)"""
    trial.forbid(LIBRARY)
    sound = programs.FAULTY[name](programs.number_in(trial.path.parent)).sound
    cases = [case for some in drawn.values() for case in some]
    rights = iter(trial.alone("one rank", sound_runs, name, sound, cases))
    for group in trial.groups(list(drawn), hang=HANG):
        for case in drawn[group.size]:
            where, right = group.case(str(case)), next(rights)
            ranks = group.run(where, run, name, case)
            calls = [Counter(e.op for e in one.events if e.op not in ("send", "recv"))
                     for one in ranks]
            if any(one != calls[0] for one in calls):
                raise Wrong(f"{where}: ranks call {calls}: somebody is left without an answer.")
            looks(where, case, ranks, right)


def _settings(trial: Trial, name: str) -> programs.Settings:
    return programs.FAULTY[name](programs.number_in(trial.path.parent)).settings


def slow(trial: Trial) -> str:
    """Judges slow.py."""
    program = programs.slow(programs.number_in(trial.path.parent))
    draw, widths = trial.draw, program.settings.widths
    service = {cause: name for name, cause in programs.LATE.items()}[program.truth["late"]["cause"]]
    few, hot = draw.choice(SIZES), 5 + draw.randrange(OFTEN)

    def case(steps: int, **more: Any) -> Case:
        return Case(widths, trial.new_seed(), steps, **more)

    drawn = {
        few: [case(3 * OFTEN),  # the last step saves
              case(OFTEN + draw.randrange(1, OFTEN))],
        MANY: [case(2 * OFTEN)],
        # elsewhere, the others would wait for the one that ends
        1: [case(2 * OFTEN), case(hot + 2 * OFTEN, troubles=Troubles(hot=hot))],
    }

    def looks(where: str, case: Case, ranks: list[Run], right: Run) -> None:
        if case.troubles.hot < case.steps:
            return _ended(where, ranks[0])
        for rank, one in enumerate(ranks):
            here, asked = f"{where}, rank {rank}", one.machine.calls[service]
            _learns(here, one, right, "`after` is called in {} of {} steps")
            _served(here, one.machine, right)
            if len(one.events) > 2 * case.steps + 6:  # DDP has five more when it begins
                ops = ", ".join(sorted({event.op for event in one.events}))
                raise Wrong(
                    f"{here}: it calls {len(one.events) / case.steps:.3g} collectives a step "
                    f"({ops}).\nThe gradients need one; the loss may have one of its own."
                )
            needed = EPOCH if service == "unpack" else case.steps // OFTEN + 1
            if asked > needed:
                raise Wrong(
                    f"{here}: what made a rank late is still paid for {asked} times in "
                    f"{case.steps} steps; {needed} times are enough.\nWhat does the machine's own "
                    "text say of the service?"
                )
            if len(ranks) > 1 and one.early >= OFTEN * 8 * sum(program.settings.sizes):
                raise Wrong(
                    f"{here}: the gradients of {OFTEN} steps were sent before the first look at "
                    "the temperature."
                )
        _frugal(where, ranks, program.settings, case.steps)
        same_bits(where, "the weights after each step", [one.weights for one in ranks])

    _judged(trial, "slow", drawn, looks)
    return (
        f"on {few} ranks, on {MANY} and on 1: the weights after each step, the checkpoints and the "
        "log of one rank;\na step sends the gradients once; who is too hot ends; and no rank pays "
        "for more than one\nstep in four what made one late."
    )


def hanging(trial: Trial) -> str:
    """Judges hanging.py."""
    draw, settings = trial.draw, _settings(trial, "hanging")
    few, many = draw.choice(SIZES), draw.choice((MANY - 1, MANY))

    def case(size: int, steps: int, stops: dict[int, tuple[int, ...]]) -> Case:
        one, all_, far, turned = draw.sample(range(steps - 2), 4)
        rank, row = draw.randrange(size), draw.randrange(ROWS)
        silent = [n for n in range(ROWS) if n % size == rank and n != row][:2]
        troubles = Troubles(
            silent={one: tuple(range(rank, ROWS, size)), all_: tuple(range(ROWS)),
                    far: tuple(silent)},
            # beside the row far off one that is farther off and does not count
            outliers={far: {row: OUTLIER, silent[0]: 2 * OUTLIER},
                      steps - 2: {draw.randrange(ROWS): math.inf}},
            turned={turned: draw.randrange(size)}, stops=stops, leader=draw.randrange(size),
        )
        return Case(settings.widths, trial.new_seed(), steps, troubles)

    def stopped(step: int, *ranks: int) -> Case:
        return Case(settings.widths, trial.new_seed(), step + 2, Troubles(stops={step: ranks}))

    drawn = {
        few: [case(few, 9, {7: (draw.randrange(few),)}), stopped(0, few - 1),
              stopped(2, 0, few - 1)],
        many: [case(many, 8, {}), stopped(1, draw.randrange(many))],
        1: [case(1, 9, {7: (0,)})],
    }

    def looks(where: str, case: Case, ranks: list[Run], right: Run) -> None:
        for rank, one in enumerate(ranks):
            _same_rows(f"{where}, rank {rank}", one.returned, right.returned)
        _frugal(where, ranks, settings, case.steps)

    _judged(trial, "hanging", drawn, looks)
    return (
        f"on {few} ranks, on {many} and on 1: it comes to an end, and every rank returns what one "
        "rank does, when\nrows do not count, are far off or infinite, metrics come in another "
        "order, and one or two are\nasked to stop."
    )


def wrong(trial: Trial) -> str:
    """Judges wrong.py."""
    draw, settings = trial.draw, _settings(trial, "wrong")

    def case(disturbed: bool = True) -> Case:
        case = Case(settings.widths, trial.new_seed(), 6)
        outliers = {}
        for step, far in zip(draw.sample(range(6), 4), (OUTLIER, HUGE, 0.9 * SPIKE, 1.4 * SPIKE)):
            row = draw.randrange(ROWS)
            if far > HUGE:  # the factor that makes the mean loss so large
                y = Machine(0, 1, case.widths, case.seed).rows(step)[1]
                far = y[row].abs().max() * (far * y.numel() / y[row].square().sum()).sqrt()
            outliers[step] = {row: float(far)}
        return replace(case, troubles=Troubles(outliers=outliers)) if disturbed else case

    def looks(where: str, case: Case, ranks: list[Run], right: Run) -> None:
        slack = AFTER_CLIP if case.troubles.outliers else NEAR
        same_bits(where, "the weights before each step and in the end",
                  [one.weights for one in ranks])
        for rank, one in enumerate(ranks):
            _learns(
                f"{where}, rank {rank}", one, right, "`watching(model)` sees {} of {} steps", slack,
                "Where do `first_difference` and `first_between` see the first difference?",
            )
        _frugal(where, ranks, settings, case.steps, beside=2 * SMALL)

    drawn = {2: [case(disturbed=False), case()], MANY: [case()], 1: [case()]}
    _judged(trial, "wrong", drawn, looks)
    return (
        f"on 2 ranks, on {MANY} and on 1: before each step, and in the end, the weights of one "
        "rank, and on all\nranks the same bits; the losses are those of one rank, also when one "
        "rank has a row far off."
    )


# ---- what is right


def _learns(
    where: str, one: Run, right: Run, seen: str, slack: float = NEAR, hint: str = ""
) -> None:
    """The weights and losses of one rank. seen: words, where there are weights of fewer steps."""
    losses, wanted = one.losses(), right.losses()
    if len(one.weights) != len(right.weights):
        few = len(one.weights) - len(right.weights) + len(wanted)
        raise Wrong(f"{where}: {seen.format(max(few, 0), len(wanted))}; each step counts.")
    close(where, "the list of the weights", one.weights, right.weights, slack=slack, hint=hint)
    close(where, "the list of the losses", losses, wanted, slack=slack)


def _served(where: str, machine: SimpleNamespace, right: Run) -> None:
    """Checkpoints, log and looks at the temperature."""
    steps = len(right.weights)
    for step in range(OFTEN - 1, steps, OFTEN):
        if step not in machine.saved:
            raise Wrong(
                f"{where}: there is no checkpoint of step {step} when train returns; it is needed."
            )
        close(where, f"the checkpoint of step {step}", machine.saved[step], right.weights[step],
              slack=NEAR, hint="It has not the weights after the step.")
    found, lines = (
        [str(line).split(": loss ") for line in one.lines] for one in (machine, right.machine)
    )
    if [name for name, *_ in found] != [name for name, _ in lines] or any(
        abs(float(a) - float(b)) > 2e-6 for (_, a), (_, b) in zip(found, lines)
    ):
        raise Wrong(
            f"{where}: the log has {len(found)} lines; every step's must be there at the end, in "
            f'order,\nlike "{right.machine.lines[0]}".'
        )
    if any(b - a > OFTEN for a, b in pairwise([-1, *machine.looked_at, steps])):
        raise Wrong(
            f"{where}: the temperature is looked at in steps {machine.looked_at}: {OFTEN} steps or "
            "more without a look."
        )


def _ended(where: str, one: Run) -> None:
    """Of a run on a machine that is too hot."""
    if one.returned is not None:
        raise Wrong(
            f"{where}: train goes on to the end.\nWhat does the machine's own text want then?"
        )
    if len(one.machine.lines) < len(one.weights):
        raise Wrong(
            f"{where}: it ends after {len(one.weights)} steps, and the log has "
            f"{len(one.machine.lines)} lines.\nThe log of a run that fails is the one that is "
            "needed: `try:`, and `finally:` around what is logged late."
        )


def _frugal(
    where: str, ranks: list[Run], settings: programs.Settings, steps: int, beside: int = 4 * SMALL
) -> None:
    """All ranks together send the gradients once a step, the weights once before, in any way.

    beside: bytes that may be all-reduced besides, a step."""
    gradients, others = 8 * sum(settings.sizes), len(ranks) - 1
    needed = 2 * others * (gradients + beside)  # to all-reduce: to one and back, or in a ring
    sent = float(sum(event.sent for one in ranks for event in one.events))
    if sent > steps * needed + others * gradients + 1e-6:
        raise Wrong(
            f"{where}: all ranks together send {sent / steps:,.0f} bytes a step; to all-reduce "
            f"gradients of {gradients:,} bytes they need {needed:,}.\nWhat else goes round, or "
            "goes twice?"
        )


def _same_rows(where: str, found: Any, right: list[dict]) -> None:
    if not isinstance(found, list | tuple) or not all(isinstance(row, dict) for row in found):
        raise Wrong(f"{where}: train does not return a list of dictionaries, one for each step.")
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
            close(f"{where}, step {one['step']}", key,
                  torch.tensor(float(mine[key]), dtype=torch.float64),
                  torch.tensor(value, dtype=torch.float64), slack=NEAR, scale=1e-2)
