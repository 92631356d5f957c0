"""The course's plots: what they refuse, what they write, and their constant sizes."""

from itertools import pairwise

import matplotlib.pyplot as plt
import pytest

from utils.drawing import figures


def texts(axes):
    return [text.get_text().strip() for text in axes.texts]


def test_the_size_of_a_figure_does_not_depend_on_what_it_shows():
    sizes = set()
    for value in (None, 0, 1e-9, 5e15):
        figures.prediction(
            [("prediction", value, "s"), ("theory", 2, "s"), ("measurement", 1, "s")]
        )
        sizes.add(tuple(plt.gcf().get_size_inches()))
    assert sizes == {figures.SIZES["strip"]}


def test_prediction_draws_three_rows_and_a_dash_for_what_is_open():
    figures.prediction(
        [("prediction", None, "MB"), ("theory", 8, "MB"), ("measurement", 8.25, "MB")]
    )
    assert texts(plt.gca()) == ["–", "8 MB", "8.25 MB"]
    assert [bar.get_width() for bar in plt.gca().patches] == [0, 8, 8.25]


def test_prediction_refuses_to_mix_units():
    with pytest.raises(ValueError, match="one unit: got MB, s"):
        figures.prediction([("theory", 8, "MB"), ("measurement", 8, "s")])


def test_power_law_recovers_the_line_it_was_given():
    sizes = [1e3, 1e4, 2e5]
    scale, exponent = figures.power_law(sizes, [7 * size**-0.2 for size in sizes])
    assert scale == pytest.approx(7)
    assert exponent == pytest.approx(0.2)


@pytest.mark.parametrize("xs, ys", [([1.0], [2.0]), ([1, 2], [0, 1]), ([-1, 2], [1, 1])])
def test_power_law_names_points_it_cannot_fit(xs, ys):
    with pytest.raises(ValueError, match="positive points, got x ="):
        figures.power_law(xs, ys)


def test_labels_of_curves_that_end_together_do_not_touch():
    figures.curves({name: [3.0, 1.0] for name in ("1 rank", "2 ranks", "4 ranks")}, y="loss")
    heights = sorted(text.get_position()[1] for text in plt.gca().texts)
    line = 11 / 72 / plt.gcf().get_size_inches()[1]  # the height of a line, in figure heights
    assert all(b - a > line for a, b in pairwise(heights))


def test_stack_starts_each_part_where_the_last_one_ended():
    figures.stack({"fp32": {"parameters": 4, "optimizer": 8}}, unit="bytes")
    assert [bar.get_x() for bar in plt.gca().patches] == [0, 4]
    assert texts(plt.gca()) == ["12 bytes"]


def test_a_given_axes_is_drawn_on_and_no_other_figure_is_made():
    _, axes = figures.figure("normal", columns=2)
    figures.bars({"a": 1, "b": 2}, ax=axes[0])
    figures.curves({"loss": [3, 2, 1]}, ax=axes[1])
    assert len(plt.get_fignums()) == 1 and len(axes[0].patches) == 2 and len(axes[1].lines) == 1


def test_an_unknown_size_is_named_with_the_choices():
    with pytest.raises(ValueError, match="'huge' is not one of strip, normal, tall"):
        figures.figure("huge")


def test_ranks_keep_their_colour_and_eight_ranks_differ():
    assert figures.shade("rank 3") == figures.shade("rank3") == figures.COLORS["rank3"]
    assert len({figures.shade(f"rank {rank}") for rank in range(8)}) == 8
    assert figures.shade("rank 9") == figures.shade("rank 1")


@pytest.mark.parametrize("value, text", [
    (0, "0"), (3.14159, "3.14"), (999, "999"), (12_345, "12.3k"), (874_240, "874k"), (1e9, "1G"),
    (1.2e-7, "1.2e-07"), (0.25, "0.25"), (1234, "1234")])
def test_numbers_are_short(value, text):
    assert figures.number(value) == text


def test_an_arrow_ends_on_the_edges_of_its_boxes():
    sketch = figures.Sketch(8, 2)
    sketch.box("A", x=0, y=0.5, width=2, height=1)
    sketch.box("B", x=6, y=0.5, width=2, height=1)
    sketch.arrow("A", "B", "bytes")
    assert sketch._edge("A", "B") == (2, 1) and sketch._edge("B", "A") == (6, 1)
    with pytest.raises(KeyError):
        sketch.arrow("A", "nowhere")
