"""A lab under test: what its checks print for an answer, several answers at a time.

    LAB = Lab("01_data_parallel", {"ring": ("judge_messages", "ring", "ring.py")})
    cases, place = fixtures(LAB)  # of pytest: cases(exercise, source) -> Judged

What every lab must keep to is in tests/labs/lab_tests.py. Each answer is judged in a process of its
own pool, in a folder that holds the solution's files and the answer in place of one of them. All
answers that the tests of a module will ask for are begun together: many of them are wrong in a way
that has to wait for a time limit.
"""

import ast
import importlib
import io
import multiprocessing
import os
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from utils.course import record
from utils.course.checks import check
from utils.paths import ROOT

AT_ONCE = 2  # processes that judge; each starts ranks of its own
SECONDS = 120  # for one answer, waiting for its turn not included


@dataclass(frozen=True)
class Lab:
    """name: its folder in labs/; exercises: {name of the folder in wrong/: (module in labs/support/
    that has the check, its function, the answer's file)}; limits: {"module.NAME": seconds}, time
    limits for these tests."""

    name: str
    exercises: dict
    limits: dict = field(default_factory=dict)

    @property
    def folder(self):
        return ROOT / "labs" / self.name

    @property
    def support(self):
        """The package with its checks."""
        return f"labs.support.{self.name[3:]}"

    @property
    def solution(self):
        return self.folder / "solution"

    @property
    def wrong(self):
        return sorted(self.folder.glob("wrong/*/*.py"))

    def source(self, exercise):
        """The solution's file of an exercise, as text."""
        return (self.solution / self.exercises[exercise][2]).read_text()

    def with_wrong(self, path):
        """(exercise, source): the solution followed by what a wrong answer does differently."""
        exercise = path.parent.name
        return exercise, self.source(exercise) + "\n\n" + path.read_text()


@dataclass(frozen=True)
class Judged:
    """out: what the check printed; checks: what it remembered for the progress report."""

    out: str
    checks: dict


def hint(path):
    """The words that the check must print for a wrong answer: "hint: …" in its docstring."""
    return re.search(r"^hint: (.+)$", ast.get_docstring(ast.parse(path.read_text())), re.M)[1]


def fixtures(lab):
    """Two fixtures: `cases` and, used by every test of the module, `place`.

    cases(exercise, source) -> Judged, source None for the solution itself;
    cases.begin([(exercise, source), …]) starts to judge several.
    place: the lab's own modules can be imported, and are forgotten afterwards.
    """

    @pytest.fixture(scope="module")
    def cases():
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(AT_ONCE, context, _prepare, (lab,)) as pool:
            yield _Cases(lab, pool)
            pool.shutdown(cancel_futures=True)

    @pytest.fixture(autouse=True)
    def place(monkeypatch):
        monkeypatch.syspath_prepend(str(lab.solution))
        yield
        for name, module in list(sys.modules.items()):
            if str(lab.folder) in str(getattr(module, "__file__", "")):
                del sys.modules[name]

    return cases, place


def selected(request, name):
    """The values of the parameter `name` in the tests of this module that will run."""
    found = [
        item.callspec.params[name]
        for item in request.session.items  # a notebook's cells have no module
        if getattr(item, "module", None) is request.module
        and name in getattr(getattr(item, "callspec", None), "params", {})
    ]
    return list(dict.fromkeys(found))


class _Cases:
    def __init__(self, lab, pool):
        self.lab, self.pool, self.begun = lab, pool, {}

    def begin(self, cases):
        for exercise, source in cases:
            if (exercise, source) not in self.begun:
                self.begun[exercise, source] = self.pool.submit(_judge, self.lab, exercise, source)

    def __call__(self, exercise, source=None):
        self.begin([(exercise, source)])
        return self.begun[exercise, source].result(SECONDS * (1 + len(self.begun) // AT_ONCE))


def _prepare(lab):
    """In a new process: the lab's modules can be imported, and wait as long as the tests say."""
    sys.path.insert(0, str(lab.solution))
    for place, seconds in lab.limits.items():
        module, name = place.rsplit(".", 1)
        setattr(importlib.import_module(module), name, seconds)


def _judge(lab, exercise, source):
    module, function, file = lab.exercises[exercise]
    judge = getattr(importlib.import_module(f"{lab.support}.{module}"), function)
    with tempfile.TemporaryDirectory() as place, redirect_stdout(io.StringIO()) as printed:
        os.environ["KINTSUGI_HOME"] = f"{place}/home"
        answer = lab.solution / file
        if source is not None:
            for given in lab.solution.glob("*.py"):
                (Path(place) / given.name).write_text(given.read_text())
            answer = Path(place) / file
            answer.write_text(source)
        check(exercise, judge, answer)
        return Judged(printed.getvalue(), record.read()["checks"])
