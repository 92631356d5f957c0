"""Schedules as lists: complete, free of deadlocks, and as efficient as their papers say."""

import itertools

import pytest

from utils.parallel.schedules import (
    Action,
    check,
    counts,
    feeds,
    in_flight,
    needs,
    schedule,
    simulate,
)

SIZES = list(itertools.product(range(1, 6), range(1, 12)))  # ranks, micro-batches
KINDS = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2)]
KINDS += [("interleaved", 3), ("zero-bubble", 1)]


@pytest.mark.parametrize("name, chunks", KINDS)
def test_every_schedule_comes_to_its_end(name, chunks):
    for stages, micro_batches in SIZES:
        actions = schedule(name, stages, micro_batches, chunks)
        check(actions)
        assert counts(actions) == (stages, chunks, micro_batches)
        each = 3 if name == "zero-bubble" else 2
        assert [len(order) for order in actions] == [each * micro_batches * chunks] * stages


@pytest.mark.parametrize("name, chunks", KINDS)
def test_the_bubble_is_that_of_the_formula(name, chunks):
    """GPipe and 1F1B: (p-1)/(m+p-1) of the span; with v chunks (p-1)/v instead of p-1;
    zero bubble: (p-1)(F + B - W) instead of (p-1)(F + B + W), B without the weight gradients W."""
    for stages, micro_batches in SIZES:
        if micro_batches < stages:
            continue
        simulation = simulate(schedule(name, stages, micro_batches, chunks), 1.0, 2.0, 1.0)
        idle = 3 * (stages - 1)
        if name == "interleaved":
            idle /= chunks
        elif name == "zero-bubble":
            idle = stages - 1
        elif name == "gpipe" and chunks > 1:  # looped: chunks follow without a gap
            idle /= chunks
        assert simulation.span == pytest.approx(3 * micro_batches + idle)
        assert simulation.bubble == pytest.approx(idle / simulation.span)
        assert simulation.busy == pytest.approx([3 * micro_batches] * stages)


def test_micro_batches_in_flight():
    assert in_flight(schedule("gpipe", 4, 8)) == (8, 8, 8, 8)
    assert in_flight(schedule("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight(schedule("1f1b", 4, 2)) == (2, 2, 2, 1)
    assert in_flight(schedule("zero-bubble", 4, 8)) == (4, 4, 4, 4)
    # Korthikanti et al.: 1 + (p-1)/(p·v) times what 1f1b keeps on its first rank
    for chunks in (2, 4):
        first = in_flight(schedule("interleaved", 4, 8, chunks))[0]
        assert first == pytest.approx(4 * (1 + 3 / (4 * chunks)))


def test_the_first_rank_of_1f1b_by_hand():
    written = [str(action) for action in schedule("1f1b", 3, 5)[0]]
    assert written == ["F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "B3", "B4"]
    assert str(schedule("interleaved", 2, 2, 2)[1][1]) == "F1"
    assert str(Action("B", 3, 1)) == "B3/1"


def test_uneven_stages_and_slow_links():
    even = simulate(schedule("1f1b", 2, 4), 1.0, 2.0)
    slow = simulate(schedule("1f1b", 2, 4), [1.0, 2.0], [2.0, 4.0])
    assert slow.span == 1 + 4 * 6 + 2  # the slow stage never pauses
    assert even.span < simulate(schedule("1f1b", 2, 4), transfer=0.5).span
    with pytest.raises(ValueError, match="3 costs for 2 stages"):
        simulate(schedule("1f1b", 2, 4), [1.0, 2.0, 3.0])


def test_who_feeds_whom_and_who_needs_whom_agree():
    for name, chunks in KINDS:
        actions = schedule(name, 3, 4, chunks)
        fed = needed = 0
        for rank, order in enumerate(actions):
            for action in order:
                if goal := feeds(action, rank, 3, chunks):
                    fed += 1
                    assert (rank, action) in needs(goal[1], goal[0], 3, chunks)
                others = [a for _, a in needs(action, rank, 3, chunks) if a.kind == action.kind]
                needed += len(others)
        assert fed == needed == 2 * 4 * (3 * chunks - 1)


def test_times_respect_what_they_need():
    for name, chunks in KINDS:
        simulation = simulate(schedule(name, 3, 5, chunks), transfer=0.25)
        ends = {
            (rank, action): end
            for rank, order in enumerate(simulation.times)
            for action, _, end in order
        }
        for rank, order in enumerate(simulation.times):
            for (_, _, end), (_, begin, _) in itertools.pairwise(order):
                assert end <= begin
            for action, begin, _ in order:
                if action.kind == "F" and (rank or action.chunk):
                    before = (rank - 1) % 3, Action("F", action[1], (action[2] * 3 + rank - 1) // 3)
                    assert ends[before] + 0.25 <= begin


# ---- refusals


def test_names_and_sizes_are_checked():
    with pytest.raises(ValueError, match="schedule '1b1f' is unknown: use one of gpipe"):
        schedule("1b1f", 2, 2)
    with pytest.raises(ValueError, match="has one chunk per rank, not 2"):
        schedule("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="0 micro-batches"):
        schedule("gpipe", 2, 0)
    with pytest.raises(ValueError, match="empty"):
        check([[], []])


def test_a_missing_or_double_action_is_named():
    actions = schedule("gpipe", 2, 2)
    missing = [actions[0], [a for a in actions[1] if a != Action("B", 1)]]
    with pytest.raises(ValueError, match="rank 1 never does B1"):
        check(missing)
    with pytest.raises(ValueError, match="twice"):
        check([[*actions[0], Action("B", 1)], actions[1]])
    with pytest.raises(ValueError, match="unknown kind"):
        check([[*actions[0], Action("X", 1)], actions[1]])
    half = schedule("zero-bubble", 2, 2)
    with pytest.raises(ValueError, match="rank 0 never does W1"):
        check([[a for a in half[0] if a != Action("W", 1)], half[1]])


def test_a_deadlock_is_named():
    first = [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)]
    second = [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1)]
    with pytest.raises(ValueError, match="deadlock: rank 0 at B0 waits for B0 of rank 1; rank 1"):
        check([first, second])
    with pytest.raises(ValueError, match="rank 0 at B0 waits for F0 of rank 0"):
        check([[Action("B", 0), Action("F", 0)]])
