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


class TestLab(LabTests):
    lab = LAB


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
