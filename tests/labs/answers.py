"""Answers to a lab's exercises, right and wrong, and what its checks say of them.

The wrong answers of an exercise stand in tests/labs/wrong/NAME/EXERCISE.py, a function for each
mistake. The answer is the solution followed by the function's body; the function's docstring names
the words that the hint must contain. These files are read, never imported.

Each answer is judged by a process that is a fork of the ranks' forkserver, in a folder that holds
the solution's files and the answer in place of one of them. (No pytest here: those processes import
this file.)
"""

import ast
import importlib
import io
import os
import re
import sys
import tempfile
import textwrap
import zlib
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import patience
from utils.course import record
from utils.course.checks import check
from utils.paths import ROOT
from utils.private_api import share_the_parents_forkserver
from utils.ranks.pool import start_forkserver

AT_ONCE = 2  # processes that judge; each starts ranks of its own
SECONDS = patience(120)  # for one answer, waiting for its turn not included


# How an answer can be wrong: only its values; right for the tested sizes or types alone; more
# messages, memory, or work in another half than the contract says; inputs changed; luck in place
# of a wait; the library in disguise; what never changes between cases taken for constant; ranks in
# step by accident; one odd rank; a part of the result; no end.
KINDS = (
    "values", "sizes", "types", "communication", "memory", "work", "inputs", "luck", "library",
    "constants", "step", "odd", "part", "end",
)  # fmt: skip


@dataclass(frozen=True)
class WrongAnswer:
    """source: the whole file; kind: one of KINDS, or ""; hint: words that the check must
    print, or several such, " | " between them, where cases or timing decide which."""

    exercise: str
    mistake: str
    source: str
    kind: str
    hint: str


@dataclass(frozen=True)
class Lab:
    """folder: its name in labs/; exercises: {exercise: (module in labs/support/ with its check, the
    check's function, the answer's file)}; limits: {"module.NAME": seconds}, time limits for these
    tests."""

    folder: str
    exercises: dict
    limits: dict = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Without its number."""
        return self.folder[3:]

    @property
    def solution(self) -> Path:
        return ROOT / "labs" / self.folder / "solution"

    def source(self, exercise: str) -> str:
        """The solution's file of an exercise."""
        return (self.solution / self.exercises[exercise][2]).read_text()

    def wrong(self) -> list[WrongAnswer]:
        """The wrong answers of all exercises."""
        paths = sorted((Path(__file__).parent / "wrong" / self.name).glob("*.py"))
        return [
            answer
            for path in paths
            if path.stem in self.exercises  # a lab may be tested in two parts
            for answer in wrong_answers(path, self.source(path.stem))
        ]


def wrong_answers(path: Path, solution: str) -> list[WrongAnswer]:
    """The answers that the functions in a file of tests/labs/wrong/ describe."""
    text = path.read_text()
    answers = []
    for function in ast.parse(text).body[1:]:
        said = dict(re.findall(r"^(kind|hint): (.+)$", ast.get_docstring(function), re.M))
        lines = text.splitlines()[function.body[0].end_lineno : function.end_lineno]
        body = textwrap.dedent("\n".join(lines))
        source = f"{solution}\n{body}\n"
        answers.append(
            WrongAnswer(path.stem, function.name, source, said.get("kind", ""), said["hint"])
        )
    return answers


@dataclass(frozen=True)
class Judged:
    """out: what the check printed; checks: what it remembered for the progress report."""

    out: str
    checks: dict


class Judges:
    """Processes that judge the answers of a lab, each answer once."""

    def __init__(self, lab: Lab, pool: ProcessPoolExecutor):
        self.lab, self.pool, self.begun = lab, pool, {}

    def begin(self, answers) -> None:
        """Starts to judge several (exercise, source)."""
        for exercise, source in answers:
            if (exercise, source) not in self.begun:
                self.begun[exercise, source] = self.pool.submit(judge, self.lab, exercise, source)

    def __call__(self, exercise: str, source: str | None = None) -> Judged:
        """What the check says of an answer; source None for the solution itself."""
        self.begin([(exercise, source)])
        return self.begun[exercise, source].result(SECONDS * (1 + len(self.begun) // AT_ONCE))


@contextmanager
def judges_of(lab: Lab):
    """Judges that end with the block."""
    with ProcessPoolExecutor(AT_ONCE, start_forkserver(), prepare, (lab.limits,)) as pool:
        yield Judges(lab, pool)
        pool.shutdown(cancel_futures=True)


def prepare(limits: dict) -> None:
    """In a new process: it waits as long as the tests say, and its ranks come from the forkserver
    that it comes from itself."""
    share_the_parents_forkserver()
    for place, seconds in limits.items():
        module, name = place.rsplit(".", 1)
        setattr(importlib.import_module(module), name, seconds)


def judge(lab: Lab, exercise: str, source: str | None) -> Judged:
    """In such a process: what the check says of an answer."""
    module, function, file = lab.exercises[exercise]
    module = importlib.import_module(f"labs.support.{lab.name}.{module}")
    path = list(sys.path)
    with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()) as printed:
        os.environ["KINTSUGI_HOME"] = f"{place}/home"
        answer = lab.solution / file
        if source is not None:
            for given in lab.solution.glob("*.py"):
                (Path(place) / given.name).write_text(given.read_text())
            answer = Path(place) / file
            answer.write_text(source)
        check(exercise, getattr(module, function), answer, seed=zlib.crc32(answer.read_bytes()))
        sys.path[:] = path  # without the answer's folder
        return Judged(printed.getvalue(), record.read()["checks"])
