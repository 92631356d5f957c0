"""The predictions of a room as a histogram: each counts once, and outliers do not distort it."""

import math
import random
import statistics
import time

import pytest

from tests.classroom.boards import CHECK, GUESS, OTHER, check, prediction
from utils.classroom.room import BINS, Room, bins
from utils.classroom.store import Taken
from utils.course.progress import Part

PARTS = [Part("lab 01", (GUESS,), (CHECK, OTHER))]


def taken(learner, *reports, alias="owl"):
    return Taken(learner, alias, time.time(), [*reports])


def within(shown):
    """All predictions in a histogram."""
    return sum(shown["bins"]) + shown["below"] + shown["above"]


def test_ten_thousand_predictions():
    room, draw = Room(PARTS), random.Random(0)
    values = [draw.lognormvariate(3, 1) for _ in range(10_000)]
    for learner, value in enumerate(values):
        room.take(taken(learner, prediction(value, measured=20 + value / 1000, theory=20.0)))
    begin = time.process_time()
    shown = room.histogram(GUESS, reveal=True)
    assert time.process_time() - begin < 1.0
    assert shown["count"] == within(shown) == room.counts[GUESS] == 10_000
    assert shown["log"] and shown["median"] == statistics.median(values)
    edges = shown["edges"]
    assert len(edges) == BINS + 1 and edges == sorted(edges)
    for low, high, count in zip(edges, edges[1:], shown["bins"]):
        assert abs(sum(low <= value < high for value in values) - count) <= 1  # at an edge
    assert shown["theory"]["median"] == 20.0 and shown["measured"]["count"] == 10_000
    assert 20 < shown["measured"]["low"] < shown["measured"]["median"] < shown["measured"]["high"]


def test_theory_and_measurement_are_kept_back_until_they_are_asked_for():
    room = Room(PARTS)
    room.take(taken(1, prediction(5.0, theory=1e6, measured=2e6)))
    shown = room.histogram(GUESS, reveal=False)
    assert shown["theory"] is shown["measured"] is None and shown["edges"][-1] < 100
    shown = room.histogram(GUESS, reveal=True)
    assert shown["theory"]["median"] == 1e6
    assert shown["edges"][0] == pytest.approx(5.0) and shown["edges"][-1] == pytest.approx(2e6)


def test_a_number_counts_once_and_a_late_one_not():
    room = Room(PARTS)
    room.take(taken(1, prediction(5.0), prediction(6.0)))
    room.take(taken(2, prediction(7.0, late=True)))
    shown = room.histogram(GUESS, reveal=False)
    assert (shown["count"], shown["late"], shown["median"]) == (1, 1, 6.0)
    assert room.counts[GUESS] == 1


LISTS = {
    "none": [], "one": [3.0], "zero": [0.0], "the same": [4.0] * 30, "two": [1.0, 2.0],
    "signs": [-5.0, 0.0, 5.0], "a joker": [*map(float, range(10, 40)), 1e300],
    "a joker of the other sign": [-1e300, *map(float, range(10, 40))],
    "extremes": [-1e300, 1e300], "tiny": [1e-300, 2e-300, 1e300], "negative": [-1.0, -1000.0],
    "nearly the same": [1.0, math.nextafter(1.0, 2)],
}


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("marks", [[], [2.0], [-1e300, 1e300]], ids=["", "mark", "far marks"])
def test_every_list_has_its_histogram(values, marks):
    shown = bins(sorted(values), marks)
    assert within(shown) == len(values)
    edges = shown["edges"]
    assert all(map(math.isfinite, edges)) and edges[0] < edges[-1] and edges == sorted(edges)
    slack = 1e-9 * max(map(abs, edges))
    assert all(edges[0] - slack <= mark <= edges[-1] + slack for mark in marks)


def test_one_joker_does_not_press_the_others_together():
    shown = bins([*map(float, range(10, 40)), 1e300], [])
    assert shown["above"] == 1 and sum(count > 0 for count in shown["bins"]) > 10


@pytest.mark.parametrize("values", [[10, 20, 1e300], [-1e300, 10, 20, 40], [10, 20, 40, 1e300]])
def test_nor_does_it_in_a_small_class(values):
    shown = bins([*map(float, values)], [])
    assert shown["below"] + shown["above"] == 1 and not shown["log"]
    assert shown["edges"][0] == 10 and shown["edges"][-1] in (20, 40)


def test_a_symptom_shows_what_went_wrong_before_its_case():
    room = Room(PARTS)
    room.take(taken(1, check(symptom="with 2 ranks and f(x): the sum is: 41."), check(OTHER)))
    said = [one[3] for one in room.row(1)["checks"].values()]
    assert said == ["the sum is: 41. (with 2 ranks and f(x))", "rank 0 says 41."]


def test_what_the_course_does_not_have_is_not_shown():
    room = Room(PARTS)
    room.take(taken(1, check(name="lab 99 of before"), check()))
    assert list(room.row(1)["checks"]) == [0]
    assert not room.knows(check(name="lab 99 of before"))


def test_a_question_comes_and_goes():
    room = Room(PARTS)
    ask = {"kind": "help", "name": "", "question": "", "at": 5.0}
    room.take(taken(1, ask))
    assert room.row(1)["help"] == ["", 5.0]
    room.take(taken(1, {**ask, "question": None}))
    assert room.row(1)["help"] is None
