"""The memory timeline draws what Memory has counted; the drawings say what they show."""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

from utils.drawing import memory as pictures_memory
from utils.measure.memory import Memory


@pytest.fixture
def memory():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.ones(32, 64)
    with Memory(model=model) as memory:
        with memory.phase("forward"):
            loss = model(x).square().sum()
        with memory.phase("backward"):
            loss.backward()
    yield memory
    plt.close("all")


def test_the_areas_end_where_the_counts_end(memory, capsys):
    pictures_memory.timeline(memory, title="a step")
    axes = plt.gca()
    kinds = [area.get_label() for area in axes.collections]
    assert kinds == ["parameters", "gradients", "activations", "temporary"]
    top = max(path.vertices[:, 1].max() for a in axes.collections for path in a.get_paths())
    assert top * 2**10 == pytest.approx(memory.peak_bytes)
    words = [text.get_text() for text in axes.texts]
    assert words == ["forward", "backward"] and axes.get_ylabel() == "KiB"
    printed = capsys.readouterr().out
    assert printed.startswith(f"Peak {memory.peak_bytes / 2**10:.1f} KiB in the phase ")


def test_the_height_can_be_fixed_and_axes_given(memory, capsys):
    axes = plt.subplots()[1]
    pictures_memory.timeline(memory, ax=axes, top=2**30)
    assert axes.get_ylabel() == "GiB" and axes.get_ylim()[1] > 1
    assert capsys.readouterr().out == ""


def test_without_phases_it_says_what_to_do():
    with Memory(device="cpu") as memory:
        torch.ones(3)
    with pytest.raises(ValueError, match="has no phase"):
        pictures_memory.timeline(memory)


def test_the_drawing_of_recomputation_names_its_rows():
    pictures_memory.recomputation()
    words = " ".join(text.get_text() for text in plt.gca().texts)
    plt.close("all")
    for word in ("keep all", "every layer", "segments of", "layer 5"):
        assert word in words
