"""Given: a tiny language model, its loss, and micro-batches of unequal length.

Everything is in float64, so that two ways to add up the same numbers agree to many digits.
"""

import torch
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH = 11, 6, 7
IGNORE = -100  # the target of a position that does not count: padding
MicroBatch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, int64 of (rows, LENGTH) each


def new_model() -> torch.nn.Module:
    """The same model on every call and every rank: tokens (rows, LENGTH) -> logits (…, VOCAB)."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCAB, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.Tanh(),
        torch.nn.Linear(WIDTH, VOCAB),
    ).double()


def loss_sum(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of all tokens that count: a 0-D tensor."""
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="sum")


def counted(y: torch.Tensor) -> int:
    """Number of targets that count."""
    return int((y != IGNORE).sum())


def micro_batches(seed: int, lengths: list[list[int]]) -> list[MicroBatch]:
    """One micro-batch for each list, one row for each number: how many of its targets count."""
    random = torch.Generator().manual_seed(seed)
    result = []
    for rows in lengths:
        x = torch.randint(VOCAB, (len(rows), LENGTH), generator=random)
        y = torch.randint(VOCAB, (len(rows), LENGTH), generator=random)
        y[torch.arange(LENGTH)[None] >= torch.tensor(rows)[:, None]] = IGNORE
        result.append((x, y))
    return result
