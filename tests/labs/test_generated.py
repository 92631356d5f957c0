"""The learner's copies of the labs are up to date, and `make labs` makes them correctly."""

import subprocess

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from utils.paths import ROOT
from utils.workshop.labs import (
    LabError,
    essence,
    generated,
    make_labs,
    solutions,
    stored,
    without_solution,
)
from utils.workshop.notebooks import METADATA, read

COPIES = solutions(ROOT)


@pytest.mark.parametrize(
    "source, target", COPIES, ids=[str(target.relative_to(ROOT)) for _, target in COPIES]
)
def test_the_stored_copy_is_what_make_labs_makes(source, target):
    there = stored(target)
    assert there is not None, "run make labs"
    assert essence(there) == essence(generated(source, ROOT)), (
        f"{target.relative_to(ROOT)} is stale or edited: make labs (FORCE=1 overwrites edits)"
    )


def test_a_lab_shows_only_what_the_learner_writes():
    git = ["git", "-C", str(ROOT), "ls-files", "labs/[0-9]*"]
    stored_files = set(subprocess.run(git, capture_output=True, text=True).stdout.split())
    pairs = {str(path.relative_to(ROOT)) for pair in COPIES for path in pair}
    assert stored_files == pairs and "labs/01_data_parallel/lab.ipynb" in pairs


def test_every_lab_has_its_checks():
    labs = {source.parent.parent.name[3:] for source, _ in COPIES}
    support = ROOT / "labs" / "support"
    assert labs == {path.parent.name for path in support.glob("*/__init__.py")}


def printed(cell):
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


@pytest.mark.parametrize("source, target", [c for c in COPIES if c[0].suffix == ".ipynb"])
def test_checks_say_ok_in_the_solution_and_not_started_in_the_copy(source, target):
    checks = [cell for cell in read(source).cells if "[ok]" in printed(cell)]
    assert checks, f"{source} has no check that says [ok]"
    copies = {cell.id: cell for cell in read(target).cells}
    for cell in checks:
        words = printed(copies[cell.id])
        assert "[ ]" in words and "not started" in words and "[ok]" not in words, cell.id
    assert not any("[x]" in printed(cell) for cell in [*checks, *copies.values()])


# --- the generator --------------------------------------------------------------------------------

BLOCK = """\
def add(a, b):
    ### BEGIN SOLUTION: return the sum
    c = a + b
    return c
    ### END SOLUTION"""


def test_a_block_becomes_its_task():
    stub = 'def add(a, b):\n    raise NotImplementedError("return the sum")'
    assert without_solution(f"x = 1\n{BLOCK}\ny = 2", "") == f"x = 1\n{stub}\ny = 2"
    assert without_solution("x = 1\n", "") == "x = 1\n"


def test_only_what_has_a_solution_block_is_copied(tmp_path):
    folder = tmp_path / "labs" / "01_sum" / "solution"
    folder.mkdir(parents=True)
    for name, text in (("add.py", BLOCK), ("given.py", "x = 1"), ("lab.ipynb", ""), ("a.md", "")):
        (folder / name).write_text(text)
    assert [target.name for _, target in solutions(tmp_path)] == ["add.py", "lab.ipynb"]


def test_a_long_task_gets_a_line_of_its_own():
    task = "a" * 76
    stub = without_solution(BLOCK.replace("return the sum", task), "").splitlines()
    assert max(map(len, stub)) <= 100 and stub[2].strip() == f'"{task}"'
    with pytest.raises(NotImplementedError, match=task):
        namespace = {}
        exec("\n".join(stub) + "\nadd(1, 2)", namespace)


def test_stub_lines_stand_instead_of_the_raise():
    source = "### BEGIN SOLUTION: name the faster one\n### STUB: faster = None\nfaster = 'ring'\n"
    source += "### END SOLUTION"
    assert without_solution(source, "") == "# name the faster one\nfaster = None"


@pytest.mark.parametrize(
    "source, complaint",
    [
        (BLOCK.replace(": return the sum", ""), "line 2: state the task"),
        (BLOCK.replace("    ### END SOLUTION", ""), "line 2: the solution has no"),
        ("x\n### END SOLUTION", "line 2: ### END SOLUTION without a beginning"),
        (BLOCK.replace("c = a + b", "### BEGIN SOLUTION: x"), "line 3: a solution begins inside"),
        ("### BEGIN SOLUTION: x\ny = 1\n### END SOLUTION", "line 1: a raise at the left margin"),
        (BLOCK.replace("the sum", 'the "sum"'), "line 2: no double quote"),
    ],
)
def test_a_bad_marker_gets_one_sentence(source, complaint):
    with pytest.raises(LabError, match=f"^lab.py, {complaint}"):
        without_solution(source, "lab.py")


@pytest.fixture
def repository(tmp_path):
    """A committed lab: a script and a notebook that runs it."""
    folder = tmp_path / "labs" / "01_sum" / "solution"
    folder.mkdir(parents=True)
    (folder / "add.py").write_text(BLOCK + "\n")
    check = (
        "from add import add\ntry:\n    print('[ok]' if add(1, 2) == 3 else '[x]')\n"
        "except NotImplementedError:\n    print('[ ] not started')"
    )
    cells = [
        new_markdown_cell("See [terms](../../../docs/glossary.md#sum), [code](add.py)", id="text"),
        new_code_cell(check, id="check", execution_count=1),
    ]
    nbformat.write(new_notebook(cells=cells, metadata=METADATA), folder / "lab.ipynb")
    git = ["git", "-c", "user.name=T", "-c", "user.email=t@example.org", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    assert make_labs(tmp_path) == 0
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "lab"], check=True)
    return tmp_path


def test_making_labs(repository, capsys):
    lab = repository / "labs" / "01_sum"
    copy = read(lab / "lab.ipynb")
    assert "](../../docs/glossary.md#sum), [code](add.py)" in copy.cells[0].source
    assert copy.cells[1].outputs[0].text == "[ ] not started\n"
    assert copy.cells[1].execution_count == 1

    # Up to date: nothing is written.
    before = [path.stat().st_mtime_ns for path in lab.glob("*.*")]
    assert make_labs(repository) == 0
    assert before == [path.stat().st_mtime_ns for path in lab.glob("*.*")]

    # Stale but not edited: generated again.
    source = lab / "solution" / "add.py"
    source.write_text(source.read_text().replace("the sum", "a plus b"))
    assert make_labs(repository) == 0
    assert "a plus b" in (lab / "add.py").read_text()

    # Edited by the learner: kept and named, unless forced.
    (lab / "add.py").write_text("def add(a, b):\n    return a + b\n")
    copy.cells[1].source += "\n# mine"
    nbformat.write(copy, lab / "lab.ipynb")
    capsys.readouterr()
    assert make_labs(repository) == 0
    said = capsys.readouterr().out
    assert "labs/01_sum/add.py holds your own work" in said
    assert "labs/01_sum/lab.ipynb holds your own work" in said
    assert "return a + b" in (lab / "add.py").read_text()
    assert make_labs(repository, force=True) == 0
    assert "return a + b" not in (lab / "add.py").read_text()
    assert "# mine" not in read(lab / "lab.ipynb").cells[1].source
