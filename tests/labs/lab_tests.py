"""What every lab must keep to: the solution passes, the untouched copy is not started, every
typical wrong answer is rejected for what is wrong with it, and other right answers pass.

    class TestLab(LabTests):
        lab, others, least = LAB, OTHERS, 40

A wrong answer (labs/NN_name/wrong/EXERCISE/*.py) holds only what it does differently; the answer is
the solution followed by it. Its docstring names the words that the hint must contain.
"""

import re
from pathlib import Path

from tests.labs.cases import ROOT, hint, selected
from utils.workshop import labs


class LabTests:
    """lab: the Lab; others: {"EXERCISE: what is different": source}, right answers that are written
    otherwise; least: how many wrong answers there must be; untouched: the exercises whose check can
    be asked of the untouched copy, default all."""

    lab, others, least, untouched = None, {}, 0, None

    def task(self, exercise, tasks):
        """The task that an untouched exercise shows, out of all in its file."""
        return tasks[0]

    def pytest_generate_tests(self, metafunc):
        """The parameters of the tests below, which differ from lab to lab."""
        values = {
            "exercise": list(self.lab.exercises),
            "not_started": list(self.untouched or self.lab.exercises),
            "wrong": self.lab.wrong,
            "other": list(self.others),
        }
        for name in set(values) & set(metafunc.fixturenames):
            metafunc.parametrize(name, values[name], ids=_id)

    def other_answer(self, name):
        exercise = name.split(":")[0]
        return exercise, self.lab.source(exercise) + "\n\n" + self.others[name]

    def test_the_solution_passes(self, cases, exercise):
        judged = cases(exercise)
        assert judged.out.startswith(f"[ok] {exercise}: "), judged.out
        assert judged.checks == {exercise: True}

    def test_the_learners_copy_is_not_started(self, cases, not_started):
        path = self.lab.solution / self.lab.exercises[not_started][2]
        judged = cases(not_started, labs.generated(path, ROOT))
        tasks = re.findall(r"### BEGIN SOLUTION: (.*)", path.read_text())
        task = self.task(not_started, tasks)
        assert judged.out == f"[ ] {not_started}: not started. Your task: {task}\n"
        assert judged.checks == {}

    def test_a_wrong_answer_is_rejected_with_its_symptom(self, cases, wrong, request):
        cases.begin(self.lab.with_wrong(path) for path in selected(request, "wrong"))
        exercise, source = self.lab.with_wrong(wrong)
        judged = cases(exercise, source)
        assert judged.out.startswith(f"[x] {exercise}: "), judged.out
        assert hint(wrong) in judged.out.replace("\n    ", " "), judged.out
        assert judged.checks == {exercise: False}

    def test_each_exercise_has_wrong_answers(self):
        assert {path.parent.name for path in self.lab.wrong} == set(self.lab.exercises)
        assert len(self.lab.wrong) >= self.least

    def test_another_right_answer_passes(self, cases, other, request):
        cases.begin(self.other_answer(name) for name in selected(request, "other"))
        exercise, source = self.other_answer(other)
        judged = cases(exercise, source)
        assert judged.out.startswith(f"[ok] {exercise}: "), judged.out


def _id(value):
    return f"{value.parent.name}-{value.stem}" if isinstance(value, Path) else value
