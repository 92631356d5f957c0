"""Your progress: predictions and checks of every lesson and lab (`make progress`), and the page
on which `make lab` opens.

The lessons and labs are those in the repository; the predictions and checks of each are read from
its notebook (`predict("…` and `check("…`), and what you have done from the ledger
(`utils/course/ledger.py`).
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from utils.cli import no_arguments
from utils.course import ledger
from utils.paths import ROOT

HERE = ROOT / "you_are_here.md"
PAGE = """# You are here

**{next}**

The [README](README.md) has the table of lessons, with questions and minutes. If you are stuck:
[when something goes wrong](docs/machines.md#when-something-goes-wrong), the
[glossary](docs/glossary.md), the three hints of each exercise.

| lesson or lab | predictions made | checks passed |
| --- | --- | --- |
{rows}

This page was written when the lab was opened; `make progress` says where you are now.
"""


@dataclass(frozen=True)
class Part:
    """One lesson or lab: its title, its notebook and the names of its predictions and checks."""

    title: str
    predictions: tuple[str, ...]
    checks: tuple[str, ...]
    path: Path = field(default=ROOT, compare=False)


def parts(root: Path = ROOT) -> list[Part]:
    """Every lesson, each followed by its lab."""
    lessons = {path.stem: path for path in root.glob("notebooks/[0-9]*.ipynb")}
    labs = {path.parent.name: path for path in root.glob("labs/[0-9]*/lab.ipynb")}
    found = []
    for stem in sorted({*lessons, *labs}):
        found += [_part(stem, lessons[stem], "")] if stem in lessons else []
        found += [_part(stem, labs[stem], "lab ")] if stem in labs else []
    return found


def _part(stem: str, path: Path, prefix: str) -> Part:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    number, _, words = stem.partition("_")
    return Part(
        title=f"{prefix}{number} {words.replace('_', ' ')}",
        predictions=names_in("predict", code),
        checks=names_in("check", code),
        path=path,
    )


def names_in(function: str, code: str) -> tuple[str, ...]:
    """First arguments of the calls of `function`, each once, in order."""
    calls = re.findall(rf"""^[^#\n]*?\b{function}\(\s*(["'])(.+?)\1""", code, re.MULTILINE)
    return tuple(dict.fromkeys(name for _, name in calls))


def report(root: Path = ROOT) -> None:
    """Print one line for each lesson and lab, and what comes next."""
    found, content = parts(root), ledger.read()
    if not found:
        print(f"There are no lessons in {root}.")
        return
    made, revealed, passed = _done(content)
    width = max(len(part.title) for part in found)
    print(f"{'':<{width}}{'predicted':>12}{'revealed':>12}{'checks':>12}")
    for part in found:
        columns = [
            _share(part.predictions, made),
            _share(part.predictions, revealed),
            _share(part.checks, passed),
        ]
        print(f"{part.title:<{width}}" + "".join(f"{column:>12}" for column in columns))
    print(_next(found, made | revealed, passed))


def write_page(path: Path = HERE, root: Path = ROOT) -> None:
    """Write "You are here": what comes next, and how far each lesson and lab is, with links."""
    found, (made, revealed, passed) = parts(root), _done(ledger.read())
    rows = [
        f"| [{part.title}]({part.path.relative_to(root)}) | {_share(part.predictions, made)} | "
        f"{_share(part.checks, passed)} |"
        for part in found
    ]
    text = _next(found, made | revealed, passed)
    for part in found:
        if text.endswith(f"in {part.title}."):
            link = f"[{part.title}]({part.path.relative_to(root)})"
            text = text.removesuffix(f"{part.title}.") + f"{link}."
    path.write_text(PAGE.format(next=text, rows="\n".join(rows)), encoding="utf-8")


def _done(content: dict) -> tuple[set[str], set[str], set[str]]:
    """Names of predictions made, of predictions revealed, and of checks passed."""
    predictions, checks = content["predictions"], content["checks"]
    return (
        {name for name, entry in predictions.items() if ledger.counts(entry)},
        {name for name, entry in predictions.items() if entry.get("revealed")},
        {name for name, result in checks.items() if result},
    )


def _share(names: tuple[str, ...], done: set[str]) -> str:
    return f"{sum(name in done for name in names)} of {len(names)}" if names else "–"


def _next(found: list[Part], closed: set[str], passed: set[str]) -> str:
    """What comes next; `closed` are the predictions that were made or came too late."""
    for part in found:
        for name in part.predictions:
            if name not in closed:
                return f"Next: your prediction “{name}” in {part.title}."
        for name in part.checks:
            if name not in passed:
                return f"Next: the check “{name}” in {part.title}."
    return "Everything is done."


if __name__ == "__main__":
    no_arguments("utils.course.progress", __doc__)
    report()
