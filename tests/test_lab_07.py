"""Lab 07: the solution passes, every typical wrong answer is rejected for what is wrong with it.

A wrong answer (labs/07_pipeline_parallel/wrong/EXERCISE/*.py) holds only what it does differently;
the answer is the solution followed by it. Its docstring names the words that the hint must contain.
"""

import re
import sys

import pytest

from tests.lab_cases import ROOT, Lab, fixture, hint, selected
from utils.workshop import labs

LAB = Lab(
    "07_pipeline_parallel",
    {
        "memory": ("judge_schedules", "less_memory", "less_memory.py"),
        "halves": ("judge_halves", "halves", "halves.py"),
        "bubble": ("judge_schedules", "less_bubble", "less_bubble.py"),
    },
    limits={"utils.checks.HANG": 30.0, "utils.checks.TOO_LONG": 60.0},  # no answer waits for them
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
    task = re.search(r"### BEGIN SOLUTION: (.*)", path.read_text())[1]
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
    assert len(LAB.wrong) >= 20


# ── other right answers must pass too ─────────────────────────────────────────────────────────

OTHERS = {
    "memory: counts what is in flight": """
def order(rank, ranks, micro_batches):
    actions, begun, done = [], 0, 0
    while done < micro_batches:
        if begun < micro_batches and begun - done < ranks - rank:
            actions.append(["F", begun])
            begun += 1
        else:
            actions.append(["B", done])
            done += 1
    return actions
""",
    "halves: einsum, two functions": """
class LaterLinear(LaterLinear):
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        of_weight = lambda: torch.einsum("...o,...i->oi", gradient, x)
        ctx.waiting.append(lambda: accumulate(weight, of_weight()))
        if bias is not None:
            ctx.waiting.append(lambda: accumulate(bias, gradient.flatten(0, -2).sum(dim=0)))
        return torch.einsum("...o,oi->...i", gradient, weight), None, None, None
""",
    "bubble: a W makes room for the next F": """
def order(rank, ranks, micro_batches):
    actions, f, b, w = [], 0, 0, 0
    while w < micro_batches:
        if f < micro_batches and f - b < ranks - rank:
            if f - w == ranks:
                actions.append(("W", w))
                w += 1
            actions.append(("F", f))
            f += 1
        elif b < micro_batches:
            actions.append(("B", b))
            b += 1
            if f == micro_batches:
                actions.append(("W", w))
                w += 1
        else:
            actions.append(("W", w))
            w += 1
    return actions
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_passes(cases, name):
    exercise = name.split(":")[0]
    judged = cases(exercise, LAB.source(exercise) + "\n\n" + OTHERS[name])
    assert judged.out.startswith(f"[ok] {exercise}: "), judged.out
