"""Lab 04: the answers that its checks must accept and reject, and its support code."""

import random

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "04_activation_checkpointing",
    {
        "checkpoint": ("contracts", "checkpointing", "checkpointed.py"),
        "peak_bytes": ("contracts", "peak", "plan.py"),
        "choose": ("contracts", "choice", "plan.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── support code ──────────────────────────────────────────────────────────────────────────────


def test_the_layers_are_counted_by_hand():
    from labs.support.activation_checkpointing.network import (
        ROWS,
        SHAPES,
        WIDTH,
        batch,
        measure_layers,
        network,
    )

    for (inside, times), layer in zip(SHAPES, measure_layers(network(), batch()), strict=True):
        assert layer.input_bytes == 4 * ROWS * WIDTH
        assert layer.inside_bytes == 4 * ROWS * inside * times
        assert layer.flops == 2 * 2 * ROWS * WIDTH * inside


def test_what_recomputation_does_to_the_peak():
    """Recomputing all layers gives the lowest peak; recomputing the last one never pays."""
    from labs.support.activation_checkpointing.contracts import all_sets
    from labs.support.activation_checkpointing.network import Layer

    dice = random.Random(1)
    for _ in range(30):
        layers = [Layer(dice.randint(0, 9), dice.randint(0, 50), 1) for _ in range(5)]
        peaks = {frozenset(chosen): peak for _, peak, chosen in all_sets(layers)}
        assert min(peaks.values()) == peaks[frozenset(range(5))]
        assert all(peaks[chosen | {4}] >= peaks[chosen - {4}] for chosen in peaks)
