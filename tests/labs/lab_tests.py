"""The tests of every lab: each wrong answer is rejected for its fault, and each other right answer
passes. (The lab's notebooks show that the worked answer passes and that a learner's copy is "not
started".)

    LAB = Lab("01_data_parallel", {"ring": ("contracts", "ring", "ring.py")})

    class TestLab(LabTests):
        lab = LAB

`make test` runs one wrong and one right answer per exercise, others at each commit; `make test-all`
runs all. A module's answers are begun together, because many have to wait for a time limit.
"""

import subprocess
import zlib

import pytest

from tests.labs.answers import KINDS, RIGHT, Answer, judges_of
from utils.paths import ROOT

COMMIT = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).stdout


class LabTests:
    """lab: the Lab; symptoms: words that the check of any wrong answer may print, if chance decides
    which case fails first."""

    lab, symptoms = None, ()

    @pytest.fixture(scope="class")
    @classmethod
    def judged(cls):
        with judges_of(cls.lab) as judges:
            yield judges

    def pytest_generate_tests(self, metafunc):
        """Parametrize the tests below with the lab's answers."""
        answers = self.lab.answers()
        now = in_turn(answers)
        values: dict[str, list] = {"wrong": [], "other": []}
        for answer in answers:
            marks = [pytest.mark.thorough] * (answer not in now)
            values["other" if answer.right else "wrong"].append(pytest.param(answer, marks=marks))
        for name in set(values) & set(metafunc.fixturenames):
            metafunc.parametrize(name, values[name], ids=str)

    def test_a_wrong_answer_is_rejected_with_its_symptom(self, judged, wrong, request):
        judged.begin((one.exercise, one.source) for one in selected(request, "wrong"))
        found = judged(wrong.exercise, wrong.source)
        # after the answer's own output
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
        # after a library's output (gRPC's loops, when one ends in a thread)
        assert f"\n[ok] {other.exercise}: " in f"\n{found.out}", found.out


def in_turn(answers: list[Answer]) -> list[Answer]:
    """One wrong and one right answer per exercise, chosen by the commit."""
    mixed = sorted(answers, key=lambda one: zlib.crc32(COMMIT + str(one).encode()))
    return list({(one.exercise, one.right): one for one in mixed}.values())


def selected(request, name: str) -> list:
    """The values of parameter `name` in this module's selected tests."""
    found = [
        item.callspec.params[name]
        for item in request.session.items  # notebook cells have no module
        if getattr(item, "module", None) is request.module
        and name in getattr(getattr(item, "callspec", None), "params", {})
    ]
    return list(dict.fromkeys(found))
