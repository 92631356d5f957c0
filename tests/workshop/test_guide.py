"""The instructor guide: its minutes are the README's, its figures those of stored notebooks."""

import json
import re

import pytest

from utils.paths import ROOT

PAGES = [ROOT / "docs/instructor.md", *sorted((ROOT / "docs/instructor").glob("*.md"))]
GUIDE = PAGES[0].read_text(encoding="utf-8")
PARTS = {
    part[:2]: part
    for part in re.split(
        r"(?m)^### ", (ROOT / "docs/instructor/lessons.md").read_text(encoding="utf-8")
    )[1:]
}
LESSONS = sorted(path.name[:2] for path in ROOT.glob("notebooks/[0-9]*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\d)")
WORDS = 400  # at most, per lesson: two minutes of reading


def readme_minutes() -> dict[str, tuple[int, int]]:
    """{lesson: (minutes, minutes of its lab or 0)}"""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| (\d\d) \|.*?\| (\d+)(?: \+ lab (\d+))? \|", text)
    return {lesson: (int(minutes), int(lab or 0)) for lesson, minutes, lab in rows}


def rows(heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, as lists of cells."""
    below = GUIDE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in below.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def numbers(text: str) -> set[str]:
    return {number.replace(",", "") for number in NUMBER.findall(text)}


def notebook_words(lesson: str) -> str:
    """All stored text of a lesson and its worked lab: words, code and printed outputs."""
    found = []
    paths = [*ROOT.glob(f"notebooks/{lesson}_*.ipynb")]
    for path in paths + [*ROOT.glob(f"labs/{lesson}_*/solution/lab.ipynb")]:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            found.append("".join(cell["source"]))
            for output in cell.get("outputs", []):
                found.append("".join(output.get("text", "")))
                for kind in ("text/plain", "text/html"):
                    found.append("".join(output.get("data", {}).get(kind, "")))
    return "\n".join(found)


def test_every_lesson_has_its_place_and_the_minutes_of_the_readme():
    minutes = {
        row[0][:2]: (int(row[1]), int(row[2].replace("–", "0"))) for row in rows("Programmes")
    }
    assert minutes == readme_minutes()
    assert sorted(minutes) == LESSONS
    assert all(cell not in ("", "–") for row in rows("Programmes") for cell in row[3:6])


def test_the_twelve_weeks_add_up():
    known, seen, weeks = readme_minutes(), [], rows("Twelve weeks")
    placed = {row[0][:2]: row[6] for row in rows("Programmes")}
    for week, lessons, in_class, labs, at_home in weeks:
        named, of_labs = re.findall(r"\d\d", lessons), re.findall(r"\d\d", labs)
        assert int(in_class) == sum(known[lesson][0] for lesson in named), week
        assert int(at_home) == sum(known[lesson][1] for lesson in of_labs), week
        assert [lesson for lesson in named if known[lesson][1]] == of_labs, week
        assert [lesson for lesson in LESSONS if placed[lesson] == f"week {week}"] == named
        seen += named
    assert seen == LESSONS
    assert len(weeks) == 12


@pytest.mark.parametrize(
    ("heading", "column"), [("One day", 3), ("Two days", 4), ("Half a day: the deploy lab", 7)]
)
def test_a_programmes_minutes_are_those_of_its_sessions(heading, column):
    sessions = [row for row in rows(heading) if re.fullmatch(r"\d:\d\d", row[0])]
    starts = [60 * int(row[0][0]) + int(row[0][2:]) for row in sessions]
    spent: dict[tuple[str, str], int] = {}
    for row, begin, end in zip(sessions, starts, starts[1:]):
        if end > begin and (part := re.search(r"([Ll]esson|Lab) (\d\d)", row[1])):
            key = part[1].lower(), part[2]
            spent[key] = spent.get(key, 0) + end - begin
    for row in rows("Programmes"):
        lesson, lab = re.match(r"(\d+)?(?:.* lab .*?(\d+))?", row[column]).groups()
        named = [("lesson", row[0][:2], lesson), ("lab", row[0][:2], lab)]
        for kind, number, minutes in named:
            assert spent.get((kind, number), 0) == int(minutes or 0), (kind, number)


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_is_the_same_everywhere_stands_in_the_notebook(lesson):
    part = PARTS[lesson]
    everywhere = re.search(r"(?s)- \*\*Everywhere:\*\* (.*?)\n- \*\*Stored:\*\*", part)[1]
    missing = numbers(everywhere) - numbers(notebook_words(lesson))
    assert not missing
    assert len(part.split()) <= WORDS


def test_a_figure_that_no_notebook_has_is_found():
    assert numbers("1.11 times; 5,726,209 of 1F1B") - numbers(notebook_words("00")) == {"5726209"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_commands_of_the_guide_exist(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    assert targets > {"lab", "class"}
    named = set(re.findall(r"`make ([a-z-]+)", path.read_text(encoding="utf-8")))
    assert named <= targets
