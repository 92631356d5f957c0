"""Given: what the check cell of exercise d looks at: the loss, the budget, and what comes of it.

A teacher is drawn that speaks a language of its own, and a student without half of its heads. Both
are known exactly, so what the student has lost is, too: the KL divergence of its predictions from
the teacher's, on text that nobody has seen. It has to shrink about as much as in the worked answer.
"""

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from labs.support.compression import drawn
from labs.support.compression.seen import during, left_alone, no_hooks
from utils.course.assertions import Wrong, close, described, not_called, unchanged
from utils.course.observe import Look
from utils.course.runner import Trial, fractions
from utils.models.gpt import GPT, Block, cross_entropy

LIBRARY = ("utils.compression", "transformers", "kl_div_distill", "torchtune")
PLACES = ("utils/compression/",)
ROWS, T, STEPS, HELD_OUT = 8, 16, 40, 64
MARGIN = 1.2  # of what the worked answer leaves of the loss
SECONDS = 60.0


def distillation(trial: Trial) -> str:
    """Judges `distillation_loss` and `distill`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:  # nothing here depends on a number of ranks
        group.run("distillation_loss", _losses, _cases(trial))
        seeds = [trial.new_seed() for _ in range(2)]
        group.run("distill", _students, seeds, seconds=SECONDS)
    return (
        "the loss is right, and its gradient goes to the student alone, in fp64, fp32 and bf16,\n"
        "for any temperature and share, for large logits too. Two students of teachers drawn from\n"
        f"the seed come within {MARGIN - 1:.0%} of what the worked answer reaches, in its budget; "
        "the\nteacher is as it was, and nothing is kept."
    )


# ---- the loss


def _cases(trial: Trial) -> list[dict]:
    draw, cases = trial.draw, []
    for dtype, large in (
        (torch.float64, 1.0), (torch.float32, 2.0), (torch.bfloat16, 2.0), (torch.float32, 1e4),
        (torch.float64, 3.0),
    ):
        shape = draw.randrange(1, 5), draw.randrange(2, 9), draw.randrange(5, 40)
        temperature = draw.choice((1.0, 2.0, draw.uniform(0.5, 6)))
        share = draw.choice((0.0, 1.0, 0.5, draw.random()))
        if len(cases) in (0, 4):
            temperature, share = draw.uniform(1.5, 5), draw.uniform(0.3, 0.8)
        cases.append({
            "what": f"logits {shape} of {dtype}, about {large:g}, temperature {temperature:.3g}, "
            f"share {share:.2f}",
            "shape": shape, "dtype": dtype, "large": large, "temperature": temperature,
            "share": share, "seed": trial.new_seed(),
        })
    return cases


def _losses(answer, cases: list[dict]) -> None:
    for case in cases:
        what = case["what"]
        student, teacher = (
            (case["large"] * fractions(case["seed"] + i, *case["shape"])).to(case["dtype"])
            for i in (0, 1)
        )
        targets = (fractions(case["seed"] + 2, *case["shape"][:2]) * 1e6).long().abs()
        targets = targets % case["shape"][2]
        student.requires_grad_()
        teacher.requires_grad_()
        options = {"temperature": case["temperature"], "share": case["share"]}
        with during(what), Look(student=student, teacher=teacher, targets=targets) as look:
            loss = answer.distillation_loss(student, teacher, targets, **options)
        unchanged(what, look.changed())
        if not isinstance(loss, torch.Tensor) or loss.shape != ():
            raise Wrong(f"{what}: the loss is {described(loss)}, not a tensor of one number.")
        least = torch.promote_types(case["dtype"], torch.float32)
        s = student.detach().double().requires_grad_()
        right = _reckoned(s, teacher.detach().double(), targets, **options)
        hint = _symptom(loss, s, teacher.detach().double(), targets, **options)
        close(what, "the loss", loss, right, hint=hint, dtype=least, slack=256)
        if not loss.requires_grad:
            raise Wrong(f"{what}: no gradient comes back to the student's logits.")
        mine, others = torch.autograd.grad(loss, [student, teacher], allow_unused=True)
        if others is not None and others.any():
            raise Wrong(f"{what}: the teacher's logits get a gradient: .detach(), or no_grad.")
        (wanted,) = torch.autograd.grad(right, [s])
        close(what, "the gradient of the student's logits", mine, wanted, slack=256)
        del loss, mine, others
        if kept := look.kept():
            raise Wrong(f"{what}: after the call {kept:,} bytes that it made are still held.")


def _reckoned(student, teacher, targets, temperature: float, share: float) -> torch.Tensor:
    soft, of_student = ((x / temperature).log_softmax(dim=-1) for x in (teacher, student))
    kl = (soft.exp() * (soft - of_student)).sum(dim=-1).mean()
    return share * temperature**2 * kl + (1 - share) * cross_entropy(student, targets)


def _symptom(loss, student, teacher, targets, temperature: float, share: float) -> str:
    """What typical mistakes would give."""

    def kl(a, b, t):
        a, b = ((x / t).log_softmax(dim=-1) for x in (a, b))
        return (a.exp() * (a - b)).sum(dim=-1).mean()

    hard, tau = cross_entropy(student, targets), temperature
    soft = kl(teacher, student, tau)
    reverse = share * tau**2 * kl(student, teacher, tau) + (1 - share) * hard
    softened = share * tau**2 * soft + (1 - share) * cross_entropy(student / tau, targets)
    found = {
        "The factor τ² is missing.": share * soft + (1 - share) * hard,
        "KL(teacher ‖ student) is not KL(student ‖ teacher): whose probabilities weigh?": reverse,
        "share belongs to KL, 1 - share to the cross entropy.": _reckoned(
            student, teacher, targets, temperature, 1 - share),
        "The cross entropy is of the logits as they are, not divided by τ.": softened,
        "KL is a mean over tokens, not over all numbers.":
            share * tau**2 * soft / student.shape[-1] + (1 - share) * hard,
        "KL is a mean over tokens, not over rows.":
            share * tau**2 * soft * student.shape[1] + (1 - share) * hard,
    }
    for words, value in found.items():
        if torch.isclose(loss.detach().double(), value.detach(), rtol=1e-3, atol=0):
            return words
    return "share · τ² · KL + (1 − share) · cross entropy, each the mean over tokens."


# ---- distill


class Batches:
    """Text of the teacher, in batches that are handed out once. drawn: how many were."""

    def __init__(self, words: torch.Tensor):
        self.rows, self.drawn, self.begun = words.split(ROWS), 0, False

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.begun:
            raise Wrong("distill goes through the batches twice, and the budget is once.")
        self.begun = True
        for row in self.rows:
            self.drawn += 1
            yield row[:, :-1].clone(), row[:, 1:].clone()


@contextlib.contextmanager
def _counted(teacher: GPT) -> Iterator[dict]:
    """Positions that the blocks of the teacher and all others compute, a layer's on the average,
    and whether the teacher's pass makes a graph."""
    seen = {"teacher": 0.0, "student": 0.0, "graph": False}
    blocks = list(teacher.model.layers)

    def saw(module: nn.Module, given: tuple, output: torch.Tensor) -> None:
        if isinstance(module, Block):
            its = any(module is block for block in blocks)
            seen["teacher" if its else "student"] += output[..., 0].numel() / len(blocks)
            seen["graph"] |= its and output.requires_grad

    hook = register_module_forward_hook(saw)
    try:
        yield seen
    finally:
        hook.remove()


def _students(answer, seeds: list[int]) -> None:
    for number, seed in enumerate(seeds, start=1):
        what = f"student {number} of {len(seeds)}"
        generator = torch.Generator().manual_seed(seed)
        teacher = drawn.speaker(generator)
        words = drawn.spoken(teacher, ROWS * STEPS + HELD_OUT, T, generator)
        heads = _half_of_the_heads(teacher, generator)
        student = drawn.without_heads(teacher, heads)
        unseen = words[ROWS * STEPS :, :-1]
        lost = _lost(teacher, student, unseen)
        least = _lost(teacher, _worked(teacher, student, words[: ROWS * STEPS]), unseen)
        _few_steps(answer, what, teacher, student, words[: 3 * ROWS])
        _all_steps(answer, what, teacher, student, words[: ROWS * STEPS])
        found = _lost(teacher, student, unseen)
        if not found <= MARGIN * least:
            raise Wrong(
                f"{what}: its predictions are {found:.3f} nats a token away from the teacher's; it "
                f"began at {lost:.3f}, and the worked\nanswer comes to {least:.3f} in as many "
                f"steps ({MARGIN * least:.3f} is asked for). Does it learn from the whole "
                "distribution? Are the steps\nlarge enough, and small at the end?"
            )


def _half_of_the_heads(teacher: GPT, generator: torch.Generator) -> list[list[int]]:
    """For each layer, those that stay."""
    H = teacher.config.heads
    return [torch.randperm(H, generator=generator)[: H // 2].tolist() for _ in teacher.model.layers]


@torch.no_grad()
def _lost(teacher: GPT, student: GPT, tokens: torch.Tensor) -> float:
    """KL(teacher ‖ student) in nats a token."""
    right, mine = teacher(tokens).log_softmax(dim=-1), student(tokens).log_softmax(dim=-1)
    return (right.exp() * (right - mine)).sum(dim=-1).mean().item()


def _worked(teacher: GPT, student: GPT, words: torch.Tensor) -> GPT:
    """What can be reached: forty steps of Adam, from all that the teacher says."""
    student, lr, batches = copy.deepcopy(student), 1e-2, words.split(ROWS)
    optimizer = torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0)
    for step, rows in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / len(batches))
        tokens, targets = rows[:, :-1], rows[:, 1:]
        with torch.no_grad():
            said = teacher(tokens)
        optimizer.zero_grad()
        _reckoned(student(tokens), said, targets, 2.0, 0.9).backward()
        optimizer.step()
    return student


def _few_steps(answer, what: str, teacher: GPT, student: GPT, words: torch.Tensor) -> None:
    """What is changed and kept, with three batches and a student that nobody needs."""
    what, student = f"{what}, three batches", copy.deepcopy(student)
    batches, before = Batches(words), dict(student.named_parameters())
    alone = left_alone(what, teacher, "the teacher")
    with alone, not_called(*PLACES), during(what), Look() as look:
        result = answer.distill(teacher, student, batches)
    if result is not student:
        raise Wrong(f"{what}: distill returns {described(result)[:80]}, not the student given.")
    no_hooks(what, student)
    for name, parameter in student.named_parameters():
        if parameter is not before.get(name):
            raise Wrong(f"{what}: {name} of the student is another parameter than before.")
        if not parameter.isfinite().all():
            raise Wrong(f"{what}: {name} of the student is not finite.")
    own = [(p, p.grad) for p in student.parameters()]
    if kept := look.kept([t for pair in own for t in pair if t is not None]):
        raise Wrong(
            f"{what}: when it is over, {kept:,} bytes that it made are still held, besides the "
            "student.\nWho remembers them, and what for?"
        )


def _all_steps(answer, what: str, teacher: GPT, student: GPT, words: torch.Tensor) -> None:
    batches, budget = Batches(words), words[:, :-1].numel()
    with left_alone(what, teacher, "the teacher"), during(what), _counted(teacher) as seen:
        answer.distill(teacher, student, batches)
    if batches.drawn != len(batches):
        raise Wrong(f"{what}: {batches.drawn} of {len(batches)} batches were looked at.")
    for who in ("student", "teacher"):
        if seen[who] > budget:
            raise Wrong(
                f"{what}: the {who} computes {seen[who]:,.0f} tokens, and the budget is "
                f"{budget:,}: no token of the batches twice, and no other text."
            )
    if not seen["teacher"]:
        raise Wrong(f"{what}: the teacher was never asked.")
    if seen["graph"]:
        raise Wrong(f"{what}: the teacher's pass makes a graph: torch.no_grad() spares its memory.")
