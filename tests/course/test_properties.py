"""Random examples and sequences of calls: the smallest failing one is reported."""

import pytest
from hypothesis import strategies as st

from utils.course.assertions import Wrong
from utils.course.properties import beside, for_all


def under(limit):
    def holds(n):
        if n >= limit:
            raise Wrong(f"f({n}) is wrong")

    return holds


def test_the_smallest_example_is_told():
    for_all(1, st.integers(0, 99), under(100))
    with pytest.raises(Wrong, match=r"^f\(7\) is wrong\b"):
        for_all(1, st.integers(0, 99), under(7))


def test_what_fails_only_after_others_is_told_as_such():
    calls = []

    def holds(n):
        calls.append(n)
        if len(calls) == 20:
            raise Wrong("f is wrong")

    with pytest.raises(Wrong, match="On its own, the same example passes"):
        for_all(1, st.integers(), holds)


class Counter:
    def __init__(self, top):
        self.top, self.n = top, 0

    def add(self, k):
        if k > self.top:
            raise ValueError(k)
        self.n += k
        return self.n


class Forgets(Counter):
    def add(self, k):
        return super().add(k) if self.n < 6 else self.n


class Accepts(Counter):
    def add(self, k):
        self.n += k
        return self.n


def same(where, mine, right):
    if mine.n != right.n:
        raise Wrong(f"{where}: n is {mine.n}")


def story(kind):
    calls = {"add": (st.integers(0, 6),)}
    options = st.integers(3, 5)
    beside(3, lambda top: (kind(top), Counter(top)), options, calls, same)


def test_a_twin_agrees_or_the_shortest_story_is_told():
    story(Counter)
    with pytest.raises(Wrong, match=r"add\(1\): it gives 6 \(int\), but should give 7"):
        story(Forgets)
    with pytest.raises(Wrong, match=r"^\(3\), add\(4\): it gives 4 \(int\), but .* ValueError"):
        story(Accepts)
