"""utils/drawing/accumulation.py: the sketch says what the lesson says."""

import matplotlib.pyplot as plt
import pytest

from utils.drawing import accumulation as pictures


@pytest.mark.parametrize("micro_batches", [1, 4, 6])
def test_the_same_time_and_a_fraction_of_the_activations(micro_batches):
    whole_times, whole_heights = pictures.teeth(1, micro_batches)
    times, heights = pictures.teeth(micro_batches, 1)
    assert times[-1] == whole_times[-1]
    assert max(heights) * micro_batches == max(whole_heights)
    assert heights[-1] == 0 and times == sorted(times)


def test_it_draws(monkeypatch):
    monkeypatch.setattr(pictures.figures, "show", lambda: None)
    plt.close("all")
    pictures.accumulation()
    whole, pieces = plt.gcf().axes
    assert len(whole.patches) == 3 and len(pieces.patches) == 9  # forward, backward …, step
    plt.close("all")
