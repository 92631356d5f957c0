"""Lab 05: the solution passes, every typical wrong answer is rejected for what is wrong with it.

As in lab 01, a wrong answer (labs/05_sharded_data_parallel/wrong/EXERCISE/*.py) holds only what it
does differently, and its docstring names the words that the hint must contain.
"""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

from utils import checks, store
from utils.checks import check
from utils.workshop import labs

ROOT = Path(__file__).resolve().parents[1]
LAB = ROOT / "labs" / "05_sharded_data_parallel"
SOLUTION = LAB / "solution"
EXERCISES = ("zero1", "zero2", "zero3")
WRONG = sorted(LAB.glob("wrong/*/*.py"))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty ledger; the lab's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(SOLUTION))
    before = set(sys.modules)
    monkeypatch.setattr(checks, "HANG", 6.0)
    yield
    for name in set(sys.modules) - before:
        if str(LAB) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def judge(exercise: str, folder: Path, source: str | None, capsys) -> str:
    """What the check prints for zero.py in `folder`, first filled with `source`."""
    if source is not None:
        for given in SOLUTION.glob("*.py"):
            (folder / given.name).write_text(given.read_text())
        (folder / "zero.py").write_text(source)
    check(exercise, getattr(importlib.import_module("judge_zero"), exercise), folder / "zero.py")
    return capsys.readouterr().out


def solution() -> str:
    return (SOLUTION / "zero.py").read_text()


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes(exercise, capsys):
    out = judge(exercise, SOLUTION, None, capsys)
    assert out.startswith(f"[ok] {exercise}: "), out
    assert store.read()["checks"] == {exercise: True}


def test_the_learners_copy_is_not_started(tmp_path, capsys):
    path = SOLUTION / "zero.py"
    task = re.search(r"### BEGIN SOLUTION: (.*)", path.read_text())[1]
    out = judge("zero1", tmp_path, labs.generated(path, ROOT), capsys)
    assert out == f"[ ] zero1: not started. Your task: {task}\n"
    assert store.read()["checks"] == {}


@pytest.mark.parametrize("path", WRONG, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_wrong_answer_is_rejected_with_its_symptom(path, tmp_path, capsys):
    exercise = path.parent.name
    hint = re.search(r"^hint: (.+)$", ast.get_docstring(ast.parse(path.read_text())), re.M)[1]
    out = judge(exercise, tmp_path, solution() + "\n\n" + path.read_text(), capsys)
    assert out.startswith(f"[x] {exercise}: "), out
    assert hint in out.replace("\n    ", " "), out
    assert store.read()["checks"] == {exercise: False}


def test_each_exercise_has_wrong_answers():
    assert {path.parent.name for path in WRONG} == set(EXERCISES)
    assert len(WRONG) >= 25


OTHERS = {
    "zero1: all-to-all and a sum": """
class Zero1(Zero1):
    def mean_gradient(self, unit):
        mine = unit.gradients()
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine) if self.size > 1 else theirs.copy_(mine)
        return theirs.view(self.size, -1).mean(dim=0)
""",
    "zero1: all units in one message": """
class Zero1(Zero1):
    def step(self):
        rows = torch.cat([u.gradients().view(self.size, -1) for u in self.units], dim=1)
        mine = torch.empty_like(rows[0])
        dist.reduce_scatter(mine, list(rows.contiguous()))
        pieces = (mine / self.size).split([unit.length for unit in self.units])
        for unit, piece in zip(self.units, pieces):
            unit.shard.grad = piece.clone()
            unit.forget_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for unit in self.units:
            self.gather(unit)
""",
    "zero2: adds in place": """
class Zero2(Zero2):
    def after_backward(self, unit):
        if unit.shard.grad is None:
            unit.shard.grad = torch.zeros_like(unit.shard)
        unit.shard.grad += self.mean_gradient(unit)
        for parameter in unit.parameters:
            parameter.grad = None
""",
    "zero3: does not gather what is there": """
class Zero3(Zero3):
    def before_forward(self, unit):
        if not unit.is_whole():
            unit.allocate()
            self.gather(unit)

    before_backward = before_forward
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_passes(name, tmp_path, capsys):
    exercise = name.split(":")[0]
    out = judge(exercise, tmp_path, solution() + "\n\n" + OTHERS[name], capsys)
    assert out.startswith(f"[ok] {exercise}: "), out


def test_the_formula_is_what_is_measured():
    from measured import KINDS, formula, measured

    kept, expected = measured(2, SOLUTION / "zero.py"), formula(2)
    for stage, by_kind in expected.items():
        for kind in KINDS:
            assert kept[stage][kind] == pytest.approx(by_kind[kind], rel=0.01), (stage, kind)
    assert [round(kept[stage]["sent"] / 4 / 0.5, 2) for stage in expected] == [2, 2, 3]
