"""The pitfalls of nbval, each on a notebook of a few lines that must pass or fail."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from utils.paths import ROOT
from utils.workshop.notebooks import METADATA


def text(words, name="stdout"):
    return new_output("stream", name=name, text=words)


def result(words, count):
    return new_output("execute_result", {"text/plain": words}, execution_count=count)


def error(name, words):
    return new_output("error", ename=name, evalue=words, traceback=[])


def notebook(*cells):
    """A stored notebook; cells are (source, outputs), (source, outputs, tags) or text."""
    built, count = [], 0
    for cell in cells:
        if isinstance(cell, str):
            built.append(new_markdown_cell(cell))
            continue
        count += 1
        source, outputs, *tags = cell
        built.append(new_code_cell(source, execution_count=count, outputs=outputs))
        if tags:
            built[-1].metadata["tags"] = tags
    for index, cell in enumerate(built):
        cell["id"] = f"cell-{index}"
    return new_notebook(cells=built, metadata=METADATA)


ENVIRONMENT = "import os\nprint(os.environ['PYTHONHASHSEED'], os.environ['KINTSUGI_HOME'] != '{}')"
CHILD = "import subprocess, sys\nc = subprocess.Popen([sys.executable, '-c', '{}'])"
# The process ID distinguishes it from other processes on this machine.
SLEEPS = f"import time; time.sleep(300 + 0 * {os.getpid()})"
LIMIT = 8  # seconds per cell
NOT_RUN = notebook(("print(1)", []), ("print(2)", [text("2\n")]))
NOT_RUN.cells[0].execution_count = None

NOTEBOOKS = {
    "equal": notebook(
        ("x = 1", []), *[("x += 1; print(x)", [text(f"{i}\n")]) for i in (2, 3)],
        ("1 + 1", [result("2", 4)]),
        ("import time; time.time()", [result("0.0", 5)], "nbval-ignore-output"),
        (
            "import os\n_ = os.system('echo from a child; sleep 1')",  # the kernel reads meanwhile
            [text("from a child\n")],
        ),
        ("import math; math.pi;", []),
        (ENVIRONMENT.format(ROOT), [text("0 True\n")]),
        ("print(sorted({'a', 'b'}) and hash('a') == hash('a'))", [text("True\n")]),
        ("object()", [result("<object at 0x7f0000000000>", 10)]),
        ("1 / 0", [error("ZeroDivisionError", "division by zero")], "raises-exception"),
        (CHILD.format("pass") + "\nc.wait();", []),
    ),
    "differs": notebook("# Sums", "## By hand", ("print(1 + 1)", [text("3\n")])),
    "missing": notebook(("print('more')", [])),
    "dies": notebook(("import os\nos._exit(1)", []), ("print(2)", [text("2\n")])),
    "hangs": notebook(("import time\ntime.sleep(300)", []), ("print(2)", [text("2\n")])),
    "cascade": notebook(("x = 1 / 0", []), ("print(x)", [text("0\n")])),
    "not_run": NOT_RUN,
    "no_longer": notebook(
        ("1 / 1", [error("ZeroDivisionError", "division by zero")], "raises-exception")
    ),
    "leaves": notebook((CHILD.format(SLEEPS), [])),
}

pytestmark = pytest.mark.timeout(600)  # the first test runs all notebooks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """The outcome of every test of every notebook above, from one pytest run with two workers.

    Although no test of this repository is selected, each notebook goes to one worker.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    for name, content in NOTEBOOKS.items():
        nbformat.write(content, folder / f"{name}.ipynb")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(folder)]
    command += ["--rootdir", str(folder), "-p", "no:cacheprovider", "--junitxml", str(report)]
    command += ["--nbval-cell-timeout", str(LIMIT), "-q", "-n", "2"]
    command += ["-o", "junit_duration_report=call"]  # without the start of the kernel
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=500)
    found = {name: [] for name in NOTEBOOKS}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [part for part in case if part.tag in ("failure", "error", "skipped")]
        name = case.get("classname").removesuffix(".ipynb").split(".")[-1]
        kind = bad[0].tag if bad else "passed"
        message = (bad[0].get("message") or "") + (bad[0].text or "") if bad else ""
        found[name].append((kind, message, float(case.get("time"))))
    return found


def kinds(outcomes, name):
    return [kind for kind, _, _ in outcomes[name]]


def test_what_is_as_stored_passes(outcomes):
    assert set(kinds(outcomes, "equal")) == {"passed"}, outcomes["equal"]
    # and the NotebookEnd
    assert len(outcomes["equal"]) == len(NOTEBOOKS["equal"].cells) + 1


@pytest.mark.parametrize("name", ["differs", "missing", "no_longer"])
def test_fails(outcomes, name):
    assert kinds(outcomes, name) == ["failure", "passed"]


def test_a_failure_names_file_cell_and_heading(outcomes):
    message = outcomes["differs"][0][1]
    assert "differs.ipynb, code cell 1 (id cell-2) under “By hand”" in message


@pytest.mark.parametrize("name", ["cascade", "dies", "hangs", "not_run"])
def test_the_cells_after_a_failure_are_skipped(outcomes, name):
    assert kinds(outcomes, name) == ["failure", "skipped", "passed"]
    assert f"{name}.ipynb, code cell 1" in outcomes[name][1][1]


def test_a_dead_kernel_is_noticed_before_the_time_limit(outcomes):
    _, message, seconds = outcomes["dies"][0]
    assert "kernel died" in message and seconds < LIMIT


def test_a_hanging_cell_ends_at_the_time_limit(outcomes):
    _, message, seconds = outcomes["hangs"][0]
    assert f"Timeout of {LIMIT} seconds" in message and seconds < 100


def test_a_process_left_behind_is_named_and_ended(outcomes):
    (first, _, _), (last, message, _) = outcomes["leaves"]
    assert (first, last) == ("passed", "failure")
    assert "leaves.ipynb left 1 process" in message and SLEEPS in message
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(SLEEPS in command for command in commands)
