"""Make the learner's copies of the labs from their solutions: `make labs [FORCE=1]`.

`labs/NN_name/solution/` is written by hand: the notebook, and the files that the learner writes.
Each gets a copy one folder up, without the learner's part. Markers are on their own lines, in code
cells and .py files; a .py without any has no copy. The code that a lab provides (its checks, its
helpers) exists once, in `labs/support/name/`, and both import it.

    def ring(x):
        ### BEGIN SOLUTION: send the left half to the next rank
        ...
        ### END SOLUTION

becomes

    def ring(x):
        raise NotImplementedError("send the left half to the next rank")

If a raise would stop Run All (a block at the left margin), or if the learner should start from
something, the copy has the lines `### STUB: answer = None` of the block instead, below the task as
a comment. In a Markdown cell the block is `<!-- BEGIN SOLUTION`, the learner's start, `-->`, the
solution, `<!-- END SOLUTION -->`. Links are shortened by one folder. A learner's notebook is stored
executed.

A copy that was edited (it is neither git's version nor the generated one) is left unchanged and
reported; FORCE=1 overwrites it.
"""

import argparse
import copy
import re
import subprocess
import sys
from pathlib import Path

import nbformat

from utils.paths import ROOT
from utils.workshop.notebooks import name, read, refresh

BEGIN = re.compile(r"(\s*)### BEGIN SOLUTION(?::\s*(.*))?$")
END = re.compile(r"\s*### END SOLUTION\s*$")
STUB = re.compile(r"(\s*)### STUB: ?(.*)$")
IN_TEXT = re.compile(r"<!-- BEGIN SOLUTION\n(.*?)\n-->\n.*?<!-- END SOLUTION -->", re.S)
LINK = re.compile(r"""(\]\(|(?:href|src)=["'])\.\./""")


class LabError(Exception):
    """One sentence that names the file, the line and the fix."""


def without_solution(source: str, place: str) -> str:
    """`source` with every solution block replaced by its stub.

    Args:
        place: the name of `source` in errors.
    Raises:
        LabError: a block has no task or no end, or would stop Run All.
    """
    lines, block, begin = [], [], None
    for number, line in enumerate(source.split("\n"), start=1):
        if BEGIN.match(line):
            if begin:
                raise LabError(f"{place}, line {number}: a solution begins inside a solution.")
            begin, block, first = BEGIN.match(line), [], number
        elif END.match(line):
            if not begin:
                raise LabError(f"{place}, line {number}: ### END SOLUTION without a beginning.")
            lines += stub(begin[1], (begin[2] or "").strip(), block, f"{place}, line {first}")
            begin = None
        elif begin:
            block.append(line)
        else:
            lines.append(line)
    if begin:
        raise LabError(f"{place}, line {first}: the solution has no ### END SOLUTION.")
    return "\n".join(lines)


def stub(indent: str, task: str, block: list[str], place: str) -> list[str]:
    """The lines that replace one solution block."""
    if not task:
        raise LabError(f"{place}: state the task, ### BEGIN SOLUTION: what the learner writes.")
    given = [match[1] + match[2] for match in map(STUB.match, block) if match]
    if given:
        return [f"{indent}# {task}", *given]
    if not indent:
        raise LabError(
            f"{place}: a raise at the left margin stops Run All; give the learner a start with "
            "### STUB: name = None."
        )
    if '"' in task or "\\" in task:
        raise LabError(f"{place}: no double quote or backslash in a task: {task}")
    line = f'{indent}raise NotImplementedError("{task}")'
    if len(line) <= 100:
        return [line]
    return [f"{indent}raise NotImplementedError(", f'{indent}    "{task}"', f"{indent})"]


def learner_notebook(solution: nbformat.NotebookNode, place: str) -> nbformat.NotebookNode:
    """The learner's copy of a solution notebook, without outputs."""
    notebook = copy.deepcopy(solution)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.source = without_solution(cell.source, f"{place}, cell {cell.id}")
            cell.outputs, cell.execution_count = [], None
        else:
            cell.source = LINK.sub(r"\1", IN_TEXT.sub(r"\1", cell.source))
    return notebook


def solutions(root: Path) -> list[tuple[Path, Path]]:
    """(solution file, learner's copy) for every lab; notebooks last, since they use the scripts."""
    scripts = [path for path in root.glob("labs/*/solution/*.py") if has_solution(path)]
    files = [*scripts, *root.glob("labs/*/solution/*.ipynb")]
    files.sort(key=lambda path: (path.parent, path.suffix == ".ipynb", path.name))
    return [(path, path.parent.parent / path.name) for path in files]


def has_solution(script: Path) -> bool:
    """Whether it has something for the learner to write."""
    return any(map(BEGIN.match, script.read_text(encoding="utf-8").splitlines()))


def generated(source: Path, root: Path) -> str | nbformat.NotebookNode:
    """The intended learner's copy of `source`: text, or a notebook without outputs."""
    place = name(source, root)
    if source.suffix == ".ipynb":
        return learner_notebook(read(source), place)
    return without_solution(source.read_text(encoding="utf-8"), place)


def essence(content: str | nbformat.NotebookNode) -> str | list[tuple]:
    """What distinguishes two versions: the text, or a notebook's cells without outputs."""
    if isinstance(content, str):
        return content
    return [(c.id, c.cell_type, c.source, c.metadata.get("tags", [])) for c in content.cells]


def stored(path: Path) -> str | nbformat.NotebookNode | None:
    """The file as it is; None if it does not exist."""
    if not path.exists():
        return None
    return read(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")


def committed(path: Path, root: Path) -> str | nbformat.NotebookNode | None:
    """The file as committed in git; None if git does not know it."""
    command = ["git", "-C", str(root), "show", f"HEAD:{path.relative_to(root).as_posix()}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return None
    if done.returncode:
        return None
    if path.suffix != ".ipynb":
        return done.stdout
    return nbformat.reads(done.stdout, as_version=4)


def make_labs(root: Path = ROOT, *, force: bool = False, again: bool = False) -> int:
    """Make missing and stale copies (with `again`, run every notebook); return the failures."""
    failures = 0
    for source, target in solutions(root):
        try:
            wanted = generated(source, root)
        except LabError as error:
            print(error, flush=True)
            failures += 1
            continue
        there = stored(target)
        fresh = there is not None and essence(there) == essence(wanted)
        if not fresh and there is not None and not force:
            git = committed(target, root)
            if git is None or essence(git) != essence(there):
                print(f"{name(target, root)} holds your own work and is kept: FORCE=1 overwrites.")
                continue
        if target.suffix == ".ipynb":
            if not fresh or again or force:
                failures += bool(refresh(target, wanted))
        elif not fresh:
            target.write_text(wanted, encoding="utf-8")
            print(f"{name(target, root)}: made")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the learner's copies of the labs.")
    parser.add_argument("--force", action="store_true", help="overwrite edited copies")
    parser.add_argument("--again", action="store_true", help="run every notebook again")
    options = parser.parse_args()
    sys.exit(make_labs(ROOT, force=options.force, again=options.again) > 0)


if __name__ == "__main__":
    main()
