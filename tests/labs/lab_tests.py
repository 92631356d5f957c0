"""What every lab must keep to: each wrong answer is rejected for what is wrong with it, and each
other right answer passes. (That the worked answer passes, and that a learner's copy is not started,
the lab's own notebooks show.)

    LAB = Lab("01_data_parallel", {"ring": ("contracts", "ring", "ring.py")})

    class TestLab(LabTests):
        lab = LAB

`make test` asks for one of an exercise's wrong answers, another one at each commit; `make test-all`
for all. Those that the tests of a module will ask for are begun together: many of
them are wrong in a way that has to wait for a time limit.
"""

import subprocess
import zlib

import pytest

from tests.labs.answers import KINDS, RIGHT, Answer, judges_of
from utils.paths import ROOT

COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).stdout


class LabTests:
    """lab: the Lab; symptoms: words that the check of any wrong answer may print, where failing
    ranks decide by chance which case ends first."""

    lab, symptoms = None, ()

    @pytest.fixture(scope="class")
    @classmethod
    def judged(cls):
        with judges_of(cls.lab) as judges:
            yield judges

    def pytest_generate_tests(self, metafunc):
        """The parameters of the tests below, which differ from lab to lab."""
        answers = self.lab.answers()
        now = in_turn(answers)
        values = {
            "wrong": [
                pytest.param(answer, marks=[pytest.mark.thorough] * (answer not in now))
                for answer in answers
                if not answer.right
            ],
            "other": [answer for answer in answers if answer.right],
        }
        for name in set(values) & set(metafunc.fixturenames):
            metafunc.parametrize(name, values[name], ids=str)

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
            ours = [answer.right for answer in answers if answer.exercise == exercise]
            assert any(ours) and not all(ours), exercise

    def test_another_right_answer_passes(self, judged, other, request):
        judged.begin((one.exercise, one.source) for one in selected(request, "other"))
        found = judged(other.exercise, other.source)
        # behind what a library may have said (gRPC's loops, when one ends in a thread)
        assert f"\n[ok] {other.exercise}: " in f"\n{found.out}", found.out


def in_turn(answers: list[Answer]) -> list[Answer]:
    """One wrong answer of each exercise, which the commit chooses."""
    wrong = [answer for answer in answers if not answer.right]
    wrong.sort(key=lambda one: zlib.crc32(COMMIT + str(one).encode()))
    return list({one.exercise: one for one in wrong}.values())


def selected(request, name: str) -> list:
    """The values of the parameter `name` in the tests of this module that will run."""
    found = [
        item.callspec.params[name]
        for item in request.session.items  # a notebook's cells have no module
        if getattr(item, "module", None) is request.module
        and name in getattr(getattr(item, "callspec", None), "params", {})
    ]
    return list(dict.fromkeys(found))
