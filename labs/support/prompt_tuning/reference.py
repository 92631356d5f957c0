"""Given: small models with drawn sizes and weights, and what is right for them, found another way.

To the reference, virtual tokens are words: with P more rows in its embedding the GPT is used as it
is, `model(tokens)`, one row of the batch at a time, so that nothing needs padding. It computes in
fp64, whatever type the model has.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from utils.course.assertions import close
from utils.course.runner import Trial, fractions
from utils.models.gpt import GPT, GPTConfig, cross_entropy, rotary_tables

IGNORED = -100
TYPES = (torch.float64, torch.float32, torch.bfloat16)
# How far from the reference a value may be, relative to the largest. fp64: the rotary tables'
# angles are fp32.
NEAR = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.3}


@dataclass(frozen=True)
class Case:
    """A model, prompts and rows, all made from `seed`.

    prompts: their lengths; lengths: of each row's (question, answer); task: each row's prompt;
    frozen: the weights want no gradient; silent: no token counts
    """

    config: GPTConfig
    dtype: torch.dtype
    seed: int
    prompts: tuple[int, ...]
    lengths: tuple[tuple[int, int], ...]
    task: tuple[int, ...] = ()
    frozen: bool = True
    silent: bool = False

    def __str__(self):
        P, c = ", ".join(map(str, self.prompts)), self.config
        return (
            f"P = {P}, B = {len(self.lengths)}, T = {self.T}, C = {c.hidden_size}, "
            f"V = {c.vocab_size}, {str(self.dtype).removeprefix('torch.')}"
        )

    @property
    def T(self) -> int:
        """Tokens of a row that go into the model."""
        return max(q + a for q, a in self.lengths)

    def model(self) -> GPT:
        """A new one, the same each time."""
        return random_model(self.config, self.seed).to(self.dtype).requires_grad_(not self.frozen)

    def prompt(self, number: int = 0) -> torch.Tensor:
        """(P, C)"""
        shape = self.prompts[number], self.config.hidden_size
        return 0.7 * fractions(self.seed + 1 + number, *shape, dtype=self.dtype)

    @property
    def rows_prompts(self) -> list[int]:
        """The number of each row's prompt."""
        return list(self.task) or [0] * len(self.lengths)

    def vectors(self) -> torch.Tensor:
        """(B, longest P + T, C)"""
        shape = len(self.lengths), max(self.prompts) + self.T, self.config.hidden_size
        return 0.7 * fractions(self.seed + 500, *shape, dtype=self.dtype)

    def pairs(self) -> list:
        """Questions and answers; `end` may be a word of a question."""
        generator = torch.Generator().manual_seed(self.seed + 600 + sum(self.task))
        V = self.config.vocab_size
        return [
            tuple(torch.randint(V, (n,), generator=generator).tolist() for n in lengths)
            for lengths in self.lengths
        ]

    @property
    def end(self) -> int:
        return self.seed % self.config.vocab_size

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens and targets, int64 (B, T)"""
        tokens, targets = right_batch(self.pairs(), self.end)
        return tokens, torch.full_like(targets, IGNORED) if self.silent else targets


# ---- drawing


def draw_config(trial: Trial, ranks: int = 1, **given) -> GPTConfig:
    """Sizes that are easily told apart; as many heads as there are ranks, at least."""
    draw = trial.draw
    heads = draw.randrange(max(2, ranks), max(7, ranks + 3))
    sizes = {
        "vocab_size": draw.randrange(23, 90),
        "hidden_size": heads * draw.choice((4, 6, 8)),
        "layers": draw.randrange(1, 4),
        "heads": heads,
        "kv_heads": draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "intermediate_size": draw.randrange(max(9, ranks), 40),
        "max_positions": 512,
        "tie_embeddings": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.3,
        "rope_theta": draw.choice((100.0, 10_000.0)),
    }
    return GPTConfig(**(sizes | given))


def draw_lengths(trial: Trial, rows: int, most: int = 7) -> tuple:
    """Of questions, one token at least, and answers, which may be empty."""
    draw = trial.draw
    return tuple((draw.randrange(1, most + 1), draw.randrange(0, most - 1)) for _ in range(rows))


def draw_case(trial: Trial, dtype: torch.dtype, **given) -> Case:
    """A model with one prompt, and some rows."""
    draw = trial.draw
    sizes = {
        "config": draw_config(trial),
        "dtype": dtype,
        "seed": trial.new_seed(),
        "prompts": (draw.randrange(1, 8),),
        "lengths": draw_lengths(trial, draw.randrange(2, 6)),
        "frozen": draw.random() < 0.5,
    }
    return Case(**(sizes | given))


# ---- what is right


def random_model(config: GPTConfig, seed: int = 0) -> GPT:
    """fp64; weights large enough for every position to matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.25 * torch.randn_like(parameter))
    return model.double()


def right_batch(pairs: list, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What `batch` must return."""
    longest = max(len(q) + len(a) for q, a in pairs)
    tokens, targets = [], []
    for question, answer in pairs:
        padding = longest - len(question) - len(answer)
        tokens.append([*question, *answer] + [end] * padding)
        targets.append([IGNORED] * (len(question) - 1) + [*answer, end] + [IGNORED] * padding)
    return torch.tensor(tokens), torch.tensor(targets)


class Spelled:
    """A copy of the model in fp64 that knows the virtual tokens of all prompts as words."""

    def __init__(self, model: GPT, *prompts: torch.Tensor):
        self.model, self.prompts = copy.deepcopy(model).double().requires_grad_(False), prompts
        known = self.model.model.embed_tokens.weight.detach()
        rows = torch.cat((known, *(prompt.detach().double() for prompt in prompts)))
        self.model.model.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
        self.ids, first = [], len(known)
        for prompt in prompts:
            self.ids.append(torch.arange(first, first + len(prompt)))
            first += len(prompt)

    def all_logits(self, tokens: torch.Tensor, task: Sequence[int] = ()) -> list[torch.Tensor]:
        """For each row the logits of its virtual tokens and its tokens, (P + T, V)."""
        rows = [(self.ids[number], row) for number, row in zip(task or [0] * len(tokens), tokens)]
        return [self.model(torch.cat(row)[None])[0] for row in rows]

    def logits(self, tokens: torch.Tensor, task: Sequence[int] = ()) -> torch.Tensor:
        """(B, T, V)"""
        return torch.stack([row[-tokens.shape[1] :] for row in self.all_logits(tokens, task)])

    def gradients(self) -> list[torch.Tensor]:
        """Of each prompt, after a backward pass."""
        return [self.model.model.embed_tokens.weight.grad[ids] for ids in self.ids]


def right_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    counts = targets.flatten() != IGNORED
    return cross_entropy(logits.flatten(0, 1)[counts][None], targets.flatten()[counts][None])


def walk(model: GPT, x: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of vectors x (B, L, C) at positions (L), 0 … L-1 if none are given."""
    positions = torch.arange(x.shape[1]) if positions is None else positions
    cos, sin = rotary_tables(model.config, positions, x.dtype)
    for layer in model.model.layers:
        x = layer(x, cos[:, None], sin[:, None])
    return model.lm_head(model.model.norm(x))


# ---- comparing


def near(dtype: torch.dtype) -> float:
    """What `close` needs as its slack."""
    return NEAR[dtype] / torch.finfo(dtype).eps


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Up to what a's type may be away."""
    if a.shape != b.shape or not a.numel():
        return False
    return bool((a.double() - b.double()).abs().max() <= NEAR[a.dtype] * b.double().abs().max())


def compare(
    where: str, what: str, got: Any, right: torch.Tensor, dtype: torch.dtype,
    mistakes: Iterable[tuple[torch.Tensor, str]] = (), otherwise: str = "",
) -> None:
    """Raises Wrong unless got is right. mistakes: values that a typical mistake gives, and what to
    say of it; they are made only where they are needed, and the first that matches is told."""
    hint = otherwise
    if isinstance(got, torch.Tensor) and got.shape == right.shape and not same(got, right):
        hint = next((words for value, words in mistakes if same(got, value)), otherwise)
    close(where, what, got, right, hint=hint, dtype=dtype, slack=near(dtype), scale=1e-3)
