"""Dividing N items among M ranks."""

import pytest

from utils.shares import share, shares


def test_shares_are_nearly_equal():
    assert shares(7, 3) == (3, 2, 2) and shares(8, 4) == (2, 2, 2, 2)
    assert shares(2, 3) == (1, 1, 0)


def test_seven_rows_on_two_ranks_are_four_and_three():
    assert share(7, 0, 2) == (0, 4)
    assert share(7, 1, 2) == (4, 7)


def test_a_rank_outside_of_the_world_is_refused():
    with pytest.raises(ValueError, match="rank 2 is outside a world of 2"):
        share(4, 2, 2)
