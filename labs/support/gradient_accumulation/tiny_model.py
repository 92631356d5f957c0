"""Given: a tiny language model, its loss, and micro-batches of unequal length."""

import torch
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH = 11, 6, 7  # the checks draw other sizes, too
IGNORE = -100  # the target of a position that does not count: padding
MicroBatch = tuple[torch.Tensor, torch.Tensor]  # tokens and targets, each int64 of (rows, LENGTH)


def new_model(
    seed: int = 0, vocab: int = VOCAB, width: int = WIDTH, dtype: torch.dtype = torch.float64
) -> torch.nn.Module:
    """Make the same model on every rank: tokens (rows, length) -> logits (rows, length, vocab)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Embedding(vocab, width),
            torch.nn.Linear(width, width),
            torch.nn.Tanh(),
            torch.nn.Linear(width, vocab),
        ).to(dtype)


def loss_sum(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum of the losses over all targets that count: a 0-D tensor."""
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="sum")


def counted(y: torch.Tensor) -> int:
    """The number of targets that count."""
    return int((y != IGNORE).sum())


def micro_batches(
    seed: int, lengths: list[list[int]], vocab: int = VOCAB, length: int = LENGTH
) -> list[MicroBatch]:
    """One micro-batch per list, with one row per entry: the number of its targets that count."""
    random = torch.Generator().manual_seed(seed)
    result = []
    for rows in lengths:
        x = torch.randint(vocab, (len(rows), length), generator=random)
        y = torch.randint(vocab, (len(rows), length), generator=random)
        y[torch.arange(length)[None] >= torch.tensor(rows)[:, None]] = IGNORE
        result.append((x, y))
    return result
