"""Lab 01: the solution passes, every typical wrong answer is rejected for what is wrong with it.

A wrong answer (labs/01_data_parallel/wrong/EXERCISE/*.py) holds only what it does differently; the
answer is the solution followed by it. Its docstring names the words that the hint must contain.
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
LAB = ROOT / "labs" / "01_data_parallel"
SOLUTION = LAB / "solution"
EXERCISES = {  # name of the folder in wrong/: (judge, its function, the file)
    "data_parallel": ("judge_mpi", "data_parallel", "data_parallel.py"),
    "ring": ("judge_messages", "ring", "ring.py"),
    "bucketed": ("judge_buckets", "bucketed", "bucketed.py"),
    "tree_all_reduce": ("judge_messages", "tree", "tree_all_reduce.py"),
    "crossover": ("judge_messages", "crossover", "tree_all_reduce.py"),
}
WRONG = sorted(LAB.glob("wrong/*/*.py"))


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty ledger; the lab's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(SOLUTION))
    before = set(sys.modules)
    import judge_mpi

    monkeypatch.setattr(judge_mpi, "HANG", 8.0)  # a learner's machine may be slower
    monkeypatch.setattr(checks, "TOO_LONG", 6.0)
    yield
    for name in set(sys.modules) - before:
        if str(LAB) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def judge(exercise: str, folder: Path, source: str | None = None, capsys=None) -> str:
    """What the check prints for the exercise's file in `folder`, first filled with `source`."""
    module, function, file = EXERCISES[exercise]
    if source is not None:
        for given in SOLUTION.glob("*.py"):
            (folder / given.name).write_text(given.read_text())
        (folder / file).write_text(source)
    check(exercise, getattr(importlib.import_module(module), function), folder / file)
    return capsys.readouterr().out


def solution(exercise: str) -> str:
    return (SOLUTION / EXERCISES[exercise][2]).read_text()


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes(exercise, capsys):
    out = judge(exercise, SOLUTION, capsys=capsys)
    assert out.startswith(f"[ok] {exercise}: "), out
    assert store.read()["checks"] == {exercise: True}


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_learners_copy_is_not_started(exercise, tmp_path, capsys):
    path = SOLUTION / EXERCISES[exercise][2]
    out = judge(exercise, tmp_path, labs.generated(path, ROOT), capsys)
    task = re.search(r"### BEGIN SOLUTION: (.*)", path.read_text())[1]
    if exercise == "crossover":
        task = "write down both times, set them equal and solve for n"
    assert out == f"[ ] {exercise}: not started. Your task: {task}\n"
    assert store.read()["checks"] == {}


@pytest.mark.parametrize("path", WRONG, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_wrong_answer_is_rejected_with_its_symptom(path, tmp_path, capsys):
    exercise = path.parent.name
    hint = re.search(r"^hint: (.+)$", ast.get_docstring(ast.parse(path.read_text())), re.M)[1]
    out = judge(exercise, tmp_path, solution(exercise) + "\n\n" + path.read_text(), capsys)
    assert out.startswith(f"[x] {exercise}: "), out
    assert hint in out.replace("\n    ", " "), out
    assert store.read()["checks"] == {exercise: False}


def test_each_exercise_has_wrong_answers():
    assert {path.parent.name for path in WRONG} == set(EXERCISES)
    assert len(WRONG) >= 40


# ── other right answers must pass too ─────────────────────────────────────────────────────────

OTHERS = {
    "ring: asynchronous sends": """
def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    handle = dist.isend(outgoing, (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    handle.wait()
""",
    "ring: receives first, posted early": """
def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    handle = dist.irecv(incoming, (rank - 1) % size)
    dist.send(outgoing, (rank + 1) % size)
    handle.wait()
""",
    "ring: only rank 0 receives first": """
def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        dist.recv(incoming, (rank - 1) % size)
    dist.send(outgoing, (rank + 1) % size)
    if rank > 0:
        dist.recv(incoming, (rank - 1) % size)
""",
    "ring: padded to a multiple of N": """
def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)
    padded = torch.zeros(-(-len(flat) // size) * size, dtype=flat.dtype)
    padded[: len(flat)] = flat
    parts = padded.view(size, -1)
    for step in range(size - 1):
        received = torch.empty_like(parts[0])
        exchange(parts[(rank - step) % size], received)
        parts[(rank - step - 1) % size] += received
    for step in range(size - 1):
        exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])
    flat.copy_(padded[: len(flat)])
""",
    "tree_all_reduce: recursive doubling": """
def tree_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    received, power = torch.empty_like(tensor), 2 ** int(math.log2(size))
    if rank >= power:
        dist.send(tensor, rank - power)
    elif rank + power < size:
        dist.recv(received, rank + power)
        tensor += received
    distance = 1
    while distance < power and rank < power:
        posted = dist.irecv(received, rank ^ distance)
        dist.isend(tensor, rank ^ distance).wait()
        posted.wait()
        tensor += received
        distance *= 2
    if rank >= power:
        dist.recv(tensor, rank - power)
    elif rank + power < size:
        dist.send(tensor, rank + power)
""",
    "bucketed: copies back in a callback": """
class BucketedAllReduce(BucketedAllReduce):
    def gradient_ready(self, parameter):
        index = self.bucket_of[parameter]
        self.missing[index] -= 1
        if self.missing[index] == 0:
            bucket = self.buckets[index]
            flat = torch._utils._flatten_dense_tensors([p.grad for p in bucket])
            flat /= dist.get_world_size()
            self.started.append((bucket, flat, dist.all_reduce(flat, async_op=True)))

    def wait(self):
        for bucket, flat, handle in self.started:
            handle.wait()
            grads = [p.grad for p in bucket]
            for grad, mean in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads)):
                grad.copy_(mean)
        self.started.clear()
        self.missing = [len(bucket) for bucket in self.buckets]
""",
    "data_parallel: the first ranks take the rest": """
def shard(rows, rank, size):
    each, rest = divmod(rows, size)
    first = rank * each + min(rank, rest)
    return slice(first, first + each + (rank < rest))
""",
    "data_parallel: a new array for the sum": """
def all_reduce_gradient(gradient, rows, rows_global, comm):
    total = np.empty_like(gradient)
    comm.Allreduce(gradient * rows, total, op=MPI.SUM)
    gradient[:] = total / rows_global
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_passes(name, tmp_path, capsys):
    exercise = name.split(":")[0]
    out = judge(exercise, tmp_path, solution(exercise) + "\n\n" + OTHERS[name], capsys)
    assert out.startswith(f"[ok] {exercise}: "), out


def test_the_file_is_read_afresh_for_each_check(tmp_path, capsys):
    wrong = LAB / "wrong" / "ring" / "calls_all_reduce.py"
    right = solution("ring")
    assert judge("ring", tmp_path, right + "\n\n" + wrong.read_text(), capsys).startswith("[x]")
    assert judge("ring", tmp_path, right, capsys).startswith("[ok]")
    assert judge("ring", tmp_path, right + "\n)", capsys).startswith("[x] ring: ring.py line")


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_longest_path():
    from paths import longest_path

    assert longest_path([[], []]) == 0
    assert longest_path([[("send", 1, 4)], [("recv", 0, 4)]]) == 1
    star = [[("recv", r, 4) for r in (1, 2, 3)]] + [[("send", 0, 4)]] * 3
    assert longest_path(star) == 3
    swap = [[("recv", 1, 4), ("send", 1, 4)], [("recv", 0, 4), ("send", 0, 4)]]
    assert longest_path(swap) == 2  # both receives were posted before
    with pytest.raises(ValueError, match="a receive has no send"):
        longest_path([[("recv", 1, 4)], []])


def test_the_digits_are_scikit_learns_and_the_gradient_is_right():
    import digits
    import numpy as np
    from sklearn.datasets import load_digits

    images, labels = digits.load()
    theirs = load_digits()
    assert (images * 16 == theirs.data).all() and (labels == theirs.target).all()
    parameters, step = digits.new_parameters(0), 1e-6
    loss, gradient = digits.loss_and_gradient(parameters, images[:9], labels[:9])
    assert gradient.shape == (digits.SIZE,) and loss > 0
    for place in (0, 100, 2100, 2405):
        moved = parameters + step * (np.arange(digits.SIZE) == place)
        slope = (digits.loss_and_gradient(moved, images[:9], labels[:9])[0] - loss) / step
        assert slope == pytest.approx(gradient[place], abs=1e-5)
    assert not digits.loss_and_gradient(parameters, images[:0], labels[:0])[1].any()


def test_crossing():
    from race import crossing

    sizes = [100, 200, 400]
    assert crossing(sizes, {"ring": [3, 4, 5], "tree": [1, 2, 3]}) is None
    assert crossing(sizes, {"ring": [1, 2, 3], "tree": [3, 4, 5]}) == 100
    assert 200 < crossing(sizes, {"ring": [3, 3, 3], "tree": [1, 2, 5]}) < 400
