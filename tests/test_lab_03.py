"""Lab 03: the solution passes, every typical wrong answer is rejected for what is wrong with it.

A wrong answer (labs/03_mixed_precision/wrong/EXERCISE/*.py) holds only what it does differently;
the answer is the solution followed by it. Its docstring names the words that the hint must contain.
"""

import re
import sys

import pytest

from tests.lab_cases import ROOT, Lab, fixture, hint, selected
from utils.workshop import labs

LAB = Lab(
    "03_mixed_precision",
    {
        "loss_scaler": ("judge_scaler", "scaler", "loss_scaler.py"),
        "master_weights": ("judge_master", "master_weights", "master_weights.py"),
        "stochastic": ("judge_stochastic", "stochastic", "stochastic.py"),
    },
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


@pytest.mark.parametrize("exercise", LAB.exercises)
def test_the_solution_passes(cases, exercise):
    judged = cases(exercise)
    assert judged.out.startswith(f"[ok] {exercise}: "), judged.out
    assert judged.checks == {exercise: True}


@pytest.mark.parametrize("exercise", LAB.exercises)
def test_the_learners_copy_is_not_started(cases, exercise):
    path = LAB.solution / LAB.exercises[exercise][2]
    judged = cases(exercise, labs.generated(path, ROOT))
    task = re.search(r"### BEGIN SOLUTION: (.*)", path.read_text())[1]
    assert judged.out == f"[ ] {exercise}: not started. Your task: {task}\n"
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
    assert {path.parent.name for path in LAB.wrong} == set(LAB.exercises)
    assert len(LAB.wrong) >= 30


# ── other right answers must pass too ─────────────────────────────────────────────────────────

OTHERS = {
    "loss_scaler: multiplies by the inverse, asks with a sum, flags as whole numbers": """
class LossScaler(LossScaler):
    @torch.no_grad()
    def unscale(self, parameters):
        bad = torch.zeros(1, dtype=torch.int64)
        for parameter in parameters:
            bad += (~torch.isfinite(parameter.grad)).sum()
            parameter.grad.mul_(1.0 / self.scale)
        dist.all_reduce(bad)
        return bad.item() > 0
""",
    "loss_scaler: gathers the flags": """
class LossScaler(LossScaler):
    @torch.no_grad()
    def unscale(self, parameters):
        found = torch.zeros(1)
        for parameter in parameters:
            parameter.grad /= self.scale
            found += float(not parameter.grad.sum().isfinite())
        flags = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(flags, found)
        return any(flag.item() > 0 for flag in flags)
""",
    "loss_scaler: counts down": """
class LossScaler(LossScaler):
    def update(self, overflow):
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.scale = self.scale * self.backoff_factor
        elif self.good_steps % self.growth_interval == 0:
            self.scale = self.scale * self.growth_factor
""",
    "master_weights: parameters of autograd, divided before": """
class MasterWeights(MasterWeights):
    def copies(self):
        return [torch.nn.Parameter(p.detach().clone().float()) for p in self.parameters]

    @torch.no_grad()
    def collect(self):
        for parameter, master in zip(self.parameters, self.masters):
            part = parameter.grad.float()
            master.grad = part if master.grad is None else master.grad.add_(part)
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        size = dist.get_world_size()
        flat = torch.nn.utils.parameters_to_vector([m.grad for m in self.masters]) / size
        dist.all_reduce(flat)
        torch.nn.utils.vector_to_parameters(flat, [m.grad for m in self.masters])
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.data.copy_(master.data.bfloat16())
            master.grad = None
""",
    "stochastic: by arithmetic": """
def round_stochastically(x, generator):
    low = (x.view(torch.int32) & -(2**16)).view(torch.float32)
    high = ((x.view(torch.int32) & -(2**16)) + 2**16).view(torch.float32)
    part = ((x - low) / (high - low)).nan_to_num(0.0)
    up = torch.rand(x.shape, generator=generator) < part
    return torch.where(up, high, low).bfloat16()
""",
    "stochastic: one seed for each parameter and step": """
@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(step * len(parameters) + number)
        moved = parameter.float().sub_(parameter.grad.float(), alpha=lr)
        parameter.data = round_stochastically(moved, generator)
""",
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_right_answer_passes(cases, name):
    exercise = name.split(":")[0]
    judged = cases(exercise, LAB.source(exercise) + "\n\n" + OTHERS[name])
    assert judged.out.startswith(f"[ok] {exercise}: "), judged.out


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_figures_of_the_lab_come_from_the_answer():
    import judge_scaler
    import judge_stochastic

    scales, skipped = judge_scaler.fp16_run(LAB.solution / "loss_scaler.py", steps=12)
    assert len(scales) == len(skipped) == 12 and skipped[0] and not all(skipped)
    for step in range(11):
        assert scales[step + 1] == scales[step] * (0.5 if skipped[step] else 1) or (
            not skipped[step] and scales[step + 1] == 2 * scales[step]
        )
    means = judge_stochastic.walk(LAB.solution / "stochastic.py", steps=100)
    assert means[0] == 1.0 and abs(means[-1] - 1.1) < 0.02
