"""utils/drawing/sharded.py: what the drawings claim, and that they draw."""

import matplotlib.pyplot as plt
import pytest

from utils.drawing import sharded as pictures


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(pictures.figures, "show", lambda: None)
    plt.close("all")
    yield
    plt.close("all")


def whole_at(rows, moment):
    return {unit for when, unit, _ in rows if when == moment}


def test_when_units_are_whole():
    always = pictures.unit_schedule(4, stage=2)
    assert all(whole_at(always, moment) == {0, 1, 2, 3} for moment in range(8))
    alone = pictures.unit_schedule(4, stage=3)
    assert [whole_at(alone, moment) for moment in range(8)] == [
        {0}, {1}, {2}, {3}, {3}, {2}, {1}, {0}
    ]  # fmt: skip
    ahead = pictures.unit_schedule(4, stage=3, ahead=1)
    assert [whole_at(ahead, moment) for moment in range(8)] == [
        {0, 1}, {1, 2}, {2, 3}, {3}, {3, 2}, {2, 1}, {1, 0}, {0}
    ]  # fmt: skip


def test_the_bytes_in_the_titles():
    pictures.who_holds_what(4)
    titles = [axes.get_title("left") for axes in plt.gcf().axes]
    assert [title.split(": ")[1].split()[0] for title in titles] == ["16", "7", "5.5", "4"]


@pytest.mark.parametrize(
    "draw",
    [
        pictures.who_holds_what,
        pictures.units_in_time,
        pictures.decision,
        lambda: pictures.matrix({"a": {"x": 1.0, "y": None}, "b": {"x": 2.0, "y": 3.0}}, limit=2),
    ],
)
def test_it_draws(draw):
    draw()
    assert len(plt.gcf().axes[0].patches) >= 4
