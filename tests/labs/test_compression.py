"""Lab 15: the answers that its checks must accept and reject, and its support code."""

import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.data import library
from utils.paths import ROOT
from utils.workshop import labs

LAB = Lab(
    "15_compression",
    {
        "int8_linear": ("contracts", "int8_linear", "int8_linear.py"),
        "smoothing": ("contracts", "smoothing", "smoothing.py"),
        "prune_heads": ("contracts", "prune_heads", "prune_heads.py"),
        "distill": ("contracts", "distillation", "distill.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── support code ──────────────────────────────────────────────────────────────────────────────


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    from labs.support.compression import measurements

    for exercise, (*_, file) in LAB.exercises.items():
        (tmp_path / file).write_text(labs.generated(LAB.solution / file, ROOT))
        name = {"int8_linear": "layer", "smoothing": "channels", "prune_heads": "heads"}
        measure = getattr(measurements, name.get(exercise, "curves"))
        assert measure(str(tmp_path / file)) is None


def test_the_text_was_held_out_and_is_not_shared():
    from labs.support.compression import drawn

    assert set(drawn.MODULES) <= set(library.held_out_modules())
    calibration, held_out = drawn.batches(3, 4, 2)
    rows = [row for tokens, _ in (*calibration, *held_out) for row in tokens]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 6 * 4


def test_the_drawn_heads_are_those_of_tiny():
    """Except for the channel that the norm now blocks."""
    from labs.support.compression import drawn

    _, held_out = drawn.batches(0, 0, 1)
    for sizes in drawn.SIZES.values():
        model, _ = drawn.many_heads(torch.Generator().manual_seed(1), sizes)
        assert abs(drawn.loss(model, held_out) - drawn.loss(drawn.tiny()[0], held_out)) < 0.4
