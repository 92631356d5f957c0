"""The workshop's notebooks: finding them, running one in its own kernel, and storing it."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import nbformat
import psutil
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from utils.course.progress import names_in
from utils.paths import ROOT

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SLIDE_TYPES = ("slide", "subslide", "fragment", "skip", "notes")  # docs/book/slides.py
MARK = "KINTSUGI_NOTEBOOK"  # every process that a notebook starts inherits this variable


def written_notebooks(root: Path = ROOT) -> list[Path]:
    """Those written by hand: the lessons, then the solution of each lab."""
    return sorted(root.glob("notebooks/*.ipynb")) + sorted(root.glob("labs/*/solution/*.ipynb"))


def every_notebook(root: Path = ROOT) -> list[Path]:
    """Those written by hand, then the learner's copies of the labs."""
    return written_notebooks(root) + sorted(root.glob("labs/*/*.ipynb"))


def asked_for(description: str, otherwise: list[Path]) -> list[Path]:
    """The notebooks named on the command line, or else all of `otherwise`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("notebooks", nargs="*", type=Path, help="only these")
    named = parser.parse_args().notebooks
    for path in named:
        if not path.is_file():
            sys.exit(f"{path} does not exist: give a path from the repository's root.")
        try:
            nbformat.read(path, as_version=4)
        except Exception as error:
            sys.exit(f"{path} is not a notebook: {first_line(str(error))}")
    return [path.resolve() for path in named] or otherwise


def name(path: Path, root: Path = ROOT) -> str:
    """The path from the root of the repository, or the full path of one outside it."""
    path = Path(path).resolve()
    return str(path.relative_to(root) if path.is_relative_to(root) else path)


def heading_above(notebook: nbformat.NotebookNode, index: int) -> str:
    """The nearest heading at or above cell `index`, or ''."""
    for cell in reversed(notebook.cells[: index + 1]):
        if cell.cell_type == "markdown":
            headings = [line for line in cell.source.splitlines() if line.startswith("#")]
            if headings:
                return headings[-1].lstrip("# ").strip()
    return ""


def first_line(text: str) -> str:
    """The first line of an error's message."""
    return (text.strip().splitlines() or [""])[0]


def where(path: Path, notebook: nbformat.NotebookNode, index: int) -> str:
    """The location of cell `index` for a reader: file, cell, id and heading."""
    cell = notebook.cells[index]
    kind = cell.cell_type
    count = sum(c.cell_type == kind for c in notebook.cells[: index + 1])
    heading = heading_above(notebook, index)
    place = f" under “{heading}”" if heading else ""
    return f"{name(path)}, {kind} cell {count} (id {cell.get('id', 'none')}){place}"


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of a notebook's kernel: its environment and the mark on its processes."""

    environment: dict
    mark: str

    def leftovers(self, wait: float = 10.0) -> list[psutil.Process]:
        """Processes of the notebook that still run `wait` seconds after its kernel ended."""
        deadline = time.monotonic() + wait
        while (alive := marked(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive


def marked(mark: str) -> list[psutil.Process]:
    """The living processes whose environment carries `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            zombie = process.status() == psutil.STATUS_ZOMBIE
            if not zombie and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def describe(process: psutil.Process) -> str:
    """Process id and command line, short."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        command = "?"
    return f"{process.pid} {command[:100]}"


@contextmanager
def surroundings() -> Iterator[Surroundings]:
    """Equal surroundings for every run: fixed order of sets, no learner's progress, no IPython
    settings.

    Pytest's own variables are left out, because with them ipykernel does not show the output of
    subprocesses. Processes that the notebook leaves running are killed at the end.
    """
    home = tempfile.mkdtemp(prefix="kintsugi-")
    mark = uuid4().hex
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment.pop("MPLBACKEND", None)
    environment |= {"PYTHONHASHSEED": "0", "KINTSUGI_HOME": home, "IPYTHONDIR": home, MARK: mark}
    environment["KINTSUGI_SEED"] = "0"  # utils/course/checks.py: the cases of a lab's checks
    try:
        yield Surroundings(environment, mark)
    finally:
        for process in marked(mark):
            process.kill()
        shutil.rmtree(home, ignore_errors=True)


@dataclass(frozen=True)
class Run:
    """A notebook after its run: with its outputs, the seconds, and the problem or ''."""

    notebook: nbformat.NotebookNode
    seconds: float
    problem: str


def run(
    path: Path,
    notebook: nbformat.NotebookNode | None = None,
    *,
    on_cell: Callable[[int], None] | None = None,
    cell_timeout: float = 600,
) -> Run:
    """Run a notebook in its own folder and stop at the first error.

    Args:
        path: of the notebook; its folder is the kernel's working folder.
        notebook: its content, if not to be read from `path`. It is filled with outputs.
        on_cell: called as on_cell(index) before each cell.
        cell_timeout: seconds that one cell may take.
    """
    notebook = notebook or nbformat.read(path, as_version=4)
    position = 0

    def started(cell, cell_index):
        nonlocal position
        position = cell_index
        if on_cell:
            on_cell(cell_index)

    client = NotebookClient(
        notebook,
        timeout=cell_timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        on_cell_start=started,
        resources={"metadata": {"path": str(path.parent)}},
    )
    begin = time.monotonic()
    with surroundings() as around:
        try:
            client.execute(env=around.environment, stderr=subprocess.DEVNULL)
            problem = ""
        except CellExecutionError as error:
            problem = (
                f"{where(path, notebook, position)}: {error.ename}: {first_line(error.evalue)}"
            )
        except CellTimeoutError:
            problem = f"{where(path, notebook, position)}: not done after {cell_timeout:g} s"
        except DeadKernelError:
            problem = f"{where(path, notebook, position)}: the kernel died"
        seconds = time.monotonic() - begin
        left = around.leftovers()
        if left and not problem:
            problem = f"{name(path)} left processes: " + "; ".join(map(describe, left))
    return Run(notebook, seconds, problem)


def read(path: Path) -> nbformat.NotebookNode:
    """A notebook in format 4.5; a missing or repeated id is made from the cell's position."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["nbformat"], content["nbformat_minor"] = 4, 5
    seen = set()
    for index, cell in enumerate(content["cells"]):
        if cell.get("id") in seen | {None}:
            cell["id"] = f"cell-{index:02d}"
        seen.add(cell["id"])
    return nbformat.reads(json.dumps(content), as_version=4)


def local_paths_removed(line: str) -> str:
    """A line of a traceback without this machine's paths, addresses and colours."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"0x[0-9a-f]{6,}", "0x…", line)
    for place, word in [(ROOT, ""), (sys.prefix, ".venv/"), (sys.base_prefix, "python/")]:
        line = line.replace(f"{place}{os.sep}", word)
    return line.replace(str(Path.home()), "~")


def answers(notebook: nbformat.NotebookNode) -> set[int]:
    """The cells that show the answer to a prediction: its reveal, and cells between the two in the
    prediction's section."""
    asked, found = set(), set()
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            asked = set() if re.search("(?m)^## ", cell.source) else asked
            continue
        predicted, revealed = (names_in(name, cell.source) for name in ("predict", "reveal"))
        if cell.get("outputs") and not predicted and (asked or revealed):
            found.add(index)
        asked = asked.difference(revealed).union(predicted)
    return found


def normalise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Reduce a notebook to what is worth storing, in place; return it."""
    notebook.metadata = nbformat.from_dict(METADATA)
    folded = answers(notebook)
    for index, cell in enumerate(notebook.cells):
        tags = sorted(cell.metadata.get("tags", []))
        slide = cell.metadata.get("slideshow", {}).get("slide_type")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if slide in SLIDE_TYPES:
            cell.metadata["slideshow"] = {"slide_type": slide}
        if "hide-input" in tags:  # the author sets the tag; JupyterLab obeys this
            cell.metadata["jupyter"] = {"source_hidden": True}
        if index in folded:  # JupyterLab unfolds the output when the learner runs the cell
            cell.metadata.setdefault("jupyter", {})["outputs_hidden"] = True
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output["metadata"] = nbformat.from_dict({})
            if output.output_type == "error":
                output["traceback"] = [local_paths_removed(line) for line in output["traceback"]]
    return notebook


def store(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write a temporary file and rename it: a crash leaves the old file or the new one."""
    nbformat.validate(notebook)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")
    beside.replace(path)


def refresh(path: Path, notebook: nbformat.NotebookNode | None = None) -> str:
    """Run and store one notebook; return the problem or ''.

    `notebook` is its new content, if not to be read from `path`.
    """
    done = run(path, notebook or read(path))
    if not done.problem:
        store(normalise(done.notebook), path)
    print(f"{name(path)}: {done.problem or f'stored, {done.seconds:.1f} s'}", flush=True)
    return done.problem
