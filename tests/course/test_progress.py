"""The progress report lists what is in the repository and what the ledger knows of it."""

import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from utils.course import ledger, progress
from utils.course.predictions import predict, reveal
from utils.paths import ROOT


@pytest.fixture
def course(tmp_path):
    lesson = ['predict("00 one", None, "MB")\nx = predict(\'00 two\', 3)', 'reveal("00 one")']
    lab = [
        'predict("lab 01 three", None)',
        'check("lab 01a ring", judge, "ring.py")\n'
        '# check("lab 01b not this", judge, "x.py")\ncheck("lab 01c more", judge, "y.py")',
    ]
    for path, sources in {
        "notebooks/00_start_here.ipynb": lesson,
        "notebooks/01_data_parallel.ipynb": ["print(1)"],
        "notebooks/scratch.ipynb": lesson,
        "labs/01_data_parallel/lab.ipynb": lab,
        "labs/01_data_parallel/solution/lab.ipynb": lab,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        words = new_markdown_cell('predict("00 in a text")')
        cells = [words, *[new_code_cell(source) for source in sources]]
        nbformat.write(new_notebook(cells=cells), tmp_path / path)
    return tmp_path


def test_everything_in_order(course):
    assert progress.parts(course) == [
        progress.Part("00 start here", ("00 one", "00 two"), ()),
        progress.Part("01 data parallel", (), ()),
        progress.Part("lab 01 data parallel", ("lab 01 three",), ("lab 01a ring", "lab 01c more")),
    ]


def test_the_report_follows_what_is_done(course, capsys):
    progress.report(course)
    assert [line.split() for line in capsys.readouterr().out.splitlines()[:4]] == [
        ["predicted", "revealed", "checks"],
        ["00", "start", "here", "0", "of", "2", "0", "of", "2", "–"],
        ["01", "data", "parallel", "–", "–", "–"],
        ["lab", "01", "data", "parallel", "0", "of", "1", "0", "of", "1", "0", "of", "2"],
    ]
    predict("00 one", 1)
    reveal("00 one", measured=2, show="text")
    ledger.change(lambda content: content["checks"].update({"lab 01a ring": True, "gone": True}))
    capsys.readouterr()
    progress.report(course)
    out = capsys.readouterr().out
    assert "00 start here             1 of 2      1 of 2           –" in out
    progress.write_page(course / "here.md", course)
    page = (course / "here.md").read_text()
    assert "“00 two” in [00 start here](notebooks/00_start_here.ipynb)." in page
    assert "| [lab 01 data parallel](labs/01_data_parallel/lab.ipynb) | 0 of 1 | 1 of 2 |" in page
    assert "0 of 1      0 of 1      1 of 2" in out
    assert out.endswith("Next: your prediction “00 two” in 00 start here.\n")


def test_a_number_after_its_reveal_is_no_prediction(course, capsys):
    reveal("00 one", measured=2, show="text")
    predict("00 one", 2)
    capsys.readouterr()
    progress.report(course)
    out = capsys.readouterr().out
    assert "00 start here             0 of 2      1 of 2           –" in out
    assert out.endswith("Next: your prediction “00 two” in 00 start here.\n")


def test_what_comes_next(course, capsys):
    for name in ("00 one", "00 two", "lab 01 three"):
        predict(name, 1)
    ledger.change(lambda content: content["checks"].update({"lab 01a ring": False}))
    progress.report(course)
    assert "Next: the check “lab 01a ring” in lab 01 data parallel." in capsys.readouterr().out
    both = {"lab 01a ring": True, "lab 01c more": True}
    ledger.change(lambda content: content["checks"].update(both))
    progress.report(course)
    assert capsys.readouterr().out.endswith("Everything is done.\n")


def test_an_empty_folder(tmp_path, capsys):
    progress.report(tmp_path)
    assert capsys.readouterr().out == f"There are no lessons in {tmp_path}.\n"


def test_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "utils.course.progress"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    assert "lab 01 data parallel" in done.stdout and "0 of 5" in done.stdout


def test_names_are_unique_in_the_course():
    """Two lessons that use the same name would share a prediction."""
    found = progress.parts()
    for names in ([n for p in found for n in p.predictions], [n for p in found for n in p.checks]):
        assert len(names) == len(set(names)), names
    for part in found:
        for name in (*part.predictions, *part.checks):
            assert name.startswith(part.title.split()[0]), f"{name} is not of {part.title}"


def test_each_prediction_is_revealed_in_its_notebook():
    for path in [*ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("labs/*/lab.ipynb")]:
        cells = nbformat.read(path, as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        made, revealed = progress.names_in("predict", code), progress.names_in("reveal", code)
        assert set(made) == set(revealed), path.name
