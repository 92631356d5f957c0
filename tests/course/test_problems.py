"""docs/problems.md: its arithmetic runs; each part has eight problems with folded answers."""

import doctest
import re

import pytest

from utils.paths import ROOT

PAGE = ROOT / "docs/problems.md"
PARTS = re.split(r"(?m)^## ", PAGE.read_text(encoding="utf-8"))[2:]
LESSONS = [range(0, 6), range(6, 11), range(11, 14), range(14, 18)]


class Unfenced(doctest.DocTestParser):
    """Turn fences into blank lines, which end an example's expected output."""

    def parse(self, string, name="<string>"):
        return super().parse(string.replace("```", ""), name)


def test_the_answers_compute_what_they_say():
    found = doctest.testfile(str(PAGE), False, parser=Unfenced(), encoding="utf-8", globs={})
    assert found.attempted > 32 and not found.failed


@pytest.mark.parametrize("part, lessons", list(zip(PARTS, LESSONS, strict=True)))
def test_a_part_has_eight_problems_with_an_answer_and_its_lesson(part, lessons):
    problems = re.split(r"(?m)^### ", part)[1:]
    assert len(problems) == 8
    for problem in problems:
        question, answer = problem.split("<details><summary>Answer</summary>\n")
        answer, where = answer.split("\n</details>\n")
        assert "\n```python\n>>> " in answer and ">>>" not in question + where
        assert int(re.search(r"notebooks/(\d\d)_", where)[1]) in lessons
