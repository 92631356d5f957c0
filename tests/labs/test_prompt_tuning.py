"""Lab 14: the answers that its checks must accept and reject, and its pieces."""

import re

import pytest
import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.paths import ROOT
from utils.workshop import labs

LAB = Lab(
    "14_prompt_tuning",
    {
        "forward": ("check_forward", "forward", "prompting.py"),
        "tune": ("check_tune", "tuning", "prompting.py"),
        "together": ("check_together", "together", "prompting.py"),
        "ranks": ("check_ranks", "ranks", "prompting.py"),
    },
    {
        "utils.course.checks.HANG": 20.0
    },  # none of the answers hangs; a busy machine must not look so
)

OTHERS = {
    "forward: the model's own forward, with another embedding": """
from utils.prompts import prompted


def forward(model, prompt, tokens):
    with prompted(model, prompt):
        return model(tokens)[:, len(prompt) :]


def answer_loss(logits, targets):
    counts = targets != IGNORED
    losses = F.cross_entropy(logits.mT, targets, reduction="none")
    return losses[counts].mean()
""",
    "forward: positions that begin elsewhere, as only their distances matter": """
def decode(model, x):
    positions = torch.arange(-3, x.shape[1] - 3)
    cos, sin = rotary_tables(model.config, positions, x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    return F.linear(model.model.norm(x), model.lm_head.weight)
""",
    "tune: gradients asked for by name, zeroed by hand, another order": """
def begin(model, words, lr):
    with torch.no_grad():
        prompt = model.model.embed_tokens(words).requires_grad_()
    return prompt, torch.optim.Adam([{"params": [prompt]}], lr)


def step(model, prompt, optimizer, tokens, targets):
    loss = answer_loss(forward(model, prompt, tokens), targets)
    (prompt.grad,) = torch.autograd.grad(loss, [prompt])
    optimizer.step()
    prompt.grad = None
    return float(loss)


def tune(model, words, batches):
    prompt, optimizer = begin(model, words, lr=0.2)
    for i, (tokens, targets) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - i / len(batches))
        step(model, prompt, optimizer, tokens, targets)
    return prompt
""",
    "together: each row at its own place in a tensor of zeros": """
def together(model, prompts, task, tokens):
    T, words = tokens.shape[1], model.model.embed_tokens(tokens)
    x = words.new_zeros(len(words), max(map(len, prompts)) + T, words.shape[2])
    starts = torch.tensor([len(prompts[number]) for number in task])
    for b, (number, start) in enumerate(zip(task, starts)):
        x[b, :start] = prompts[number]
        x[b, start : start + T] = words[b]
    places = starts[:, None] + torch.arange(T)
    logits = decode(model, x)
    return logits.gather(1, places[..., None].expand(-1, -1, logits.shape[-1]))
""",
    "ranks: one message for everything": """
def backward(model, prompt, tokens, targets, mesh):
    logits = forward(model, prompt, tokens)
    loss = loss_function(model)(logits, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, [prompt])
    count = (targets != IGNORED).sum().to(gradient)
    message = torch.cat((gradient.flatten(), loss.detach()[None].to(gradient), count[None]))
    if mesh.dp.size > 1:
        dist.all_reduce(message, group=mesh.dp.group)
    prompt.grad = (message[:-2] / message[-1]).view_as(prompt)
    return (message[-2] / message[-1]).item()
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 60

    def task(self, exercise, tasks):
        path = self.lab.solution / self.lab.exercises[exercise][2]
        first = {"forward": "batch", "tune": "begin", "together": "together", "ranks": "backward"}
        after = path.read_text().split(f"\ndef {first[exercise]}(")[1]
        return re.search(r"### BEGIN SOLUTION: (.*)", after)[1]


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_reference_is_the_library():
    """What the checks hold for right is what utils/prompts/tuning.py computes."""
    from labs.support.prompt_tuning import reference
    from utils.prompts import prompted
    from utils.prompts.data import padded

    model, pairs = reference.random_model(), reference.random_pairs(5, seed=1)
    prompt = reference.random_prompt(4, seed=2)
    tokens, targets = reference.right_batch(pairs)
    ended = padded([(question, [*answer, reference.END]) for question, answer in pairs])
    assert tokens.equal(ended[0]) and targets.equal(ended[1])
    right = reference.Spelled(model, prompt).logits(tokens)
    with prompted(model, prompt):
        assert torch.allclose(model(tokens)[:, 4:], right, atol=1e-9)


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    from labs.support.prompt_tuning.measurements import cost, two_tasks

    path = tmp_path / "prompting.py"
    path.write_text(labs.generated(LAB.solution / "prompting.py", ROOT))
    assert cost(str(path)) is None and two_tasks(str(path)) is None


def test_the_lesson_of_the_last_cells():
    from labs.support.prompt_tuning import tasks
    from labs.support.prompt_tuning.measurements import cost, two_tasks

    file = str(LAB.solution / "prompting.py")
    found = cost(file)
    assert found["state"] == 2 * 4 * found["tuned"] < found["whole state"] / 200
    for part in two_tasks(file).values():
        assert part["in one batch"] == pytest.approx(part["alone"], abs=1.5 / tasks.TO_MEASURE)
        assert part["alone"] > 0.8 and part["other prompt"] < 0.2 and part["without"] < 0.2
