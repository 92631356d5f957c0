"""Run notebooks and store them with their outputs: `make refresh [NB=…]`.

A second run gives the same bytes, except for the outputs of cells tagged `nbval-ignore-output`:
cells keep their ids, metadata is reduced to what matters, and nothing local is stored. A notebook
that fails stays unchanged. The new file is written next to the old one and renamed.
"""

import subprocess
import sys

from utils.paths import ROOT
from utils.workshop.notebooks import asked_for, refresh, written_notebooks


def main() -> None:
    written = written_notebooks()
    paths = asked_for("Run notebooks and store them with outputs.", written)
    failed = sum(refresh(path) != "" for path in paths)
    if paths == written:  # the learner's copies follow from the solutions
        labs = [sys.executable, "-m", "utils.workshop.labs", "--again"]
        failed += subprocess.run(labs, cwd=ROOT).returncode
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
