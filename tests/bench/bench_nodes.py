"""The network experiment of lesson 10, run with the lesson's own cells; --store keeps the result.

    python -m tests.bench.bench_nodes [--store]

The lesson shows the stored result, docs/reference/two_nodes.json, on machines that do not allow
network namespaces. Store it on an otherwise idle machine.
"""

import argparse
import json
import os
import platform
import sys

import cloudpickle
import nbformat
import torch

from utils.paths import ROOT
from utils.ranks.nodes import Nodes

LESSON = ROOT / "notebooks" / "10_five_dimensions.ipynb"
REFERENCE = ROOT / "docs" / "reference" / "two_nodes.json"
# the beginnings of the cells
CELLS = ("import json", "TRAIN, _", "def prepare", "def average", "MIXES =", "def timed")


def lesson() -> dict:
    """The names that the experiment's cells define."""
    names = {"__name__": "__main__"}  # so that functions are pickled by value
    cells = [cell.source for cell in nbformat.read(LESSON, 4).cells if cell.cell_type == "code"]
    for beginning in CELLS:
        (source,) = [source for source in cells if source.startswith(beginning)]
        exec(compile(source, beginning, "exec"), names)
    return names


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", action="store_true", help="write docs/reference/two_nodes.json")
    arguments = parser.parse_args()
    cloudpickle.register_pickle_by_value(sys.modules["__main__"])
    torch.set_num_threads(1)
    names = lesson()
    with Nodes(2) as nodes:
        seen = names["measure"](nodes)
    for mix, row in seen["ms"].items():
        shown = "  ".join(f"{speed:>4} Gbit/s {ms:>5.0f} ms" for speed, ms in row.items())
        print(f"{mix:<22} {shown}   {seen['bytes'][mix] / 1e6:.2f} MB on the cable")
    if arguments.store:
        about = "Lesson 10: a step of each mix on two nodes of two ranks, by Gbit/s of the cable."
        stored = {
            "about": f"{about} Milliseconds, and bytes that node 0 sends in a step.",
            "machine": f"a machine of {os.cpu_count()} {platform.machine()} cores, gloo",
            "ms": {mix: {s: round(ms) for s, ms in row.items()} for mix, row in seen["ms"].items()},
            "bytes": {mix: round(size) for mix, size in seen["bytes"].items()},
        }
        REFERENCE.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
