"""Given: small models with random sizes and weights, and the correct results for them.

`utils.prompts` computes these in fp64, whatever the model's type, one row of the batch at a time,
so nothing needs padding.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from utils.course.assertions import alike, close
from utils.course.runner import Trial, fractions
from utils.models.gpt import GPT, GPTConfig, rotary_tables
from utils.prompts import prompted
from utils.prompts.data import IGNORED, padded

TYPES = (torch.float64, torch.float32, torch.bfloat16)
# Tolerance relative to the largest value of the reference. In fp64 it is limited by the angles of
# the rotary tables, which are fp32.
NEAR = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Case:
    """A model, prompts and rows, all generated from `seed`.

    prompts: their lengths; lengths: of each row's (question, answer); task: the index of each row's
    prompt; silent: every target is ignored
    """

    config: GPTConfig
    dtype: torch.dtype
    seed: int
    prompts: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    task: tuple[int, ...]
    silent: bool = False

    def __str__(self):
        T, c = max(map(sum, self.lengths)), self.config
        return (
            f"P = {', '.join(map(str, self.prompts))}, B = {len(self.lengths)}, T = {T}, "
            f"C = {c.hidden_size}, V = {c.vocab_size}, {str(self.dtype).removeprefix('torch.')}"
        )

    def model(self) -> GPT:
        """A fresh, identical copy; its weights are large enough for every position to matter."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = GPT(self.config)
            for parameter in model.parameters():
                parameter.data.add_(0.25 * torch.randn_like(parameter))
        return model.to(self.dtype)

    def prompt(self, number: int = 0) -> torch.Tensor:
        """A prompt, (P, C), that requires a gradient."""
        shape = self.prompts[number], self.config.hidden_size
        drawn = 0.7 * fractions(self.seed + 1 + number, *shape, dtype=self.dtype)
        return drawn.requires_grad_()

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, int64 (B, T); the end token may occur in a question."""
        generator = torch.Generator().manual_seed(self.seed + 600 + sum(self.task))
        V = self.config.vocab_size
        pairs = [
            [torch.randint(V, (n,), generator=generator).tolist() for n in lengths]
            for lengths in self.lengths
        ]
        tokens, targets = right_batch(pairs, self.seed % V)
        return tokens, torch.full_like(targets, IGNORED) if self.silent else targets


def draw_config(trial: Trial, **given) -> GPTConfig:
    """A config whose sizes are easy to tell apart; at least four heads, for four ranks."""
    draw = trial.draw
    heads = draw.choice((4, 6))
    sizes = {
        "vocab_size": draw.randrange(101, 131),  # more than any other size
        "hidden_size": heads * draw.choice((4, 6, 8)),
        "layers": draw.randrange(1, 4),
        "heads": heads,
        "kv_heads": draw.choice((2, heads)),
        "intermediate_size": draw.randrange(9, 40),
        "max_positions": 512,
        "tie_embeddings": draw.random() < 0.5,
        "rope_theta": draw.choice((100.0, 10_000.0)),
    }
    return GPTConfig(**(sizes | given))


def draw_case(trial: Trial, dtype: torch.dtype, rows: int = 4, **given) -> Case:
    """A model with one prompt, and rows: questions have at least one token, answers may be empty.
    In bf16 it has one layer: a few deeper models in a thousand amplify rounding too much."""
    draw = trial.draw
    lengths = tuple((draw.randrange(1, 8), draw.randrange(6)) for _ in range(rows))
    sizes = {
        "config": draw_config(trial, **{"layers": 1} if dtype == torch.bfloat16 else {}),
        "dtype": dtype, "seed": trial.new_seed(),
        "prompts": (draw.randrange(2, 8),), "lengths": lengths,
        "task": (0,) * len(given.get("lengths", lengths)),
    }
    return Case(**(sizes | given))


# ---- correct results


def right_batch(pairs: list, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The correct result of `batch`."""
    tokens, targets = padded([(question, [*answer, end]) for question, answer in pairs])
    for row, (question, answer) in zip(tokens, pairs):
        row[len(question) + len(answer) :] = end
    return tokens, targets


def right_logits(
    model: GPT, prompts: Sequence[torch.Tensor], task: Sequence[int], tokens: torch.Tensor
) -> torch.Tensor:
    """The correct logits, (B, T, V), in fp64."""
    model, rows = copy.deepcopy(model).double().requires_grad_(False), []
    wide = [prompt.double() for prompt in prompts]
    for number, row in zip(task, tokens):
        with prompted(model, wide[number]):
            rows.append(model(row[None])[0, len(wide[number]) :])
    return torch.stack(rows)


def right_loss(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"):
    """The correct loss, in fp64, over the targets that are not ignored."""
    flat = logits.double().flatten(0, 1)
    return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORED, reduction=reduction)


def walk(model: GPT, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of vectors x (B, L, C) at positions (L), by default 0 … L-1."""
    positions = torch.arange(x.shape[1]) if positions is None else positions
    cos, sin = rotary_tables(model.config, positions, x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    return model.lm_head(model.model.norm(x))


def compare(
    where: str, what: str, got: Any, right: torch.Tensor, dtype: torch.dtype,
    mistakes: Iterable[tuple[torch.Tensor, str]] = (), otherwise: str = "",
) -> None:
    """Raise Wrong unless `got` is right. mistakes: the values that typical mistakes give, each with
    a hint; they are computed only when needed, and the first match supplies the hint."""
    hint, slack = otherwise, NEAR[dtype] / torch.finfo(dtype).eps
    if not alike(got, right, slack):
        hint = next((words for value, words in mistakes if alike(got, value, slack)), otherwise)
    close(where, what, got, right, hint=hint, dtype=dtype, slack=slack, scale=1e-3)
