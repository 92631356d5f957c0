"""utils/drawing/experts.py: what the drawings claim, and that they draw."""

from itertools import chain

import matplotlib.pyplot as plt
import pytest

from utils.drawing import experts as pictures


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(pictures.figures, "show", lambda: None)
    plt.close("all")
    yield
    plt.close("all")


def test_every_row_arrives_where_it_was_sent():
    table = [[1, 2, 0], [0, 0, 3], [1, 1, 1]]
    before, after = pictures.sent(table)
    assert [len(row) for row in before] == [3, 3, 3]
    assert [len(row) for row in after] == [2, 3, 4]
    assert all(goal == rank for rank, row in enumerate(after) for _, goal in row)
    assert sorted(chain(*before)) == sorted(chain(*after))


def test_loads_above_capacity_are_drawn_apart():
    pictures.loads([5, 1, 3], capacity=4)
    heights = [patch.get_height() for patch in plt.gcf().axes[0].patches]
    assert heights == [4, 1, 3, 1]


@pytest.mark.parametrize(
    "draw",
    [
        pictures.mixture,
        lambda: pictures.exchange([[1, 2], [0, 3]]),
        lambda: pictures.loads([3, 2, 5]),
        lambda: pictures.busiest({"a": [1.0, 2.0], "b": [2.0, 1.0]}),
    ],
)
def test_it_draws(draw):
    draw()
    drawn = plt.gcf().axes[0]
    assert len(drawn.patches) + len(drawn.lines) >= 3
