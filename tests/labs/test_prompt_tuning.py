"""Lab 14: the answers that its checks must accept and reject, and its pieces."""

import re

import pytest
import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.expect import close
from utils.course.trial import Trial
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
    {"utils.course.trial.HANG": 20.0},  # none of the answers hangs; a busy machine must not look so
)

OTHERS = {
    "forward: the model's own forward, with another embedding": """
class Both(torch.nn.Module):
    def __init__(self, words, prompt):
        super().__init__()
        self.words, self.prompt = words, prompt

    def forward(self, tokens):
        x = self.words(tokens)
        return torch.cat((self.prompt.repeat(len(x), 1, 1), x), dim=1)


def forward(model, prompt, tokens):
    words = model.model.embed_tokens
    model.model.embed_tokens = Both(words, prompt)
    try:
        return model(tokens)[:, len(prompt) :]
    finally:
        model.model.embed_tokens = words


def answer_loss(logits, targets):
    counts = targets != IGNORED
    logits = logits if logits.dtype == torch.float64 else logits.float()
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
    "forward: a row at a time, and a list of two": """
def batch(pairs, end):
    T = max(len(q) + len(a) for q, a in pairs)
    tokens = [(list(q) + list(a) + [end] * T)[:T] for q, a in pairs]
    targets = []
    for question, answer in pairs:
        row = (len(question) - 1) * [IGNORED] + answer + [end]
        targets.append(row + [IGNORED] * (T - len(row)))
    return [torch.tensor(tokens), torch.tensor(targets)]


def forward(model, prompt, tokens):
    rows = []
    for row in tokens:
        x = torch.cat((prompt, model.model.embed_tokens(row)))[None]
        rows.append(decode(model, x)[0, -len(row) :])
    return torch.stack(rows)
""",
    "forward: the loss by hand": """
def answer_loss(logits, targets):
    wide = logits.double()
    counts = targets != IGNORED
    target = targets.where(counts, 0)[..., None]
    losses = wide.logsumexp(-1) - wide.gather(-1, target)[..., 0]
    kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return ((losses * counts).sum() / counts.sum()).to(kind)
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
    return float(loss.detach())


def tune(model, words, batches):
    prompt, optimizer = begin(model, words, lr=0.2)
    for i, (tokens, targets) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.2 * (1 - i / len(batches))
        step(model, prompt, optimizer, tokens, targets)
    return prompt
""",
    "tune: a backward pass that stops at the prompt": """
def begin(model, words, lr):
    weight = model.model.embed_tokens.weight
    prompt = torch.tensor(weight[words].tolist(), dtype=weight.dtype, requires_grad=True)
    return [prompt, torch.optim.AdamW([prompt], lr=lr, weight_decay=0.0)]


def step(model, prompt, optimizer, tokens, targets):
    prompt.grad = None
    loss = answer_loss(forward(model, prompt, tokens), targets)
    loss.backward(inputs=[prompt])
    optimizer.step()
    return loss.detach()
""",
    "tune: frozen for the step only": """
import numpy as np


def begin(model, words, lr):
    prompt = torch.nn.Parameter(model.model.embed_tokens.weight.index_select(0, words).detach())
    return prompt, torch.optim.Adam(params=iter([prompt]), lr=lr, foreach=False)


def step(model, prompt, optimizer, tokens, targets):
    wanted = [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    loss = answer_loss(forward(model, prompt, tokens), targets)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    for p, want in zip(model.parameters(), wanted):
        p.requires_grad_(want)
    return np.float64(loss.item())


def tune(model, words, batches):
    prompt, optimizer = begin(model, words, 0.1)
    steps = iter(batches)
    for _ in range(len(batches)):
        step(model, prompt, optimizer, *next(steps))
    return prompt
""",
    "tune: a scheduler": """
def tune(model, words, batches):
    prompt, optimizer = begin(model, words, lr=0.25)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, total_iters=len(batches))
    for tokens, targets in list(batches):
        step(model, prompt, optimizer, tokens, targets)
        schedule.step()
    return prompt.data.clone()
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
    "together: one table of all prompts and words": """
def together(model, prompts, task, tokens):
    T, words = tokens.shape[1], model.model.embed_tokens(tokens)
    table = torch.cat([*prompts, words.flatten(0, 1)])
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0)
    lengths = torch.tensor([len(prompts[t]) for t in task])
    L = int(lengths.max()) + T
    first = torch.tensor([int(ends[t]) - len(prompts[t]) for t in task])
    place = torch.arange(L).expand(len(task), L)
    start = int(ends[-1]) + torch.arange(len(task))[:, None] * T
    own = torch.where(place < lengths[:, None], first[:, None] + place,
                      start + (place - lengths[:, None]).clamp(max=T - 1))
    logits = decode(model, table[own])
    return logits[torch.arange(len(task))[:, None], lengths[:, None] + torch.arange(T)]
""",
    "together: cut first, the last matrix afterwards": """
def together(model, prompts, task, tokens):
    rows = [torch.cat((prompts[t], x)) for t, x in zip(task, model.model.embed_tokens(tokens))]
    longest = max(map(len, rows))
    x = torch.stack([F.pad(row, (0, 0, 0, longest - len(row)), value=0.5) for row in rows])
    cos, sin = rotary_tables(model.config, torch.arange(longest), x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    T = tokens.shape[1]
    kept = [y[len(row) - T : len(row)] for y, row in zip(x, rows)]
    return model.lm_head(model.model.norm(torch.stack(kept)))
""",
    "together: the rows with short prompts last": """
_together = together


def together(model, prompts, task, tokens):
    lengths = torch.tensor([len(prompts[t]) for t in task.tolist()])
    order = lengths.argsort(descending=True)
    logits = _together(model, tuple(prompts), task[order], tokens[order])
    return logits[order.argsort()]
""",
    "ranks: one message for everything": """
def backward(model, prompt, tokens, targets, mesh):
    logits = forward(model, prompt, tokens)
    loss = loss_function(model)(logits, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, [prompt])
    wide = torch.promote_types(gradient.dtype, torch.float32)
    count = (targets != IGNORED).sum().to(wide)
    message = torch.cat((gradient.flatten().to(wide), loss.detach()[None].to(wide), count[None]))
    if mesh.dp.size > 1:
        dist.all_reduce(message, group=mesh.dp.group)
    prompt.grad = (message[:-2] / message[-1]).view_as(prompt).to(prompt.dtype)
    return (message[-2] / message[-1]).item()
""",
    "ranks: asynchronous, waited for": """
def backward(model, prompt, tokens, targets, mesh):
    total, work = (targets != IGNORED).sum(), []

    def add_up(tensor):
        if mesh.dp.group is not None:
            work.append(dist.all_reduce(tensor, group=mesh.dp.group, async_op=True))

    add_up(total)
    logits = forward(model, prompt, tokens)
    [one.wait() for one in work]
    loss = loss_function(model)(logits, targets, reduction="sum") / total
    loss.backward()
    loss = loss.detach().double()
    work.clear()
    add_up(prompt.grad)
    add_up(loss)
    [one.wait() for one in work]
    return loss
""",
    "ranks: number and loss together, divided at last": """
def backward(model, prompt, tokens, targets, mesh):
    losses = loss_function(model)(forward(model, prompt, tokens), targets, reduction="none")
    losses.sum().backward(inputs=[prompt])
    both = torch.stack((losses.detach().double().sum(), (targets != IGNORED).sum().double()))
    gradient = prompt.grad.to(torch.promote_types(prompt.dtype, torch.float32))
    if len(mesh.dp.ranks) > 1:
        dist.all_reduce(both, dist.ReduceOp.SUM, mesh.dp.group)
        dist.all_reduce(gradient, group=mesh.dp.group)
    prompt.grad = (gradient / both[1]).to(prompt.dtype)
    return float(both[0] / both[1])
""",
    "ranks: the number counted in whole numbers, a new gradient": """
def backward(model, prompt, tokens, targets, mesh):
    total = targets.ne(IGNORED).sum()
    if mesh.dp.size > 1:
        dist.all_reduce(total, group=mesh.dp.group)
    leaf = prompt.detach().clone().requires_grad_()
    loss = loss_function(model)(forward(model, leaf, tokens), targets, reduction="sum") / total
    loss.backward()
    prompt.grad, loss = leaf.grad, loss.detach()
    for tensor in (prompt.grad, loss) if mesh.dp.size > 1 else ():
        dist.all_reduce(tensor, group=mesh.dp.group)
    return loss.numpy()
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 100, (12, 6, 4)

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

    trial = Trial("prompting.py", 1)
    for dtype in reference.TYPES[:2]:
        case = reference.draw_case(trial, dtype)
        model, prompt, (tokens, targets) = case.model(), case.prompt(), case.rows()
        ended = padded([(question, [*answer, case.end]) for question, answer in case.pairs()])
        assert targets.equal(ended[1]) and tokens[targets >= 0].equal(ended[0][targets >= 0])
        right = reference.Spelled(model, prompt).logits(tokens)
        with prompted(model, prompt), torch.no_grad():
            logits = model(tokens)[:, len(prompt) :]
        close("here", "logits", logits, right, slack=reference.near(dtype))


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
