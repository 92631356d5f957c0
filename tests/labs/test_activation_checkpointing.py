"""Lab 04: the answers that its checks must accept and reject, and its pieces."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.checks import load_answer

LAB = Lab(
    "04_activation_checkpointing",
    {
        "checkpoint": ("check_checkpoint", "checkpointing", "checkpointed.py"),
        "peak_bytes": ("check_plan", "peak", "plan.py"),
        "choose": ("check_plan", "choice", "plan.py"),
    },
)

OTHERS = {
    "checkpoint: random state in a block, gradients by name": """
class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.state = function, torch.random.get_rng_state()
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs = []
        for tensor in ctx.saved_tensors:
            again = tensor.detach()
            again.requires_grad = tensor.requires_grad
            inputs.append(again)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            output = ctx.function(*inputs)
        output.backward(gradient)
        return (None, *(tensor.grad for tensor in inputs))
""",
    "peak_bytes: moment by moment": """
def peak_bytes(layers, recomputed):
    held = [x.input_bytes + (i not in recomputed) * x.inside_bytes for i, x in enumerate(layers)]
    moments = [sum(held)]
    for i in recomputed:
        moments.append(sum(held[: i + 1]) + layers[i].inside_bytes)
    return max(moments)
""",
    "choose: a list, sets by bits": """
def choose(layers, budget):
    n, best, least = len(layers), None, None
    for bits in range(2**n):
        chosen = [i for i in range(n) if bits >> i & 1]
        peak = peak_bytes(layers, set(chosen))
        least = peak if least is None else min(least, peak)
        flops = sum(layers[i].flops for i in chosen)
        if peak <= budget and (best is None or flops < best[0]):
            best = (flops, chosen)
    if best is None:
        raise ValueError(f"{least:,} bytes are needed at least")
    return best[1]
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 25

    def task(self, exercise, tasks):
        return tasks[exercise == "choose"]


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


def test_the_judge_and_the_solution_count_alike():
    import random

    from labs.support.activation_checkpointing.check_plan import _best, _peak, _sets
    from labs.support.activation_checkpointing.network import Layer

    plan = load_answer(LAB.solution / "plan.py")
    dice = random.Random(1)
    for _ in range(30):
        layers = [
            Layer(dice.randint(0, 9), dice.randint(0, 50), dice.randint(1, 9)) for _ in range(5)
        ]
        for chosen in _sets(layers):
            assert plan.peak_bytes(layers, chosen) == _peak(layers, chosen)
        budget = _peak(layers, set()) - 1 - dice.randint(0, 3)
        if any(_peak(layers, chosen) <= budget for chosen in _sets(layers)):
            cost = [
                sum(layers[i].flops for i in s)
                for s in (plan.choose(layers, budget), _best(layers, budget))
            ]
            assert cost[0] == cost[1]


def test_the_last_layer_never_pays():
    from labs.support.activation_checkpointing.check_plan import _peak, _sets
    from labs.support.activation_checkpointing.network import Layer

    layers = [Layer(3, 20, 1), Layer(3, 5, 1), Layer(3, 40, 1)]
    for chosen in _sets(layers):
        assert _peak(layers, chosen | {2}) >= _peak(layers, chosen - {2})
