"""Run notebooks and store them with their outputs: `make refresh [NB=…]`.

A second run gives the same bytes, but for the outputs of cells tagged `nbval-ignore-output`:
cells keep their ids, metadata is reduced to what means something, nothing local is stored. A
notebook that fails stays as it was. The new file is written beside the old one and renamed.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from utils.paths import ROOT
from utils.workshop.notebooks import refresh, written_notebooks


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and store them with outputs.")
    parser.add_argument("notebooks", nargs="*", type=Path, help="only these")
    options = parser.parse_args()
    for path in options.notebooks:
        if not path.is_file():
            sys.exit(f"{path} is not there: give a path from the repository's root.")
    paths = [path.resolve() for path in options.notebooks] or written_notebooks(ROOT)
    failed = sum(refresh(path) != "" for path in paths)
    if not options.notebooks:  # the learner's copies follow from the solutions
        labs = [sys.executable, "-m", "utils.workshop.labs", "--again"]
        failed += subprocess.run(labs, cwd=ROOT).returncode
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
