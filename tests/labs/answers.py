"""Right and wrong answers to a lab's exercises, and the verdicts of its checks.

They are in tests/labs/NN_NAME.diff, as differences from the worked answer:

    @@ EXERCISE: MISTAKE @@ KIND @@ words that the hint must contain
    What is wrong with it.
     a line of the worked answer
    -the next one, which is removed
    +its replacement
    ...
    +lines of a place without old lines are added at the end

"..." separates places; the old lines of each occur once in the worked answer. A right answer that
is written differently has the kind "right" and no hint. An entry ends with an empty line.

Each answer is judged by a process that is a fork of the ranks' forkserver, in a folder with the
solution's files, one of which the answer replaces. (No pytest here: those processes import this
file.)
"""

import importlib
import io
import os
import re
import sys
import tempfile
import zlib
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tests.patience import patience
from utils.course import ledger
from utils.course.checks import check
from utils.paths import ROOT
from utils.private_api import share_the_parents_forkserver
from utils.ranks.pool import start_forkserver

AT_ONCE = 2  # judging processes; each starts its own ranks
SECONDS = patience(120)  # per answer, without the wait for its turn


# How an answer can be wrong: its values; right only for the tested sizes or types; more messages or
# memory than the contract allows, or work in another half; inputs changed; luck instead of a wait;
# the library in disguise; what is equal in all cases taken for constant; ranks in step by accident;
# one odd rank; a part of the result; no end.
KINDS = (
    "values", "sizes", "types", "communication", "memory", "work", "inputs", "luck", "library",
    "constants", "step", "odd", "part", "end",
)
RIGHT = "right"


@dataclass(frozen=True)
class Answer:
    """kind: one of KINDS, "" or RIGHT; hint: words that the check must print, or alternatives
    separated by " | " if cases or timing decide; source: the whole file."""

    exercise: str
    name: str
    kind: str
    hint: str
    source: str

    @property
    def right(self) -> bool:
        return self.kind == RIGHT

    def __str__(self) -> str:
        return f"{self.exercise}: {self.name}"


@dataclass(frozen=True)
class Lab:
    """folder: its name in labs/; exercises: {exercise: (module in labs/support/ with its check, the
    check's function, the answer's file)}."""

    folder: str
    exercises: dict

    @property
    def name(self) -> str:
        """The folder without its number."""
        return self.folder[3:]

    @property
    def solution(self) -> Path:
        return ROOT / "labs" / self.folder / "solution"

    def source(self, exercise: str) -> str:
        """The solution's file of an exercise."""
        return (self.solution / self.exercises[exercise][2]).read_text()

    def answers(self) -> list[Answer]:
        """The right and wrong answers to its exercises."""
        text = (Path(__file__).parent / f"{self.folder}.diff").read_text()
        found = []
        for entry in re.split(r"^@@ ", text, flags=re.M)[1:]:
            header, *lines = entry.rstrip().split("\n")
            title, kind, hint = (*header.split(" @@ "), "")[:3]
            exercise, name = title.split(": ", 1)
            if exercise in self.exercises:  # a lab may be tested in several parts
                source = edited(self.source(exercise), lines, f"{self.folder}.diff, {title}")
                found.append(Answer(exercise, name, kind, hint, source))
        return found

    def answer(self, exercise: str, name: str) -> Answer:
        return next(one for one in self.answers() if (one.exercise, one.name) == (exercise, name))


def edited(source: str, lines: list[str], where: str) -> str:
    """Apply an entry's lines to source; ValueError if old lines do not occur exactly once."""
    while lines[0][:1] not in (" ", "+", "-"):  # the description
        lines = lines[1:]
    for place in "\n".join(lines).split("\n...\n"):
        place = [line or " " for line in place.split("\n")]
        old, new = (
            "".join(f"\n{line[1:]}" for line in place if line[0] in (" ", mark)) for mark in "-+"
        )
        if not old:
            source += f"\n\n{new[1:]}\n"
        elif f"{source}\n".count(f"{old}\n") == 1:
            source = f"{source}\n".replace(f"{old}\n", f"{new}\n")[:-1]
        else:
            raise ValueError(f"{where}: these lines do not occur once in the worked answer:{old}")
    return source


@dataclass(frozen=True)
class Judged:
    """out: what the check printed; checks: what it stored for the progress report."""

    out: str
    checks: dict


class Judges:
    """Processes that judge a lab's answers, each once."""

    def __init__(self, lab: Lab, pool: ProcessPoolExecutor):
        self.lab, self.pool, self.begun = lab, pool, {}

    def begin(self, answers) -> None:
        """Begin to judge several (exercise, source)."""
        for exercise, source in answers:
            if (exercise, source) not in self.begun:
                self.begun[exercise, source] = self.pool.submit(judge, self.lab, exercise, source)

    def __call__(self, exercise: str, source: str) -> Judged:
        """The check's verdict on an answer."""
        self.begin([(exercise, source)])
        return self.begun[exercise, source].result(SECONDS * (1 + len(self.begun) // AT_ONCE))


@contextmanager
def judges_of(lab: Lab):
    """A context manager that yields Judges."""
    with ProcessPoolExecutor(AT_ONCE, start_forkserver(), share_the_parents_forkserver) as pool:
        yield Judges(lab, pool)
        pool.shutdown(cancel_futures=True)


def judge(lab: Lab, exercise: str, source: str) -> Judged:
    """In such a process: the check's verdict on an answer."""
    module, function, file = lab.exercises[exercise]
    module = importlib.import_module(f"labs.support.{lab.name}.{module}")
    path = list(sys.path)
    with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()) as printed:
        os.environ["KINTSUGI_HOME"] = f"{place}/home"
        for given in lab.solution.glob("*.py"):
            (Path(place) / given.name).write_text(given.read_text())
        answer = Path(place) / file
        answer.write_text(source)
        check(exercise, getattr(module, function), answer, seed=zlib.crc32(answer.read_bytes()))
        sys.path[:] = path  # removes the answer's folder
        return Judged(printed.getvalue(), ledger.read()["checks"])
