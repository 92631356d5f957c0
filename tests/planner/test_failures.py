"""Failures by formula, by simulation, and as published."""

import math
from itertools import islice

import pytest

from utils.planner.failures import (
    LLAMA_3,
    LLAMA_3_CAUSES,
    daly,
    simulate,
    spans,
    stretch,
    uptimes,
    young,
)


@pytest.mark.parametrize("hours, minutes", [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_own_figures(hours, minutes):
    """Daly 2006, Figures 3 to 5: a checkpoint of 5 minutes."""
    assert daly(300, 3600 * hours) / 60 == pytest.approx(minutes, rel=0.008)


def test_llama_3s_table():
    assert LLAMA_3.failures == 419
    assert sum(n for kind, n in LLAMA_3_CAUSES.values() if kind == "GPU") == 268
    assert LLAMA_3.hours_between == pytest.approx(3.09, abs=0.005)
    assert LLAMA_3.between(8) == pytest.approx(2048 * LLAMA_3.between(16_384))


@pytest.mark.parametrize("save, between", [(10, 11_000), (60, 3_600), (300, 900), (600, 500)])
def test_dalys_interval_is_nearly_the_best(save, between):
    best = min(stretch(2**k * save / 64, save, 60, between) for k in range(20))
    assert stretch(daly(save, between), save, 60, between) < 1.02 * best
    near = stretch(young(save, between), save, 60, between)
    assert near >= 0.999 * stretch(daly(save, between), save, 60, between)


@pytest.mark.parametrize("save, restart, between", [(60, 300, 11_000), (30, 0, 400), (50, 90, 120)])
def test_thousands_of_failures_agree_with_the_formula(save, restart, between):
    interval = daly(save, between)
    run = simulate(5_000 * between, interval, save, restart, uptimes(between))
    assert run.failures > 5_000
    assert run.stretch == pytest.approx(stretch(interval, save, restart, between), rel=0.06)
    assert run.seconds["computing"] == pytest.approx(5_000 * between)


def test_a_simulated_run_step_by_step():
    """Computing 10, saving 1, restarting 2: failures in computing, in saving, in restarting."""
    times = [5.0, 12.5, 1.5, 100.0]
    assert list(spans(20, 10, 1, 2, iter(times))) == [
        ("lost", 5.0),
        ("restarting", 2),
        ("lost", 10.5),  # 12.5 s after the previous failure, 2 of them restarting
        ("restarting", 1.5),
        ("restarting", 2),
        ("computing", 10),
        ("saving", 1),
        ("computing", 10),
        ("saving", 1),
    ]
    run = simulate(20, 10, 1, 2, iter(times))
    assert run.seconds == {"computing": 20, "saving": 2, "lost": 15.5, "restarting": 5.5}
    assert run.failures == 3
    assert run.stretch == 43 / 20


def test_uptimes_have_their_mean():
    drawn = list(islice(uptimes(50.0, seed=1), 20_000))
    assert sum(drawn) / len(drawn) == pytest.approx(50, rel=0.03)
    assert sum(time > 50 for time in drawn) / len(drawn) == pytest.approx(math.exp(-1), abs=0.01)


def test_no_end_is_infinite_and_nonsense_is_named():
    assert stretch(1e6, 10, 0, 100) == math.inf
    for call in (lambda: young(0, 1), lambda: daly(1, -1), lambda: stretch(0, 1, 1, 1)):
        with pytest.raises(ValueError, match="is not a time"):
            call()
