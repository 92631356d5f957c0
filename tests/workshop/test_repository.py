"""What surrounds the course: the README's numbers, the files a forge reads, `make update`."""

import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.rules import TRANSLATED
from utils.paths import ROOT
from utils.planner.published import HELD_OUT, summary

README = (ROOT / "README.md").read_text(encoding="utf-8")
LESSON = "notebooks/00_start_here.ipynb"


def test_the_three_numbers_of_the_readme():
    lessons, labs = re.search(r"\*\*(\d+) lessons, (\d+) labs\.\*\*", README).groups()
    ranks = re.search(r"\*\*([\d,]+) ranks\.\*\*", README)[1]
    error, runs = re.search(r"\*\*(\d+) %\*\* is .* on (\d+) published runs", README).groups()
    assert int(lessons) == len([*ROOT.glob("notebooks/[0-9]*.ipynb")])
    assert int(labs) == len([*ROOT.glob("labs/[0-9]*/lab.ipynb")])
    lesson = (ROOT / "notebooks/10_five_dimensions.ipynb").read_text(encoding="utf-8")
    assert f"rank 0 of {ranks}" in lesson
    assert int(error) == round(100 * summary(HELD_OUT)[0]) and int(runs) == len(HELD_OUT)


@pytest.mark.parametrize(
    "schema, file",
    [("citation-file-format", "CITATION.cff"), ("github-workflows", ".github/workflows/ci.yml")],
)
def test_a_forge_can_read_it(schema, file):
    program = Path(sys.executable).with_name("check-jsonschema")
    subprocess.run([program, "--builtin-schema", f"vendor.{schema}", ROOT / file], check=True)


def test_the_development_container_is_the_image_of_a_seat():
    folder = ROOT / ".devcontainer"
    build = json.loads((folder / "devcontainer.json").read_text())["build"]
    assert (folder / build["dockerfile"]).resolve() == ROOT / "docs/class/Dockerfile"
    assert (folder / build["context"]).resolve() == ROOT


def test_make_update_brings_corrections_and_keeps_what_the_learner_wrote(tmp_path):
    """It runs docs/class/pull.sh, whose cases are in tests/hub/test_kubernetes.py."""
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    mail = {f"GIT_{who}_{what}": "tests@example.org" for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")}
    variables = {**os.environ, **mail, "GIT_CONFIG_GLOBAL": os.devnull}

    def run(folder, *command):
        subprocess.run(command, cwd=folder, env=variables, check=True, timeout=120)

    for name in ("Makefile", "docs/class/pull.sh", LESSON, ".gitignore"):
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, theirs / name)
    run(theirs, "git", "init", "--quiet", "--initial-branch=main")
    run(theirs, "git", "add", "--all")
    run(theirs, "git", "commit", "--quiet", "--message=the course")
    run(tmp_path, "git", "clone", "--quiet", str(theirs), str(mine))
    (mine / ".venv").symlink_to(Path(sys.executable).parents[1])
    for folder, place, words in ((mine, 3, "predicted = 7"), (theirs, 5, "# a correction")):
        lesson = nbformat.read(folder / LESSON, 4)
        lesson.cells[place].source = words
        nbformat.write(lesson, folder / LESSON)
    run(theirs, "git", "commit", "--quiet", "--all", "--message=a correction")
    run(mine, "make", "update", "SETUP=:")
    cells = nbformat.read(mine / LESSON, 4).cells
    assert [cells[3].source, cells[5].source] == ["predicted = 7", "# a correction"]


def test_comments_and_strings_read_as_english():
    """Uses the patterns of the notebooks' rule."""
    quoting = {  # the rule itself, and names of predictions that have changed since
        "tests/notebooks/rules.py",
        "tests/notebooks/test_static.py",
        "tests/course/test_predictions.py",
        "utils/course/ledger.py",
    }
    found = []
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    for path in listed.stdout.split():
        if path in quoting:
            continue
        with tokenize.open(ROOT / path) as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type in (tokenize.COMMENT, tokenize.STRING):
                    words = TRANSLATED.search(re.sub("`.*?`", "", token.string))
                    found += [f"{path}:{token.start[0]}: {words[0]}"] if words else []
    assert not found
