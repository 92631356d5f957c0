"""Running and storing notebooks: make refresh, make course, make lab."""

import hashlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.browser.jupyterlab import free_port
from utils.paths import ROOT
from utils.workshop import course, lab
from utils.workshop.notebooks import METADATA, every_notebook, heading_above, refresh, run


def write(path, *sources, **metadata):
    """Write a notebook as an author leaves it: no outputs, an editor's metadata."""
    cells = [new_code_cell(source, metadata={"editable": True}) for source in sources]
    cells.insert(0, new_markdown_cell("# Title\n\n## Part one"))
    for index, cell in enumerate(cells):
        cell["id"] = f"n-{index}"
    content = new_notebook(
        cells=cells, metadata={"kernelspec": METADATA["kernelspec"], "widgets": {}}
    )
    content.metadata.update(metadata)
    nbformat.write(content, path)
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_refresh_stores_the_same_bytes_twice(tmp_path):
    path = write(
        tmp_path / "lesson.ipynb",
        "import os, sys\nprint('out'); print('err', file=sys.stderr); print('out again')",
        "_ = os.system('echo from a child; sleep 1')",  # the kernel reads it meanwhile
        "print({'b', 'a', 'c'})",
        "import matplotlib.pyplot as plt\n_ = plt.plot([1, 2])",
        "raise ValueError('meant')",
        "import time\ntime.time()",
        "'0' == os.environ['PYTHONHASHSEED'], os.getcwd() == os.path.dirname(os.path.abspath('x'))",
    )
    content = json.loads(path.read_text())
    del content["cells"][1]["id"]  # refresh makes one from the position
    content["cells"][5]["metadata"]["tags"] = ["raises-exception", "hide-input"]
    content["cells"][6]["metadata"]["tags"] = ["nbval-ignore-output"]
    path.write_text(json.dumps(content))

    assert refresh(path) == ""
    first = json.loads(path.read_text())
    assert refresh(path) == ""
    second = json.loads(path.read_text())
    clock, again = first["cells"][6].pop("outputs"), second["cells"][6].pop("outputs")
    assert clock != again  # an ignored cell gets its new output
    assert first == second

    assert first["metadata"] == METADATA
    assert [cell["id"] for cell in first["cells"]] == [
        "n-0",
        "cell-01",
        *[f"n-{i}" for i in range(2, 8)],
    ]
    assert [cell.get("execution_count") for cell in first["cells"]] == [None, 1, 2, 3, 4, 5, 6, 7]
    assert [cell["metadata"] for cell in first["cells"]][5:7] == [
        {"tags": ["hide-input", "raises-exception"], "jupyter": {"source_hidden": True}},
        {"tags": ["nbval-ignore-output"]},
    ]
    assert first["cells"][2]["outputs"][0]["text"] == ["from a child\n"]
    assert len(first["cells"][1]["outputs"]) == 2  # one stdout, one stderr
    assert str(ROOT) not in path.read_text() and str(tmp_path) not in path.read_text()


def test_refresh_without_ignored_cells_changes_no_byte(tmp_path):
    path = write(tmp_path / "lesson.ipynb", "1 + 1", "print('ä')")
    assert refresh(path) == ""
    before = digest(path)
    assert refresh(path) == "" and digest(path) == before
    assert [file.name for file in tmp_path.iterdir()] == ["lesson.ipynb"]


def test_a_failing_notebook_stays_as_it_was(tmp_path):
    path = write(tmp_path / "lesson.ipynb", "1 + 1", "1 / 0", "3")
    before = digest(path)
    problem = refresh(path)
    assert "code cell 2 (id n-2) under “Part one”: ZeroDivisionError: division by zero" in problem
    assert digest(path) == before


def test_a_dead_kernel_and_a_slow_cell_are_named(tmp_path):
    path = write(tmp_path / "lesson.ipynb", "import os\nos._exit(1)")
    assert "code cell 1 (id n-1) under “Part one”: the kernel died" in run(path).problem
    path = write(tmp_path / "lesson.ipynb", "import time\ntime.sleep(30)")
    assert "not done after 1 s" in run(path, cell_timeout=1).problem


def test_a_notebook_that_leaves_a_process_is_named(tmp_path):
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], "
    path = write(
        tmp_path / "lesson.ipynb", f"import subprocess, sys\nc = {child} start_new_session=True)"
    )
    assert "left processes: " in run(path).problem


@pytest.mark.parametrize("program", ["course", "refresh"])
def test_what_is_no_notebook_is_named(tmp_path, monkeypatch, program):
    (tmp_path / "text.txt").write_text("a text")
    monkeypatch.setattr(sys, "argv", [program, str(tmp_path / "text.txt")])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SystemExit, match=r"text.txt is not a notebook: "):
        importlib.import_module(f"utils.workshop.{program}").main()
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # of runpy
@pytest.mark.parametrize("program", ["course.progress", "measure.environment"])
def test_programs_without_arguments_take_none(monkeypatch, capsys, program):
    monkeypatch.setattr(sys, "argv", ["program", "x"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(f"utils.{program}", run_name="__main__")
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == ""
    assert said.err.startswith(f"utils.{program}: unrecognized arguments: x")


def test_the_browsers_command_line_has_no_token(tmp_path):
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n')
    browser.chmod(0o700)
    script = f"""
from pathlib import Path
from utils.workshop import lab
lab.LOG = Path({str(tmp_path / "lab.log")!r})
page = lab.show("http://127.0.0.1:8888/lab?token=secret")
assert "url=http://127.0.0.1:8888/lab?token=secret" in page.read_text()
assert page.stat().st_mode & 0o777 == 0o600
assert page.as_uri() == Path({str(tmp_path / "said")!r}).read_text().strip()
"""
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, check=True)


def test_course_ends_with_a_table(tmp_path, capsys):
    good = write(tmp_path / "good.ipynb", "1 + 1")
    bad = write(tmp_path / "bad.ipynb", "1 / 0")
    before = digest(good)
    folder = tmp_path / "executed"
    folder.mkdir()
    assert course.run_course([good, bad], folder) == 1
    said = capsys.readouterr().out
    header, *rows = said.split("\n\n")[1].splitlines()
    assert header.split() == ["lesson", "seconds", "result"]
    assert [(Path(row.split()[0]).name, row.split()[2]) for row in rows] == [
        ("good.ipynb", "ok"),
        ("bad.ipynb", "failed"),
    ]
    assert "ZeroDivisionError" in said and digest(good) == before
    assert len(list(folder.iterdir())) == 2


def test_every_notebook_of_the_repository_is_found():
    stored = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "*.ipynb"], capture_output=True, text=True
    ).stdout.split()
    assert {ROOT / path for path in stored} <= set(every_notebook())


def test_the_nearest_heading_counts():
    cells = ["# A", "text", "## B", "### C\nmore"]
    notebook = new_notebook(cells=[new_markdown_cell(cell) for cell in cells])
    assert [heading_above(notebook, i) for i in range(4)] == ["A", "A", "B", "C"]


# --- make lab -------------------------------------------------------------------------------------


def test_a_taken_port_is_one_sentence():
    with socket.socket() as other:
        other.bind((lab.HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "utils.workshop.lab", "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == (
        f"Port {port} is taken (is a lab running already?): make lab PORT={port + 1}\n"
    )


@pytest.mark.parametrize("port", [0, 70000])
def test_an_impossible_port_is_named(port):
    with pytest.raises(lab.LabError, match=f"PORT={port} is not a port"):
        lab.check_port(port)


def test_the_lab_serves_the_lessons_and_ends_with_ctrl_c():
    port = free_port()  # no other process gets this port by chance
    server = subprocess.Popen(
        [sys.executable, "-m", "utils.workshop.lab", "--port", str(port)],
        cwd=ROOT,
        env={**os.environ, "DISPLAY": "", "WAYLAND_DISPLAY": "", "SSH_CONNECTION": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in server.stdout:
        lines.append(line.strip())
        if "Ctrl-C" in line:
            break
    url = next(line for line in lines if line.startswith("http://"))
    assert url.startswith(f"http://127.0.0.1:{port}/lab/tree/you_are_here.md?token=")
    settings = "lab/api/settings/@jupyterlab/apputils-extension:notification"
    base, token = url.split("lab/tree")[0], url.split("token=")[1]
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{base}{settings}?token={token}", timeout=60) as answer:
        schema = json.load(answer)["schema"]["properties"]
    assert schema["fetchNews"]["default"] == "false"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        direct.open(f"{base}api/contents", timeout=60)
    server.send_signal(signal.SIGINT)
    assert "Stopping JupyterLab" in server.stdout.read()
    assert server.wait(20) == 0
    lab.check_port(port)  # no longer in use
    assert not lab.LOG.is_relative_to(sys.prefix)  # several clones may share sys.prefix
