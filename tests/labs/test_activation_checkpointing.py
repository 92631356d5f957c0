"""Lab 04: the answers that its checks must accept and reject, and its pieces."""

import random

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.trial import load_answer

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
        ctx.kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
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
        autocast = torch.autocast("cpu", ctx.kind or torch.bfloat16, ctx.kind is not None)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), autocast:
            torch.set_rng_state(ctx.state)
            output = ctx.function(*inputs)
        output.backward(gradient)
        return (None, *(tensor.grad for tensor in inputs))
""",
    "checkpoint: gradients named one by one, the settings as they were": """
class Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.state = torch.get_rng_state()
        ctx.save_for_backward(*inputs)
        enabled, kind = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def again(*inputs):
            with torch.autocast(device_type="cpu", enabled=enabled, dtype=kind):
                return function(*inputs)

        ctx.again = again
        return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        today, inputs = torch.get_rng_state(), []
        for tensor, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[1:]):
            inputs.append(tensor.detach().requires_grad_() if wanted else tensor)
        torch.set_rng_state(ctx.state)
        try:
            with torch.set_grad_enabled(True):
                output = ctx.again(*inputs)
        finally:
            torch.set_rng_state(today)
        torch.autograd.backward([output], [gradient])
        wanted = ctx.needs_input_grad[1:]
        return None, *[t.grad if asked else None for t, asked in zip(inputs, wanted)]
""",
    "checkpoint: inputs without a gradient beside the others": """
class Checkpoint(Checkpoint):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function, ctx.random_state = function, torch.get_rng_state()
        ctx.autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        ctx.places = [n for n, tensor in enumerate(inputs) if tensor.requires_grad]
        ctx.fixed = {n: (t, t._version) for n, t in enumerate(inputs) if not t.requires_grad}
        ctx.save_for_backward(*[inputs[n] for n in ctx.places])
        return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        given = {n: tensor for n, (tensor, _) in ctx.fixed.items()}
        given |= {n: t.detach().requires_grad_() for n, t in zip(ctx.places, ctx.saved_tensors)}
        inputs = [given[n] for n in sorted(given)]
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", *ctx.autocast):
            torch.set_rng_state(ctx.random_state)
            with torch.enable_grad():
                torch.autograd.backward(ctx.function(*inputs), gradient)
        return None, *[tensor.grad for tensor in inputs]
""",
    "checkpoint: a copy of the inputs is kept, and checked": """
class Checkpoint(Checkpoint):
    @staticmethod
    def backward(ctx, gradient):
        saved, graph = ctx.saved_tensors, torch.enable_grad()
        inputs = tuple(t.clone().detach().requires_grad_(t.requires_grad) for t in saved)
        today = torch.random.get_rng_state()
        torch.random.set_rng_state(ctx.random_state)
        with graph, torch.autocast("cpu", *ctx.autocast):
            output = ctx.function(*inputs)
        torch.random.set_rng_state(today)
        found = []
        output.backward(gradient)
        for tensor in inputs:
            found.append(tensor.grad)
        return (None, *found)
""",
    "peak_bytes: moment by moment": """
def peak_bytes(layers, recomputed):
    held = [x.input_bytes + (i not in recomputed) * x.inside_bytes for i, x in enumerate(layers)]
    moments = [sum(held)]
    for i in recomputed:
        moments.append(sum(held[: i + 1]) + layers[i].inside_bytes)
    return max(moments)
""",
    "peak_bytes: sums of NumPy": """
def peak_bytes(layers, recomputed):
    import numpy as np

    inside = np.array([layer.inside_bytes for layer in layers])
    kept = inside * [index not in recomputed for index in range(len(layers))]
    inputs = np.cumsum([layer.input_bytes for layer in layers])
    held = inputs + np.cumsum(kept)
    return np.maximum(held, held - kept + inside).max()
""",
    "peak_bytes: layer by layer from the last one, as a fraction": """
def peak_bytes(layers, recomputed):
    from fractions import Fraction

    def above(index):  # the peak of what comes from here on, without what lies below
        if index == len(layers):
            return Fraction(0)
        layer = layers[index]
        kept = 0 if index in recomputed else layer.inside_bytes
        return layer.input_bytes + max(Fraction(layer.inside_bytes), kept + above(index + 1))

    return above(0)
""",
    "peak_bytes: a walk through both passes": """
def peak_bytes(layers, recomputed):
    now, most = 0, 0
    for index, layer in enumerate(layers):
        now += layer.input_bytes
        if index not in recomputed:
            now += layer.inside_bytes
        most = max(most, now)
    for index in reversed(range(len(layers))):
        if index in recomputed:
            now += layers[index].inside_bytes
        most = max(most, now)
        now -= layers[index].input_bytes + layers[index].inside_bytes
    return float(most)
""",
    "choose: branch and bound, NumPy integers": """
def choose(layers, budget):
    import numpy as np

    best = [float("inf"), None]

    def walk(index, held, cost, chosen):
        if index == len(layers):
            if cost < best[0]:
                best[:] = cost, chosen
            return
        layer = layers[index]
        if held + layer.input_bytes + layer.inside_bytes > budget or cost >= best[0]:
            return
        held += layer.input_bytes
        walk(index + 1, held + layer.inside_bytes, cost, chosen)
        walk(index + 1, held, cost + layer.flops, chosen + [np.int64(index)])

    walk(0, 0, 0, [])
    if best[1] is None:
        raise ValueError(f"at least {peak_bytes(layers, set(range(len(layers)))):_} bytes")
    return (index for index in best[1])
""",
    "choose: the frontier of memory and work, layer by layer": """
def choose(layers, budget):
    least = peak_bytes(layers, range(len(layers)))
    if least > budget:
        raise ValueError("the smallest budget is", least)
    plans = {0: (0, ())}  # bytes held -> (work, layers recomputed)
    for index, layer in enumerate(layers):
        found = {}
        for held, (work, chosen) in plans.items():
            held += layer.input_bytes
            if held + layer.inside_bytes > budget:
                continue
            for more, extra, names in (
                (layer.inside_bytes, 0, ()), (0, layer.flops, (index,))
            ):
                plan = (work + extra, chosen + names)
                if held + more not in found or plan < found[held + more]:
                    found[held + more] = plan
        plans = found
    return min(plans.values())[1]
""",
    "choose: products of yes and no, frozen": """
def choose(layers, budget):
    from itertools import compress, product

    best = None
    for picks in product((False, True), repeat=len(layers)):
        chosen = frozenset(compress(range(len(layers)), picks))
        if peak_bytes(layers, chosen) <= budget:
            work = sum(layers[index].flops for index in chosen)
            if best is None or work < best[0]:
                best = work, chosen
    if best is None:
        raise ValueError(f"{peak_bytes(layers, set(range(len(layers))))} bytes would do")
    return best[1]
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
    lab, others, least, each = LAB, OTHERS, 60, (12, 6, 4)

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
