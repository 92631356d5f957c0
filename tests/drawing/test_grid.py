"""utils/drawing/grid.py: the drawings of lesson 10 draw, for other sizes too."""

import matplotlib.pyplot as plt
import pytest

from utils.drawing import grid as pictures


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(pictures.figures, "show", lambda: None)
    plt.close("all")
    yield
    plt.close("all")


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4), (4, 1, 2)])
def test_every_rank_stands_once_in_each_panel(sizes):
    dp, pp, tp = sizes
    pictures.who_talks(dp=dp, pp=pp, tp=tp, per_node=4)
    panels = plt.gcf().axes
    assert len(panels) == 3
    for panel in panels:
        ranks = [text for text in texts(panel) if text.isdigit()]
        assert sorted(ranks, key=int) == [str(rank) for rank in range(dp * pp * tp)]


def test_partners_have_one_colour():
    pictures.who_talks()
    colours = {}
    for line in plt.gcf().axes[1].lines:  # pipeline groups
        (x,), (y,) = line.get_data()
        colours.setdefault(line.get_color(), []).append((x, round(y, 2)))
    assert sorted(len(places) for places in colours.values()) == [2, 2, 2, 2]


def test_every_rank_has_its_piece():
    pictures.pieces(dp=2, pp=2, tp=2, layers=4)
    words = texts(plt.gcf().axes[0])
    assert "rank 5\nlayers 2 to 3\npart 1 of each matrix" in words
    assert "rank 2\nlayers 0 to 1\npart 0 of each matrix" in words


def test_a_slower_network_is_further_right():
    pictures.network({"DP 4": {10: 60, 1: 80, 0.1: 400}, "PP 4": {10: 90, 1: 90, 0.1: 100}})
    axes = plt.gcf().axes[0]
    assert axes.xaxis_inverted()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.1", "1", "10"]
