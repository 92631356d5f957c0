"""Lab 04: the solution passes, every typical wrong answer is rejected for what is wrong with it.

A wrong answer (labs/04_activation_checkpointing/wrong/EXERCISE/*.py) holds only what it does
differently; the answer is the solution followed by it. Its docstring names the words that the hint
must contain.
"""

import re
import sys

import pytest

from tests.lab_cases import ROOT, Lab, fixture, hint, selected
from utils.workshop import labs

LAB = Lab(
    "04_activation_checkpointing",
    {
        "checkpoint": ("judge_checkpoint", "checkpointing", "checkpointed.py"),
        "peak_bytes": ("judge_plan", "peak", "plan.py"),
        "choose": ("judge_plan", "choice", "plan.py"),
    },
)
cases = fixture(LAB)


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """The lab's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(LAB.solution))
    yield
    for name, module in list(sys.modules.items()):
        if str(LAB.folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("exercise", LAB.exercises)
def test_the_solution_passes(cases, exercise):
    judged = cases(exercise)
    assert judged.out.startswith(f"[ok] {exercise}: "), judged.out
    assert judged.checks == {exercise: True}


@pytest.mark.parametrize("exercise", LAB.exercises)
def test_the_learners_copy_is_not_started(cases, exercise):
    path = LAB.solution / LAB.exercises[exercise][2]
    judged = cases(exercise, labs.generated(path, ROOT))
    tasks = re.findall(r"### BEGIN SOLUTION: (.*)", path.read_text())
    task = tasks[1] if exercise == "choose" else tasks[0]
    assert judged.out == f"[ ] {exercise}: not started. Your task: {task}\n"
    assert judged.checks == {}


@pytest.mark.parametrize("path", LAB.wrong, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_wrong_answer_is_rejected_with_its_symptom(cases, path, request):
    cases.begin(LAB.with_wrong(other) for other in selected(request, "path"))
    exercise, source = LAB.with_wrong(path)
    judged = cases(exercise, source)
    assert judged.out.startswith(f"[x] {exercise}: "), judged.out
    assert hint(path) in judged.out.replace("\n    ", " "), judged.out
    assert judged.checks == {exercise: False}


def test_each_exercise_has_wrong_answers():
    assert {path.parent.name for path in LAB.wrong} == set(LAB.exercises)
    assert len(LAB.wrong) >= 25


# ── other right answers must pass too ─────────────────────────────────────────────────────────

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


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_passes(cases, name, request):
    def answer(name):
        exercise = name.split(":")[0]
        return exercise, LAB.source(exercise) + "\n\n" + OTHERS[name]

    cases.begin(answer(other) for other in selected(request, "name"))
    judged = cases(*answer(name))
    assert judged.out.startswith(f"[ok] {name.split(':')[0]}: "), judged.out


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_layers_are_counted_by_hand():
    from network import ROWS, SHAPES, WIDTH, batch, measure_layers, network

    for (inside, times), layer in zip(SHAPES, measure_layers(network(), batch()), strict=True):
        assert layer.input_bytes == 4 * ROWS * WIDTH
        assert layer.inside_bytes == 4 * ROWS * inside * times
        assert layer.flops == 2 * 2 * ROWS * WIDTH * inside


def test_the_judge_and_the_solution_count_alike():
    import random

    from judge_plan import _best, _peak, _sets
    from network import Layer
    from plan import choose, peak_bytes

    dice = random.Random(1)
    for _ in range(30):
        layers = [
            Layer(dice.randint(0, 9), dice.randint(0, 50), dice.randint(1, 9)) for _ in range(5)
        ]
        for chosen in _sets(layers):
            assert peak_bytes(layers, chosen) == _peak(layers, chosen)
        budget = _peak(layers, set()) - 1 - dice.randint(0, 3)
        if any(_peak(layers, chosen) <= budget for chosen in _sets(layers)):
            cost = [
                sum(layers[i].flops for i in s)
                for s in (choose(layers, budget), _best(layers, budget))
            ]
            assert cost[0] == cost[1]


def test_the_last_layer_never_pays():
    from judge_plan import _peak, _sets
    from network import Layer

    layers = [Layer(3, 20, 1), Layer(3, 5, 1), Layer(3, 40, 1)]
    for chosen in _sets(layers):
        assert _peak(layers, chosen | {2}) >= _peak(layers, chosen - {2})
