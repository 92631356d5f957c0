"""The drawings of lesson 14 show what they are given."""

import pytest
import torch

from utils.drawing import prompts as pictures
from utils.drawing.figures import GOLD, plt
from utils.prompts.in_context import Accuracy, accuracy


def words_of(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_where_they_enter():
    pictures.where_they_enter(layers=2, virtual=3)
    words = words_of(plt.gcf())
    assert all(words.count(kind) == 1 for kind in pictures.KINDS)
    assert words.count("k v") == 2 * 3  # prefix tuning: in each layer
    assert words.count("A") == words.count("B") == 2  # LoRA: next to each layer


def test_one_row_has_targets_on_the_answer_and_its_end_alone():
    pictures.one_row(2, ["a", "b", "c"], ["x", "y"])
    words = words_of(plt.gcf())
    names = [word for word in words if word in {"v0", "v1", "a", "b", "c", "x", "y", "end", "–"}]
    inputs, targets = names[::2], names[1::2]
    assert inputs == ["v0", "v1", "a", "b", "c", "x", "y"]
    assert targets == ["–", "–", "–", "–", "x", "y", "end"]  # shifted by one
    assert [word for word in words if word.isdigit()] == [str(n) for n in range(7)]


def test_growth_draws_every_point_and_its_interval():
    curves = {
        "base": {0: accuracy([True, False]), 4: accuracy([True] * 8)},
        "tiny": {0: accuracy([False] * 8), 4: accuracy([True, False, False])},
    }
    pictures.growth(curves, chance=0.25, title="which?")
    axes = plt.gcf().axes[0]
    lines = [line.get_ydata() for line in axes.lines]
    assert list(lines[0]) == [0.5, 1.0]
    assert list(lines[1]) == [0.0, pytest.approx(1 / 3)]
    assert set(lines[2]) == {0.25}
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(curves["base"][0].low)
    assert {"base", "tiny", "guessing"} <= set(words_of(plt.gcf()))


def test_accuracies_have_intervals_and_prompt_tuning_is_gold():
    rows = {
        "zero-shot": Accuracy(0.2, 0.1, 0.3, 64),
        "prompt tuning": Accuracy(0.8, 0.7, 0.9, 64),
    }
    pictures.accuracies(rows, chance=0.2)
    axes = plt.gcf().axes[0]
    assert [bar.get_width() for bar in axes.patches] == [0.2, 0.8]
    assert axes.patches[1].get_facecolor() == pytest.approx(plt.matplotlib.colors.to_rgba(GOLD))
    assert [list(line.get_xdata()) for line in axes.lines[:2]] == [[0.1, 0.3], [0.7, 0.9]]
    assert {"20 %", "80 %"} <= set(words_of(plt.gcf()))


def test_sizes_are_dots_at_their_values():
    pictures.sizes({"prompt tuning": 2048, "LoRA": 156_160}, "learned")
    axes = plt.gca()
    assert axes.get_xscale() == "log" and not axes.patches
    assert [line.get_xdata()[0] for line in axes.lines] == [2048, 156_160]
    assert words_of(plt.gcf()) == ["2048", "156k"]


def test_sweeps_mark_the_best():
    knobs = {"length": {1: 0.2, 8: 0.9}, "rate": {0.3: 0.9, 3: 0.1}}
    gold = plt.matplotlib.colors.to_rgba(GOLD)
    for best, expected in (
        (max, [[False, True], [True, False]]),
        (min, [[True, False], [False, True]]),
    ):
        pictures.sweeps(knobs, "knobs", best=best)
        marked = [[bar.get_facecolor() == gold for bar in axes.patches] for axes in plt.gcf().axes]
        assert marked == expected


def test_among_words():
    torch.manual_seed(0)
    words = torch.randn(40, 8)
    pictures.among_words(words, 3 * torch.randn(4, 8), before=words[:4])
    _, right = plt.gcf().axes
    after = right.collections[1].get_offsets()
    assert len(after) == 4
    before = right.collections[0].get_offsets()[:, 0].tolist()
    assert before == pytest.approx([1] * 4)  # these are words


def test_cosines():
    some = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    others = torch.tensor([[3.0, 0.0], [-1.0, 0.0], [1.0, 1.0]])
    expected = torch.tensor([[1.0, -1.0, 0.5**0.5], [0.0, 0.0, 0.5**0.5]])
    torch.testing.assert_close(pictures.cosines(some, others), expected)


def test_batch_of_tasks_names_tasks_texts_and_answers():
    pictures.batch_of_tasks([("a", "1 $x$", "one"), ("b", "2\n3", " two"), ("a", "x" * 99, "y")])
    words = words_of(plt.gcf())
    assert words.count("a") == 2
    assert {r"1 \$x\$", "one", "2↵3", "␣two"} <= set(words)
    assert max(len(word) for word in words if word.startswith("xx")) == 34


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (" yes", "␣yes"),
        ("       ", "␣×7"),
        ("\n   ", "↵␣×3"),
        ("a b", "a b"),
        ("abcdefghij", "abcdefgh…"),
    ],
)
def test_blanks_and_line_ends_can_be_seen(text, seen):
    pictures.one_row(1, [text], ["x"])
    assert seen in words_of(plt.gcf())


def test_every_rank_of_the_first_stage_has_the_prompt():
    pictures.prompt_on_ranks(stages=3, tp=2)
    words = words_of(plt.gcf())
    assert words.count("prompt") == 2
    assert "rank 5: its slice of stage 2" in words
