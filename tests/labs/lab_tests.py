"""What every lab must keep to: the solution passes, the untouched copy is not started, every
typical wrong answer is rejected for what is wrong with it, and other right answers pass.

    LAB = Lab("01_data_parallel", {"ring": ("check_messages", "ring", "ring.py")})

    class TestLab(LabTests):
        lab = LAB

All answers that the tests of a module will ask for are begun together: many of them are wrong in a
way that has to wait for a time limit.
"""

import re

import pytest

from tests.labs.answers import KINDS, RIGHT, judges_of
from utils.paths import ROOT
from utils.workshop import labs


class LabTests:
    """lab: the Lab; untouched: the exercises whose check can be asked of the untouched copy, all
    by default; symptoms: words that the check of any wrong answer may print, where failing ranks
    decide by chance which case ends first."""

    lab, untouched, symptoms = None, None, ()

    def task(self, exercise, tasks):
        """The task that an untouched exercise shows, out of all in its file."""
        return tasks[0]

    @pytest.fixture(scope="class")
    @classmethod
    def judged(cls):
        with judges_of(cls.lab) as judges:
            yield judges

    def pytest_generate_tests(self, metafunc):
        """The parameters of the tests below, which differ from lab to lab."""
        answers = self.lab.answers()
        values = {
            "exercise": list(self.lab.exercises),
            "not_started": list(self.untouched or self.lab.exercises),
            "wrong": [answer for answer in answers if not answer.right],
            "other": [answer for answer in answers if answer.right],
        }
        for name in set(values) & set(metafunc.fixturenames):
            metafunc.parametrize(name, values[name], ids=str)

    def test_the_solution_passes(self, judged, exercise):
        found = judged(exercise)
        assert found.out.startswith(f"[ok] {exercise}: "), found.out
        assert found.checks == {exercise: True}

    def test_the_learners_copy_is_not_started(self, judged, not_started):
        path = self.lab.solution / self.lab.exercises[not_started][2]
        found = judged(not_started, labs.generated(path, ROOT))
        tasks = re.findall(r"### BEGIN SOLUTION: (.*)", path.read_text())
        task = self.task(not_started, tasks)
        assert found.out == f"[ ] {not_started}: not started. Your task: {task}\n"
        assert found.checks == {}

    def test_a_wrong_answer_is_rejected_with_its_symptom(self, judged, wrong, request):
        judged.begin((one.exercise, one.source) for one in selected(request, "wrong"))
        found = judged(wrong.exercise, wrong.source)
        # behind what the answer itself may have printed
        assert f"\n[x] {wrong.exercise}: " in f"\n{found.out}", found.out
        said = found.out.replace("\n    ", " ")
        hints = [*wrong.hint.split(" | "), *self.symptoms]
        assert any(hint in said for hint in hints), found.out
        assert found.checks == {wrong.exercise: False}

    def test_each_exercise_has_right_and_wrong_answers_of_known_kinds(self):
        answers = self.lab.answers()
        assert {answer.kind for answer in answers} <= {"", RIGHT, *KINDS}
        for exercise in self.lab.exercises:
            assert {answer.right for answer in answers if answer.exercise == exercise} == {
                True,
                False,
            }

    def test_another_right_answer_passes(self, judged, other, request):
        judged.begin((one.exercise, one.source) for one in selected(request, "other"))
        found = judged(other.exercise, other.source)
        assert found.out.startswith(f"[ok] {other.exercise}: "), found.out


def selected(request, name: str) -> list:
    """The values of the parameter `name` in the tests of this module that will run."""
    found = [
        item.callspec.params[name]
        for item in request.session.items  # a notebook's cells have no module
        if getattr(item, "module", None) is request.module
        and name in getattr(getattr(item, "callspec", None), "params", {})
    ]
    return list(dict.fromkeys(found))
