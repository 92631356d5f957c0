"""What every lab must keep to: the solution passes, the untouched copy is not started, every
typical wrong answer is rejected for what is wrong with it, and other right answers pass.

    LAB = Lab("01_data_parallel", {"ring": ("check_messages", "ring", "ring.py")})

    class TestLab(LabTests):
        lab, others, least = LAB, OTHERS, 40

All answers that the tests of a module will ask for are begun together: many of them are wrong in a
way that has to wait for a time limit.
"""

import re

import pytest

from tests.labs.answers import KINDS, WrongAnswer, judges_of
from utils.paths import ROOT
from utils.workshop import labs


class LabTests:
    """lab: the Lab; others: {"EXERCISE: what is different": source}, right answers that are written
    otherwise; least: how many wrong answers there must be; untouched: the exercises whose check can
    be asked of the untouched copy, default all. each: (wrong answers, their kinds, right ones) that
    each exercise must have; a dictionary where exercises differ. symptoms: words that the check of
    any wrong answer may print, where failing ranks decide by chance which case ends first."""

    lab, others, least, untouched, each, symptoms = None, {}, 0, None, (1, 0, 0), ()

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
        values = {
            "exercise": list(self.lab.exercises),
            "not_started": list(self.untouched or self.lab.exercises),
            "wrong": self.lab.wrong(),
            "other": list(self.others),
        }
        for name in set(values) & set(metafunc.fixturenames):
            metafunc.parametrize(name, values[name], ids=name_of)

    def other_answer(self, name):
        exercise = name.split(":")[0]
        return exercise, self.lab.source(exercise) + "\n\n" + self.others[name]

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

    def test_each_exercise_has_answers_of_many_kinds(self):
        answers = self.lab.wrong()
        assert len(answers) >= self.least
        assert {answer.kind for answer in answers} <= {"", *KINDS}
        for exercise in self.lab.exercises:
            each = self.each[exercise] if isinstance(self.each, dict) else self.each
            many, kinds, right = each
            wrong = [answer for answer in answers if answer.exercise == exercise]
            assert len(wrong) >= many, exercise
            assert len({answer.kind for answer in wrong} - {""}) >= kinds, exercise
            assert sum(name.startswith(f"{exercise}:") for name in self.others) >= right, exercise

    def test_another_right_answer_passes(self, judged, other, request):
        judged.begin(self.other_answer(name) for name in selected(request, "other"))
        exercise, source = self.other_answer(other)
        found = judged(exercise, source)
        assert found.out.startswith(f"[ok] {exercise}: "), found.out


def name_of(value) -> str:
    """Of a test: its parameter, in words."""
    return f"{value.exercise}-{value.mistake}" if isinstance(value, WrongAnswer) else value


def selected(request, name: str) -> list:
    """The values of the parameter `name` in the tests of this module that will run."""
    found = [
        item.callspec.params[name]
        for item in request.session.items  # a notebook's cells have no module
        if getattr(item, "module", None) is request.module
        and name in getattr(getattr(item, "callspec", None), "params", {})
    ]
    return list(dict.fromkeys(found))
