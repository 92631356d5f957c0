"""Lab 04: the answers that its checks must accept and reject, and its pieces."""

import random

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.runner import load_answer

LAB = Lab(
    "04_activation_checkpointing",
    {
        "checkpoint": ("check_checkpoint", "checkpointing", "checkpointed.py"),
        "peak_bytes": ("check_plan", "peak", "plan.py"),
        "choose": ("check_plan", "choice", "plan.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


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


def drawn_networks():
    """Layers of small numbers, and all sets of them with their peak and their work."""
    from labs.support.activation_checkpointing.check_plan import _all_sets
    from labs.support.activation_checkpointing.network import Layer

    dice = random.Random(1)
    for _ in range(30):
        layers = [
            Layer(dice.randint(0, 9), dice.randint(0, 50), dice.randint(1, 9)) for _ in range(5)
        ]
        peaks, work = (numbers.tolist() for numbers in _all_sets(layers))
        sets = [{i for i in range(5) if number >> i & 1} for number in range(32)]
        yield layers, list(zip(sets, peaks, work, strict=True))


def test_the_judge_and_the_solution_count_alike():
    from labs.support.activation_checkpointing.check_plan import _best, _peak

    plan = load_answer(LAB.solution / "plan.py")
    for layers, sets in drawn_networks():
        for chosen, peak, work in sets:
            assert plan.peak_bytes(layers, chosen) == _peak(layers, chosen) == peak
            assert work == sum(layers[i].flops for i in chosen)
        for budget in {peak for _, peak, _ in sets}:
            plans = plan.choose(layers, budget), _best(layers, budget)
            cost = {sum(layers[i].flops for i in chosen) for chosen in plans}
            assert cost == {min(work for _, peak, work in sets if peak <= budget)}


def test_recomputing_everything_is_the_lowest_peak():
    for layers, sets in drawn_networks():
        assert min(peak for _, peak, _ in sets) == sets[-1][1] and len(sets[-1][0]) == len(layers)


def test_the_last_layer_never_pays():
    for layers, sets in drawn_networks():
        peaks = {frozenset(chosen): peak for chosen, peak, _ in sets}
        last = len(layers) - 1
        assert all(peaks[chosen | {last}] >= peaks[chosen - {last}] for chosen in peaks)
