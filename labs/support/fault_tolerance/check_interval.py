"""Given: what the check cells of exercises 13c and 13d look at. The references are expected times
in closed form; tests/labs compares them with failures that are simulated one by one."""

import copy
import math
from typing import Any

import numpy as np

from utils.course.assertions import Wrong, a_number, described
from utils.course.runner import Group, Trial
from utils.planner import failures

LIBRARY = ("utils.planner", "labs.support.fault_tolerance.check_interval")
CLOSE = 1e-9  # relative, of what has one right value
BEST, BEST_PLAN = 0.002, 0.01  # how much longer a run may take than with the best interval, plan
MOST = 64  # checkpoints, the last of which goes to the disk
SECONDS = 30.0  # for one call


def interval(trial: Trial) -> str:
    """Judges `between_failures`, `lost_share` and `best_interval`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:
        _judge_between(trial, group)
        _judge_lost(trial, group)
        _judge_best(trial, group)
    return (
        "the time between failures of runs with one kind of parts and with several; the lost\n"
        "share, and an interval that no other beats by more than 0.2 %, from checkpoints of a\n"
        "ten-thousandth of the time between failures to such as take three times as long."
    )


def plan(trial: Trial) -> str:
    """Judges `best_plan`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:
        for number in range(6):
            _judge_plan(trial, group, number)
    return (
        "for failures of which none, nearly all and some are light, with and without a long\n"
        "restart, no other plan ends more than 1 % earlier, by the expected time of all states."
    )


# ---- exercise c


def _judge_between(trial, group):
    draw = trial.draw
    for number in range(6):
        kinds = draw.sample(["GPU", "HBM", "host", "switch", "software", "disk"], 1 + number)
        observed = {kind: (draw.randrange(1, 500), 10 ** draw.uniform(4, 8)) for kind in kinds}
        parts = {kind: draw.randrange(1, 20_000) for kind in kinds}
        if number in (2, 4):  # one that never failed
            observed[kinds[0]] = (0, observed[kinds[0]][1])
        if number in (3, 4):  # one that the run does not need
            del parts[kinds[1]]
        if number == 5:
            observed = {kind: (0, hours) for kind, (_, hours) in observed.items()}
        case = f"with observed {observed} and parts {parts}"
        given = {"observed": observed, "parts": parts}
        found = _asked(group, case, "between_failures", given)
        rate = sum(n * observed[kind][0] / observed[kind][1] for kind, n in parts.items())
        right = 3600 / rate if rate else math.inf
        hint = "Failures a second add up over all parts; the times between them do not."
        _same(case, "the mean seconds between two failures", found, right, hint)


def _judge_lost(trial, group):
    draw = trial.draw
    for number in range(8):
        between = 10 ** draw.uniform(1, 5)
        save = between * 10 ** draw.uniform(-4, 0.3)
        given = {
            "interval": between * 10 ** draw.uniform(-3, 0.5),
            "save": save,
            "restart": 0.0 if number == 0 else between * 10 ** draw.uniform(-3, 0.5),
            "between": between,
        }
        case = f"with {_listed(given)}"
        found = _asked(group, case, "lost_share", given)
        right = 1 - 1 / failures.stretch(**given)
        _same(case, "the lost share", found, right, _lost_hint(given, found))


def _judge_best(trial, group):
    draw = trial.draw
    for ratio in (1e-4, 10 ** draw.uniform(-4, -1), 10 ** draw.uniform(-1, 0.2), 3.0):
        between = 10 ** draw.uniform(1, 5)
        save = ratio * between
        case = f"with save {save:.4g} s and between {between:.4g} s"
        other = {"save": between, "between": save}
        found = _asked(group, case, "best_interval", {"save": save, "between": between}, other)
        seconds = _positive(case, "the interval", found)
        least = min(failures.stretch(x, save, 0, between) for x in _around(save, between))
        takes, hint = (
            failures.stretch(seconds, save, 0, between),
            _best_hint(seconds, save, between),
        )
        _not_longer(case, f"every {seconds:.4g} s", takes, least, BEST, hint)


def _around(save, between):
    """Intervals, dense enough to hold a best one."""
    middle = failures.daly(save, between)
    return middle * np.geomspace(0.3, 3, 400)


def _lost_hint(given, found):
    """What a wrong share would be right for."""
    without = {**given, "restart": 0.0}
    value = a_number("", "the lost share", found)
    interval, save, restart, between = given.values()
    guesses = {
        "the share without restarts. What does a failure cost besides?": 1
        - 1 / failures.stretch(**without),
        "that of a first-order formula, in which failures strike neither while a run saves nor "
        "twice.": 1 - 1 / (1 + save / interval + (interval + save) / (2 * between)
                           + restart / between),
        "how much longer the run takes. The share is of the whole time.": failures.stretch(**given)
        - 1,
    }
    for text, guess in guesses.items():
        if math.isclose(value, guess, rel_tol=1e-6):
            return f"It is {text}"
    return "What is the expected time of one interval, its checkpoint and its failures?"


def _best_hint(seconds, save, between):
    if math.isclose(seconds, failures.young(save, between), rel_tol=1e-3):
        return "It is Young's interval, which takes failures as rare. What is rare here?"
    return "Try other intervals in `lost_share`: which way does it fall?"


# ---- exercise d


def _judge_plan(trial, group, number):
    draw = trial.draw
    between = 10 ** draw.uniform(2.5, 4.5)
    disk = between * 10 ** draw.uniform(-2.5, -0.5)
    given = {
        "memory": disk * 10 ** draw.uniform(-2.5, -0.5),
        "disk": disk,
        "restart": draw.choice([0.0, between * 10 ** draw.uniform(-3, -0.5)]),
        "between": between,
        "light": (0.0, 0.97)[number] if number < 2 else draw.uniform(0.3, 0.95),
    }
    if number == 2:
        given["memory"] = 1.2 * disk  # of no use, whatever survives
    if number == 3:  # most restarts are interrupted, too
        given |= {"disk": between * draw.uniform(0.4, 0.9), "light": draw.uniform(0.9, 0.97)}
        given |= {"memory": given["disk"] * 10 ** draw.uniform(-2.5, -1)}
        given |= {"restart": between * draw.uniform(1, 1.5)}
    if number == 4:  # the disk is hardly slower
        given |= {"disk": between * draw.uniform(0.1, 0.3), "light": draw.uniform(0.75, 0.85)}
        given |= {"memory": given["disk"] * draw.uniform(0.85, 0.9)}
        given |= {"restart": between * draw.uniform(0.02, 0.1)}
    case = f"with {_listed(given)}"
    found = _asked(group, case, "best_plan", given)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Wrong(f"{case}: the result is {described(found)}, not (interval, every).")
    seconds, every = _positive(case, "the interval", found[0]), a_number(case, "every", found[1])
    if every not in range(1, MOST + 1):
        raise Wrong(f"{case}: every is {found[1]!r}, not a whole number from 1 to {MOST}.")
    what = f"every {seconds:.4g} s, 1 in {every:g} to the disk"
    takes, least = stretch_of(seconds, int(every), **given), best_stretch(**given)
    hint = _plan_hint(given, every)
    if takes > 2 * least:
        hint += "\nOr was it rounding? A time below every · interval cannot be: drop such a plan."
    _not_longer(case, what, takes, least, BEST_PLAN, hint)


def stretch_of(
    interval: float,
    every: int,
    memory: float,
    disk: float,
    restart: float,
    between: float,
    light: float,
) -> float:
    """Expected time over computing of a plan, from the linear equations of its 2 · every states:
    running from interval i on, and restarting there."""
    states = 2 * every  # running 0 …, restarting 0 …
    matrix, times = np.eye(states), np.zeros(states)
    for number in range(every):
        length = interval + (disk if number == every - 1 else memory)
        for state, ends, to in (
            (number, length, number + 1),
            (every + number, restart, number),
        ):
            fails = -math.expm1(-ends / between)
            times[state] = between * fails
            if to < every:
                matrix[state, to] -= 1 - fails
            matrix[state, every + number] -= fails * light
            matrix[state, every] -= fails * (1 - light)
    try:
        found = np.linalg.solve(matrix, times)[0] / (every * interval)
    except np.linalg.LinAlgError:  # it never gets there
        return math.inf
    return found if 1 <= found < 1e9 else math.inf


def best_stretch(memory: float, disk: float, restart: float, between: float, light: float) -> float:
    """That of the best plan."""
    given = {"memory": memory, "disk": disk, "restart": restart, "between": between, "light": light}
    found, worse = math.inf, 0
    for every in range(1, MOST + 1):
        base = failures.young((memory * (every - 1) + disk) / every, between)
        least = min(stretch_of(base * x, every, **given) for x in np.geomspace(0.25, 6, 24))
        worse = 0 if least < found else worse + 1
        found = min(found, least)
        if worse > 3:  # it falls and then rises
            break
    return found


def _plan_hint(given, every):
    if every == 1 and given["light"] and given["memory"] < given["disk"]:
        return (
            "All checkpoints go to the disk. What would a cheap one be worth after a light failure?"
        )
    if given["light"] == 0:
        return "No failure is light here: what is a checkpoint in memory worth then?"
    return (
        "What does a failure cost in the i-th interval after the last checkpoint on the disk, and\n"
        "what does one in the restart there?"
    )


# ---- both


def _asked(group: Group, case: str, name: str, given: dict, before: dict | None = None) -> Any:
    return group.run(case, _call, name, given, before, seconds=SECONDS)[0]


def _call(answer, name: str, given: dict, other: dict | None) -> Any:
    """On a rank: the result; the arguments must be what they were, and no other call may count."""
    before = copy.deepcopy(given)
    if other:
        getattr(answer, name)(**other)
    first = getattr(answer, name)(**given)
    again = getattr(answer, name)(**given)
    if given != before:
        raise Wrong(f"{name} has changed what it was given: {before} became {given}.")
    if repr(first) != repr(again):
        raise Wrong(f"{name} gives {first!r} and then {again!r} for the same arguments.")
    return first


def _same(case, what, found, right, hint):
    value = a_number(case, what, found)
    if not (value == right or math.isclose(value, right, rel_tol=CLOSE)):
        raise Wrong(f"{case}: {what} is {value:.9g}, and {right:.9g} is right.\n{hint}")


def _positive(case, what, value):
    seconds = a_number(case, what, value)
    if not 0 < seconds < math.inf:
        raise Wrong(f"{case}: {what} is {seconds:g}, and should be seconds above 0.")
    return seconds


def _not_longer(case, what, found, least, margin, hint):
    if not found <= least * (1 + margin):
        more = f"{found / least - 1:.1%}" if found < 1e3 * least else "many times"
        raise Wrong(f"{case}: saving {what}, the run takes {more} longer than needed.\n{hint}")


def _listed(given):
    return ", ".join(f"{name} {value:.4g}" for name, value in given.items())
