"""The drawings show the real sizes of the real model."""

import re

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from utils.drawing import start_here as pictures
from utils.models.gpt import GPT, GPTConfig


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(),
        GPTConfig(
            vocab_size=300, hidden_size=24, layers=3, heads=4, kv_heads=2, tie_embeddings=True
        ),
        GPTConfig(hidden_size=20, layers=1, heads=2, head_dim=6, intermediate_size=33),
    ],
)
def test_the_numbers_in_the_picture_add_up_to_the_model(config):
    pictures.model(config)
    labels = [text.get_text() for text in plt.gca().texts]
    plt.close("all")
    sizes = [
        int(re.sub(r".*\n|,", "", label)) for label in labels if re.search(r"\n[\d,]+$", label)
    ]
    embedding, norm, attention, norm_b, mlp, last_norm, head = sizes
    total = embedding + config.layers * (norm + attention + norm_b + mlp) + last_norm + head
    assert total == GPT(config).parameter_count()
    assert f"{config.layers} blocks, one after the other" in labels


def test_the_map_names_every_lesson_that_cuts_something():
    pictures.workshop_map()
    words = " ".join(text.get_text() for text in plt.gca().texts)
    plt.close("all")
    assert all(f"{lesson:02d} " in words for lesson in range(1, 10))


def test_a_matrix_in_two_shows_both_ranks():
    pictures.matrix_in_two()
    words = " ".join(text.get_text() for text in plt.gca().texts)
    plt.close("all")
    assert "on rank 0" in words and "on rank 1" in words
