"""The quality of a compressed model: bits per byte of held-out text, with a confidence interval.

    before = held_out(model, tokenizer, tokens)
    before.bits_per_byte, before.interval          # 1.08, (1.05, 1.11)
    after = held_out(smaller, tokenizer, tokens)
    cost(after, before)                            # Cost(0.004, 0.003, 0.005): extra bits per byte

All variants read the same windows, so a variant's cost is computed window by window: texts differ
in difficulty far more than variants do, and the interval of the difference is much narrower.
"""

import math
from dataclasses import dataclass

import torch

from utils.models.gpt import GPT, cross_entropy
from utils.models.tokenizer import Tokenizer

DRAWS = 2000  # bootstrap samples


@dataclass(frozen=True)
class HeldOut:
    """Bits and bytes of each window (fp64, one value each); tokens of all windows."""

    bits: torch.Tensor
    bytes: torch.Tensor
    tokens: int

    @property
    def bits_per_byte(self) -> float:
        return (self.bits.sum() / self.bytes.sum()).item()

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of a bootstrap over windows (Efron 1979)."""
        return _interval(self.bits, self.bytes)


@dataclass(frozen=True)
class Cost:
    """Extra bits per byte compared with another model, and the 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self):
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f})"


@torch.no_grad()
def held_out(
    model: GPT,
    tokenizer: Tokenizer,
    tokens: torch.Tensor,
    window: int = 512,
    stride: int = 384,
    batch: int = 8,
) -> HeldOut:
    """Scores every token once, in the first window that contains it.

    The windows overlap, so every token has at least window - stride tokens before it, or all
    preceding ones. The first token follows the end token, as at the start of a document.

    tokens   1-D ids (T,)
    """
    first = torch.tensor([0 if tokenizer.end is None else tokenizer.end])
    row = torch.cat((first, torch.as_tensor(tokens).long()))  # (T + 1,)
    count, window = len(row) - 1, min(window, len(row) - 1)
    starts = [*range(0, count - window, stride), count - window]
    lengths, device = tokenizer.byte_lengths(), next(model.parameters()).device
    bits, sizes, done = [], [], 0
    for at in range(0, len(starts), batch):
        some = starts[at : at + batch]
        rows = torch.stack([row[start : start + window + 1] for start in some])  # (B, window + 1)
        logits = model(rows[:, :-1].to(device))
        losses = cross_entropy(logits, rows[:, 1:].to(device), reduction="none")
        for start, targets, loss in zip(some, rows[:, 1:], losses.view(len(some), window)):
            bits.append(loss[done - start :].double().sum() / math.log(2))
            sizes.append(lengths[targets[done - start :]].sum())
            done = start + window
    return HeldOut(torch.stack(bits).cpu(), torch.stack(sizes).double(), count)


def cost(one: HeldOut, other: HeldOut) -> Cost:
    """The extra bits of `one` compared with `other`, on the same windows."""
    difference = one.bits - other.bits
    mean = (difference.sum() / one.bytes.sum()).item()
    return Cost(mean, *_interval(difference, one.bytes))


def _interval(bits, sizes):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(bits), (DRAWS, len(bits)), generator=generator)
    found = bits[drawn].sum(dim=1) / sizes[drawn].sum(dim=1)
    low, high = found.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return low, high
