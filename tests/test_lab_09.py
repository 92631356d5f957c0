"""Lab 09: the solution passes, every typical wrong answer is rejected for what is wrong with it.

A wrong answer (labs/09_3d_parallel/wrong/EXERCISE/*.py) holds only what it does differently; the
answer is the solution followed by it. Its docstring names the words that the hint must contain.
"""

import re
import sys

import pytest

from tests.lab_cases import ROOT, Lab, fixture, hint, selected
from utils.workshop import labs

SUBMITTED = ("one_node", "cluster", "frontier")
LAB = Lab(
    "09_3d_parallel",
    {
        "by_hand": ("judge_strategies", "by_hand", "by_hand.py"),
        **{name: ("judge_strategies", name, "submissions.py") for name in SUBMITTED},
        "search": ("judge_strategies", "search", "find_best.py"),
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
    task = tasks[SUBMITTED.index(exercise)] if exercise in SUBMITTED else tasks[0]
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
    assert len(LAB.wrong) >= 35


OTHERS = {
    "one_node": "Strategy(dp=4, pp=2, interleave=4, recompute='selective', zero=1)",
    "cluster": "Strategy(16, 8, 8, 1, 6, 2, recompute='selective', zero=1, sequence_parallel=True)",
    "frontier": "Strategy(12, 16, 16, 1, 8, 2, None, 'selective', 1, True)",
}


@pytest.mark.parametrize("exercise", OTHERS)
def test_another_right_answer_passes(cases, exercise):
    changed = f"\n\ndef {exercise}():\n    return {OTHERS[exercise]}\n"
    judged = cases(exercise, LAB.source(exercise) + changed)
    assert judged.out.startswith(f"[ok] {exercise}: "), judged.out
