"""The tests that skip without a GPU, and the lessons that a GPU changes."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.gpu.child import tried
from utils.paths import ROOT

REASON = "there is no CUDA device"
LESSONS = ("00", "01", "02", "03"), ("04", "05", "12")  # each tuple fits into four minutes


def skipping() -> list[str]:
    """Test files that contain `REASON`; for a conftest.py, its folder. The tests have `cuda` in the
    name or the case's id."""
    found = (path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "gpu")
    files = sorted(path for path in found if REASON in path.read_text(encoding="utf-8"))
    folders = [path.parent for path in files if path.name == "conftest.py"]
    wanted = folders + [path for path in files if path.parent not in folders]
    return [str(one.relative_to(ROOT)) for one in wanted]


def tests(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """A row per file; a rehearsal runs one file, whose tests all skip."""
    for place in skipping():
        if not rehearse or "test_offload" in place:
            yield from results(place)


def results(place: str) -> Iterator[tuple[str, dict]]:
    """The rows of a file or a folder; a failed import is a row as well."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=-p tests.plugin --import-mode=importlib"]
        command += ["--continue-on-collection-errors"]
        done = subprocess.run(
            [*command, f"--junitxml={report.name}", place], cwd=ROOT, stdout=sys.stderr
        )
        if done.returncode not in (0, 1, 5):  # all passed, some failed, none was chosen
            raise RuntimeError(f"pytest ended with status {done.returncode}")
        cases = list(ElementTree.parse(report.name).iter("testcase"))
    files: dict[str, dict] = {}
    for case in cases:
        row = files.setdefault(case.get("classname") or case.get("name"), {"passed": 0})
        skipped, error = case.find("skipped"), case.find("error")
        lacks = "" if error is None else re.search(r"No module named '(\w+)", error.text or "")
        if skipped is not None:  # a package may be missing
            row |= {"skipped": row.get("skipped", 0) + 1, "absent": skipped.get("message")}
        elif lacks:
            row["absent"] = f"{lacks[1]} is not installed"
        elif case.find("failure") is not None or error is not None:
            row.setdefault("failed", f"{case.get('name')} failed first")
        else:
            row["passed"] += 1
    yield from files.items()


def lessons(rehearse: bool) -> Iterator[tuple[str, dict]]:
    return timed(LESSONS[0][:1] if rehearse else LESSONS[0])


def later_lessons(rehearse: bool) -> Iterator[tuple[str, dict]]:
    return timed(LESSONS[1][:1] if rehearse else LESSONS[1])


def timed(numbers: tuple[str, ...]) -> Iterator[tuple[str, dict]]:
    """Seconds of each lesson, run in its own kernel; a rehearsal runs one."""
    import utils.workshop.notebooks  # noqa: F401 (without nbclient the whole part is skipped)

    for number in numbers:
        found = sorted((ROOT / "notebooks").glob(f"{number}_*.ipynb"))
        if found:
            yield found[0].stem, tried(lesson, found[0])
        else:
            yield number, {"absent": "this lesson is not here yet"}


def lesson(path: Path) -> dict:
    from utils.workshop import notebooks

    done = notebooks.run(path, cell_timeout=120)
    if done.problem:
        return {"failed": re.sub(r"\s+", " ", done.problem)[:300]}
    return {"seconds": done.seconds}
