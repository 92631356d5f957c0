"""The drawings of lesson 03 can be drawn, at sizes that do not depend on the data."""

import matplotlib.pyplot as plt
import pytest
import torch

from utils.drawing import precision as pictures
from utils.memory.number_formats import FORMATS


@pytest.fixture(autouse=True)
def closed():
    plt.close("all")
    yield
    plt.close("all")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_bits_draws_one_box_for_each_bit():
    pictures.bits()
    axes = plt.gca()
    assert len(axes.patches) == sum(form.bits for form in FORMATS.values())
    assert {"fp32", "fp8 e4m3", "8 + 7", "bits of each"} <= set(texts(axes))


def test_bits_of_a_value_are_written_into_the_boxes():
    pictures.bits(1.0)
    axes = plt.gca()
    written = [text for text in texts(axes) if text in ("0", "1")]
    assert len(written) == sum(form.bits for form in FORMATS.values())
    assert texts(axes).count("1   (0)") == len(FORMATS)


def test_ranges():
    pictures.ranges()
    axes = plt.gca()
    assert len(axes.patches) == 2 * len(FORMATS)
    assert "2.4 digits" in texts(axes)  # bf16


@pytest.mark.parametrize("numbers", [torch.randn(1000) * 1e-6, torch.zeros(5), torch.ones(3) * 1e9])
def test_histogram(numbers):
    pictures.histogram({"weights": numbers}, FORMATS["fp16"], title="t")
    assert plt.gcf().get_size_inches().tolist() == [8.0, 3.6]
    assert "becomes 0" in texts(plt.gca())


def test_staircase_marks_the_skipped_steps():
    pictures.staircase([2.0**16, 2.0**15, 2.0**15], [True, False, False])
    line, marks = plt.gca().lines
    assert line.get_ydata().tolist() == [16, 15, 15]
    assert list(marks.get_xdata()) == [0]
