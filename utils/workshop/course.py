"""Run every notebook without a browser and show the result: `make course [NB=…]`.

The executed copies stay in a temporary folder; the stored notebooks are not touched.
"""

import sys
import tempfile
import time
from pathlib import Path

import nbformat

from utils.workshop.notebooks import asked_for, every_notebook, name, run


class Progress:
    """One moving line on a terminal; nothing if output goes to a file."""

    def __init__(self, title: str, cells: int):
        self.title, self.cells, self.begin = title, cells, time.monotonic()

    def __call__(self, index: int) -> None:
        if sys.stdout.isatty():
            done = round(20 * index / self.cells)
            seconds = time.monotonic() - self.begin
            bar = "█" * done + "░" * (20 - done)
            print(f"\r\033[K{bar} {self.title}  {seconds:.0f} s", end="", flush=True)

    def clear(self) -> None:
        if sys.stdout.isatty():
            print("\r\033[K", end="")


def table(rows: list[tuple[str, str, str]]) -> str:
    """Rows as aligned columns; the middle one is right-aligned."""
    wide = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"{a:<{wide[0]}}  {b:>{wide[1]}}  {c}" for a, b, c in rows)


def run_course(paths: list[Path], folder: Path) -> int:
    """Run the notebooks and print the table; return the number of failures."""
    rows, problems = [("lesson", "seconds", "result")], []
    for path in paths:
        cells = len(nbformat.read(path, as_version=4).cells)
        progress = Progress(name(path), cells)
        done = run(path, on_cell=progress)
        progress.clear()
        copy = folder / name(path).replace("/", "__")
        nbformat.write(done.notebook, copy)
        result = "failed" if done.problem else "ok"
        rows.append((name(path), f"{done.seconds:.1f}", result))
        print(f"{name(path)}: {result} in {done.seconds:.1f} s", flush=True)
        if done.problem:
            problems.append(f"{done.problem}\n   as it ran: {copy}")
    print("\n" + table(rows))
    print("\n".join(["", *problems]) if problems else f"\nExecuted copies: {folder}")
    return len(problems)


def main() -> None:
    paths = asked_for("Run every notebook without a browser.", every_notebook())
    try:
        sys.exit(run_course(paths, Path(tempfile.mkdtemp(prefix="kintsugi-course-"))) > 0)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; the stored notebooks are unchanged.")


if __name__ == "__main__":
    main()
