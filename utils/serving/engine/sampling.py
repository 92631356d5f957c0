"""Logits -> tokens: each row of the batch has its own parameters and random numbers.

    sampler = Sampler(temperature=0.8, top_k=50, top_p=0.9, seed=1)
    sample(logits, [sampler, ...])          # (B, V) and B samplers -> B token ids
    logprobs(logits[0], token, count=5)     # [(token, -0.7), then the 5 likeliest]

A row's random numbers depend only on its seed, not on the other rows of the batch. Its logits do
depend on them slightly, in the last bits. So a token is drawn as the winner of a race (the
Gumbel-max trick: Maddison et al., arXiv:1411.0030), which those bits change only if the best two
are almost tied, and not by comparing a random number with V cumulative probabilities, all of which
those bits shift.
"""

import math
from collections.abc import Sequence

import torch

from utils.serving.engine.scheduler import NOT_FINITE


class Sampler:
    """How one request chooses its tokens, with the state of its random numbers."""

    def __init__(self, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0):
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.seed = seed or 0
        self.generator = torch.Generator().manual_seed(seed) if temperature > 0 else None

    @property
    def plain(self) -> bool:
        """Whether all tokens take part in the race, or the largest logit simply wins."""
        return self.generator is None or (not self.top_k and self.top_p == 1)

    def skip(self, tokens: int, vocab_size: int) -> None:
        """Skip the random numbers of tokens that were already drawn."""
        for _ in range(tokens if self.generator else 0):
            torch.rand(vocab_size, dtype=torch.double, generator=self.generator)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token for logits (V,), fp32 on the CPU."""
        # in fp64, and the largest is 0: no temperature overflows
        scores = (logits.double() - logits.max()) / self.temperature
        if 0 < self.top_k < len(scores):
            least = scores.topk(self.top_k).values[-1]
            scores = scores.masked_fill(scores < least, -torch.inf)
        probabilities = scores.softmax(dim=-1)
        if self.top_p < 1:
            probabilities = self._nucleus(probabilities)
        # A token of probability p arrives after an exponentially distributed time of mean 1/p; the
        # probability that it arrives first is p.
        times = -torch.rand(len(scores), dtype=torch.double, generator=self.generator).log()
        return int((probabilities / times).argmax())

    def _nucleus(self, probabilities):
        """Probabilities set to 0 for all but the likeliest tokens that together have top_p (nucleus
        sampling: Holtzman et al., arXiv:1904.09751)."""
        ordered, tokens = probabilities.topk(min(len(probabilities), 1024))
        if ordered.sum() < self.top_p:  # rarely, and sorting a large vocabulary is slow
            ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # of all likelier tokens
        kept = ordered.masked_fill_(before >= self.top_p, 0.0)  # the likeliest always stays
        return torch.zeros_like(probabilities).scatter_(0, tokens, kept)


def sample(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """One token id for each row of logits (B, V); NOT_FINITE if the row's largest logit is NaN or
    infinite."""
    logits = logits.float().cpu()
    values = logits.numpy()
    tokens = values.argmax(axis=-1).tolist()  # torch takes ten times as long with 16 rows
    for row, sampler in enumerate(samplers):
        if not math.isfinite(values[row, tokens[row]]):  # argmax finds a NaN
            tokens[row] = NOT_FINITE
        elif sampler.generator is not None:
            tokens[row] = sampler.choose(logits[row])
    return tokens


def logprobs(logits: torch.Tensor, token: int, count: int) -> list[tuple[int, float]]:
    """The model's own log-probabilities: log_softmax of logits (V,), before temperature, top_k and
    top_p.

    Returns (id, log-probability) of `token`, then of the `count` likeliest tokens, in order.
    """
    known = logits.float().cpu().log_softmax(dim=-1)
    best = known.topk(min(count, len(known)))
    return [(token, known[token].item()), *zip(best.indices.tolist(), best.values.tolist())]
