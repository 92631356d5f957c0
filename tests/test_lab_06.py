"""Lab 06: the solution passes, every typical wrong answer is rejected for what is wrong with it.

A wrong answer (labs/06_tensor_parallel/wrong/EXERCISE/*.py) holds only what it does differently;
the answer is the solution followed by it. Its docstring names the words that the hint must contain.
"""

import re
import sys

import pytest

from tests.lab_cases import ROOT, Lab, fixture, hint, selected
from utils.workshop import labs

EXERCISES = ("pair", "mlp", "attention", "loss")
LAB = Lab(
    "06_tensor_parallel",
    {name: ("judge_megatron", name, "megatron.py") for name in EXERCISES},
    {"utils.checks.HANG": 20.0},  # none of the answers hangs; a busy machine must not look so
)
cases = fixture(LAB)


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """The lab's own modules can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(str(LAB.solution))
    yield
    for name, module in list(sys.modules.items()):
        if str(LAB.folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("exercise", EXERCISES)
def test_the_solution_passes(cases, exercise):
    judged = cases(exercise)
    assert judged.out.startswith(f"[ok] {exercise}: "), judged.out
    assert judged.checks == {exercise: True}


def test_the_learners_copy_is_not_started(cases):
    path = LAB.solution / "megatron.py"
    judged = cases("pair", labs.generated(path, ROOT))
    task = re.search(r"### BEGIN SOLUTION: (.*)", path.read_text())[1]
    assert judged.out == f"[ ] pair: not started. Your task: {task}\n"
    assert judged.checks == {}


@pytest.mark.parametrize("path", LAB.wrong, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_wrong_answer_is_rejected_with_its_symptom(cases, path, request):
    cases.begin(LAB.with_wrong(other) for other in selected(request, "path"))
    exercise, source = LAB.with_wrong(path)
    judged = cases(exercise, source)
    assert judged.out.startswith(f"[x] {exercise}: "), judged.out
    assert hint(path) in judged.out.replace("\n    ", " "), judged.out
    assert judged.checks == {exercise: False}


def test_each_exercise_has_wrong_answers():
    assert {path.parent.name for path in LAB.wrong} == set(EXERCISES)
    assert len(LAB.wrong) >= 25


# ── other right answers must pass too ─────────────────────────────────────────────────────────

OTHERS = {
    "pair: an empty tensor, filled": """
class Leave(Leave):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)
        dist.all_reduce(y, op=dist.ReduceOp.SUM)
        return y
""",
    "mlp: gate and up in one product": """
class ParallelMLP(ParallelMLP):
    def forward(self, x):
        both = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        biases = torch.cat((self.gate_proj.bias, self.up_proj.bias))
        gate, up = F.linear(Enter.apply(x), both, biases).chunk(2, dim=-1)
        return Leave.apply(F.linear(F.silu(gate) * up, self.down_proj.weight)) + self.down_proj.bias
""",
    "attention: lists instead of tuples": """
def head_sizes(heads, kv_heads, head_size):
    keys = [n * head_size for n in shares(kv_heads, dist.get_world_size())]
    return [n * (heads // kv_heads) for n in keys], keys
""",
    "loss: three messages": """
def vocabulary_loss(logits, targets, sizes):
    first = sum(sizes[: dist.get_rank()])
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    words = torch.arange(first, first + logits.shape[-1])
    target = Leave.apply((logits * (targets[..., None] == words)).sum(dim=-1))
    total = Leave.apply((logits - largest[..., None]).exp().sum(dim=-1))
    return (largest + total.log() - target).mean()
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_passes(cases, name):
    exercise = name.split(":")[0]
    judged = cases(exercise, LAB.source(exercise) + "\n\n" + OTHERS[name])
    assert judged.out.startswith(f"[ok] {exercise}: "), judged.out


def test_the_lesson_of_the_last_cells():
    from measured import CONFIG, measured

    runs = {size: measured(size, LAB.solution / "megatron.py") for size in (1, 2, 3)}
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs[1]["losses"], abs=1e-4)
        assert run["others"] == 0 and run["calls"] == 4 * CONFIG.layers
    assert runs[3]["matrices"] * 3 == runs[1]["matrices"]  # 6 heads, 3 key-value heads, 132 columns
