"""Run notebooks and store them with their outputs: `make refresh [NB=…]`.

A second run gives the same bytes, but for the outputs of cells tagged `nbval-ignore-output`:
cells keep their ids, metadata is reduced to what means something, nothing local is stored. A
notebook that fails stays as it was. The new file is written beside the old one and renamed.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

import nbformat

from utils.paths import ROOT
from utils.workshop.notebooks import every_notebook, name, run

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path):
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
    """A line of a traceback without the places and colours of this machine."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"0x[0-9a-f]{6,}", "0x…", line)
    for place, word in [(ROOT, ""), (sys.prefix, ".venv/"), (sys.base_prefix, "python/")]:
        line = line.replace(f"{place}{os.sep}", word)
    return line.replace(str(Path.home()), "~")


def normalise(notebook):
    """Reduce a notebook to what is worth storing, in place; returns it."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        tags = sorted(cell.metadata.get("tags", []))
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if "hide-input" in tags:  # the tag is the author's wish; this is what JupyterLab obeys
            cell.metadata["jupyter"] = {"source_hidden": True}
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output["metadata"] = nbformat.from_dict({})
            if output.output_type == "error":
                output["traceback"] = [local_paths_removed(line) for line in output["traceback"]]
    return notebook


def store(notebook, path: Path):
    """Write beside and rename, so that a crash leaves the old file or the new one."""
    nbformat.validate(notebook)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(nbformat.writes(notebook).rstrip("\n") + "\n", encoding="utf-8")
    beside.replace(path)


def refresh(path: Path, notebook=None) -> str:
    """Run and store one notebook; returns the problem or ''.

    `notebook` is its new content, if that is not to be read from `path`.
    """
    done = run(path, notebook or read(path))
    if not done.problem:
        store(normalise(done.notebook), path)
    print(f"{name(path)}: {done.problem or f'stored, {done.seconds:.1f} s'}", flush=True)
    return done.problem


def main():
    from utils.workshop.labs import learner_notebooks, make_labs

    parser = argparse.ArgumentParser(description="Run notebooks and store them with outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="only these")
    options = parser.parse_args()
    for path in options.notebooks:
        if not path.is_file():
            sys.exit(f"{path} is not there: give a path from the repository's root.")
    if options.notebooks:
        problems = [refresh(path.resolve()) for path in options.notebooks]
        sys.exit(any(problems))
    copies = learner_notebooks(ROOT)
    problems = [refresh(path) for path in every_notebook(ROOT) if path not in copies]
    sys.exit(any(problems) or make_labs(ROOT, again=True) > 0)


if __name__ == "__main__":
    main()
