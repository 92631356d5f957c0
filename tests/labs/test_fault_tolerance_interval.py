"""Lab 13, exercises c and d: the answers that their checks must accept and reject, and the formulas
that they judge by against failures that are simulated one by one."""

import random

import pytest

from labs.support.fault_tolerance import check_interval
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "13_fault_tolerance",
    {
        "interval": ("check_interval", "interval", "interval.py"),
        "plan": ("check_interval", "plan", "interval.py"),
    },
    limits={"labs.support.fault_tolerance.check_interval.SECONDS": 6.0},
)

OTHERS = {
    "interval: Daly's estimate, and a share by adding up attempts": """
def lost_share(interval, save, restart, between):
    def attempts(length):
        return between * math.expm1(length / between)  # until it goes through once

    whole = math.exp(-(interval + save) / between)
    failures = 1 / whole - 1
    return 1 - interval / (attempts(interval + save) + failures * attempts(restart))


def best_interval(save, between):
    if save >= 2 * between:
        return between
    x = save / (2 * between)
    return math.sqrt(2 * save * between) * (1 + math.sqrt(x) / 3 + x / 9) - save
""",
    "interval: Newton's method, and NumPy's numbers": """
def between_failures(observed, parts):
    rates = [parts[kind] * observed[kind][0] / observed[kind][1] for kind in parts]
    with np.errstate(divide="ignore"):
        return np.float64(3600) / np.sum(rates)


def best_interval(save, between):
    c, t = save / between, 0.99  # e^(t + c) (1 - t) = 1
    for _ in range(100):
        value, slope = (1 - t) - math.exp(-t - c), -1 + math.exp(-t - c)
        t = min(max(t - value / slope, t / 2), (1 + t) / 2)
    return np.float64(t * between)
""",
    "plan: a linear system for each plan, and a finer search": """
def _stretch(interval, every, memory, disk, restart, between, light):
    n = 2 * every
    a, t = np.eye(n), np.zeros(n)
    for i in range(every):
        for state, length, to in (
            (i, interval + (disk if i == every - 1 else memory), i + 1), (every + i, restart, i)
        ):
            fails = 1 - math.exp(-length / between)
            t[state] = between * fails
            if to < every:
                a[state, to] -= 1 - fails
            a[state, every + i] -= fails * light
            a[state, every] -= fails * (1 - light)
    return np.linalg.solve(a, t)[0] / (every * interval)


def best_plan(memory, disk, restart, between, light):
    best, worse = None, 0
    for every in range(1, 65):
        base = math.sqrt(2 * between * (memory * (every - 1) + disk) / every)
        plan = min(
            (_stretch(base * f, every, memory, disk, restart, between, light), base * f, every)
            for f in np.geomspace(0.2, 5, 30)
        )
        worse = worse + 1 if best and plan > best else 0
        best = min(best or plan, plan)
        if worse == 4:
            break
    return [best[1], float(best[2])]
""",
    "plan: as the last hint says it": """
def _stretch(interval, every, memory, disk, restart, between, light):
    a, t = np.eye(2 * every), np.zeros(2 * every)
    for i in range(every):
        last = i == every - 1
        for row, length in ((i, interval + (disk if last else memory)), (every + i, restart)):
            through = math.exp(-length / between)
            t[row] = between * (1 - through)
            if row >= every:
                a[row, i] -= through
            elif not last:
                a[row, i + 1] -= through
            a[row, every + i] -= (1 - through) * light
            a[row, every] -= (1 - through) * (1 - light)
    return np.linalg.solve(a, t)[0] / (every * interval)


def best_plan(memory, disk, restart, between, light):
    best = math.inf, None
    for every in range(1, 65):
        around = best_interval((memory * (every - 1) + disk) / every, between)
        for interval in around * np.geomspace(0.3, 3, 20):
            try:
                takes = _stretch(interval, every, memory, disk, restart, between, light)
            except np.linalg.LinAlgError:
                continue
            if takes >= 1:
                best = min(best, (takes, (interval, every)))
    return best[1]
""",
}


EACH = {"interval": (18, 7, 2), "plan": (12, 4, 2)}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 28, EACH

    def task(self, exercise, tasks):
        return tasks[{"interval": 0, "plan": 3}[exercise]]


def simulated(interval, every, memory, disk, restart, between, light, rounds):
    """Time over computing, failure by failure."""
    draw, total = random.Random(7), 0.0
    for _ in range(rounds):
        done = 0
        while done < every:
            length = interval + (disk if done == every - 1 else memory)
            uptime = draw.expovariate(1 / between)
            if uptime >= length:
                total, done = total + length, done + 1
                continue
            total += uptime
            done = done if draw.random() < light else 0
            while (uptime := draw.expovariate(1 / between)) < restart:
                total += uptime
                done = done if draw.random() < light else 0
            total += restart
    return total / (rounds * every * interval)


@pytest.mark.parametrize(
    "plan, given",
    [
        ((100, 3), (5, 60, 120, 3600, 0.7)),
        ((60, 12), (2, 300, 60, 900, 0.9)),
        ((150, 2), (10, 20, 0, 500, 0.2)),
        ((80, 1), (10, 20, 300, 500, 0.5)),
    ],
)
def test_the_expected_time_is_that_of_simulated_failures(plan, given):
    assert simulated(*plan, *given, 20_000) == pytest.approx(
        check_interval.stretch_of(*plan, *given), rel=0.02
    )


def test_the_best_plan_beats_others():
    given = {"memory": 5, "disk": 60, "restart": 120, "between": 3600, "light": 0.7}
    least = check_interval.best_stretch(**given)
    others = [
        check_interval.stretch_of(interval, every, **given)
        for interval in (20, 60, 200, 600)
        for every in (1, 2, 5, 20)
    ]
    assert least <= min(others) < 1.02 * least < max(others)
