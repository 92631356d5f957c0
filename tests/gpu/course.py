"""The tests that skip where no GPU is, and the lessons that a GPU changes."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from xml.etree import ElementTree

from tests.gpu.child import tried
from utils.paths import ROOT
from utils.workshop import notebooks

REASON = "there is no CUDA device"
LESSONS = ("00", "01", "02", "03", "04", "05", "12")


def skipping() -> list[str]:
    """Files of tests that say `REASON`; for a conftest.py its folder. Such a test has `cuda` in its
    name or in that of its case."""
    found = (path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "gpu")
    files = sorted(path for path in found if REASON in path.read_text(encoding="utf-8"))
    wanted = [path.parent if path.name == "conftest.py" else path for path in files]
    return [str(one.relative_to(ROOT)) for one in wanted]


def tests(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """A row a file; a rehearsal runs one, in which all is skipped."""
    files = skipping()
    if rehearse:
        files = [one for one in files if "test_offload" in one]
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", "-p", "no:cacheprovider"]
        command += ["-o", "addopts=-p tests.plugin --import-mode=importlib"]
        done = subprocess.run(
            [*command, f"--junitxml={report.name}", *files], cwd=ROOT, stdout=sys.stderr
        )
        if done.returncode not in (0, 1):  # all passed, or some failed
            raise RuntimeError(f"pytest ended with status {done.returncode}")
        cases = list(ElementTree.parse(report.name).iter("testcase"))
    files: dict[str, dict] = {}
    for case in cases:
        row = files.setdefault(case.get("classname"), {"passed": 0})
        skipped = case.find("skipped")
        if skipped is not None:  # a package may be missing
            row |= {"skipped": row.get("skipped", 0) + 1, "absent": skipped.get("message")}
        elif case.find("failure") is not None or case.find("error") is not None:
            row.setdefault("failed", f"{case.get('name')} failed first")
        else:
            row["passed"] += 1
    yield from files.items()


def lessons(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """Seconds of each, run in a kernel of its own; a rehearsal runs one."""
    for number in LESSONS[4:5] if rehearse else LESSONS:
        found = sorted((ROOT / "notebooks").glob(f"{number}_*.ipynb"))
        if found:
            yield found[0].stem, tried(lesson, found[0])
        else:
            yield number, {"absent": "this lesson is not here yet"}


def lesson(path) -> dict:
    done = notebooks.run(path, cell_timeout=120)
    if done.problem:
        return {"failed": re.sub(r"\s+", " ", done.problem)[:300]}
    return {"seconds": done.seconds}
