"""The drawings of lesson 06 draw, and say what the code does."""

import pytest

from utils.drawing import tensor as pictures
from utils.drawing.figures import plt


@pytest.fixture(autouse=True)
def no_windows():
    plt.switch_backend("agg")
    yield
    plt.close("all")


def test_they_draw():
    pictures.column_and_row(2)
    pictures.heads([(8, 8), (8, 2), (6, 3)], ranks=2)
    pictures.layer_regions()
    assert len(plt.get_fignums()) == 3


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "owners"),
    [
        (4, 4, 2, [0, 0, 1, 1]),
        (6, 3, 2, [0, 0, 0, 0, 1, 1]),  # with its key-value head
        (4, 1, 2, [0, 0, 1, 1]),  # one key-value head for all: queries are shared out alone
    ],
)
def test_who_computes_which_head(queries, keys, ranks, owners):
    assert pictures.query_owners(queries, keys, ranks) == owners
