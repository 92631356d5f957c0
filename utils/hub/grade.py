"""Run the labs' checks on a class's submissions: `make grade FOLDERS="hand-in/*"`.

    python -m utils.hub.grade hand-in/ada hand-in/bob --out grades.csv

A submission is a folder with the files of one or more labs, each lab in a folder of its name, as in
`labs/` (a learner's whole clone is one). Its Python files are copied over the course's own copy of
the lab, so neither notebooks nor checks are the learner's. Each lab runs twice, with new cases, in
the sandbox of a hub's seat: no network, its own home, the course read-only.

The table has a row for each exercise: submission, lab, exercise, verdict (`ok`, `wrong`, `not
started`, `differs` if the two runs disagree, `not run` with the reason) and symptom.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from utils.course.progress import names_in
from utils.hub.seat import COPY, HOME, SeatError, check_sandbox, sandbox
from utils.paths import ROOT

COURSE = ("utils", "labs", "models", "notebooks", "triton_model_repo", "docs", "pyproject.toml")
COLUMNS = ("submission", "lab", "exercise", "verdict", "symptom")
LONGEST = 1800  # seconds for one run of a lab


def handed_in(folder: Path) -> dict[str, list[Path]]:
    """{lab: its Python files} of a submission, for the labs of the course."""
    labs = {}
    for lab in sorted(path.parent.name for path in ROOT.glob("labs/[0-9]*/lab.ipynb")):
        places = folder / "labs" / lab, folder / lab
        if own := [path for place in places for path in place.glob("*.py")]:
            labs[lab] = own
    return labs


def exercises(lab: str) -> tuple[str, ...]:
    """The names of a lab's checks, in order."""
    notebook = json.loads((ROOT / "labs" / lab / "lab.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return names_in("check", "\n".join("".join(cell["source"]) for cell in cells))


def judged(lab: str, files: list[Path]) -> tuple[dict[str, tuple[str, str]], str]:
    """({exercise: (verdict, symptom)}, problem or "") of one run in a sandbox."""
    with tempfile.TemporaryDirectory(prefix="kintsugi-grade-") as folder:
        home = Path(folder)
        copy = home / COPY.relative_to(HOME)
        for name in COURSE:
            whole = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy.mkdir(exist_ok=True)
            whole(ROOT / name, copy / name)
        for file in files:
            if file.is_file() and not file.is_symlink():
                shutil.copy(file, copy / "labs" / lab / file.name)
        variables = {
            "HOME": str(HOME), "PATH": os.environ["PATH"], "LANG": "C.UTF-8",
            "PYTHONPATH": str(COPY), "KINTSUGI_HOME": str(HOME / "ledger"), "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute"]
        command += ["--allow-errors", "--output-dir", "/tmp", f"labs/{lab}/lab.ipynb"]
        words = [*sandbox(home, []), "--chdir", str(COPY), *command]
        try:
            done = subprocess.run(
                words, env=variables, capture_output=True, text=True, timeout=LONGEST
            )
            problem = done.stderr.strip() if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"the lab did not end within {LONGEST} s"
        try:
            ledger = json.loads((home / "ledger" / "ledger.json").read_text(encoding="utf-8"))
        except FileNotFoundError:  # no exercise was started
            ledger = {"checks": {}, "tries": {}}
    verdicts = {
        name: ("ok", "") if passed else ("wrong", ledger["tries"][name]["symptom"])
        for name, passed in ledger["checks"].items()
    }
    return verdicts, problem.splitlines()[-1] if problem else ""


def rows(folder: Path) -> Iterator[tuple[str, str, str, str, str]]:
    """The rows of a submission."""
    labs = handed_in(folder)
    if not labs:
        yield folder.name, "", "", "not run", "no folder of a lab with Python files"
    for lab, files in labs.items():
        runs = [judged(lab, files) for _ in range(2)]
        for name in exercises(lab):
            (first, symptom), (second, other) = (
                found.get(name, ("not run", problem) if problem else ("not started", ""))
                for found, problem in runs
            )
            verdict = first if first == second else "differs"
            yield folder.name, lab, name, verdict, symptom or other


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the labs' checks on submissions.")
    parser.add_argument("folders", nargs="+", type=Path, help="one submission each")
    parser.add_argument("--out", type=Path, default=Path("grades.csv"), help="the table")
    options = parser.parse_args()
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(f"{folder} is not a folder: give the submitted folders")
    try:
        check_sandbox()
    except SeatError as error:
        parser.error(str(error))
    beside = options.out.with_name(f".{options.out.name}.partial")
    try:
        with beside.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(COLUMNS)
            for folder in options.folders:
                for row in rows(folder.resolve()):
                    table.writerow(row)
                    print(" · ".join(part for part in row if part), flush=True)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(options.out)
    finally:
        beside.unlink(missing_ok=True)  # after an error or Ctrl-C
    print(f"\n{options.out}")


if __name__ == "__main__":
    main()
