"""The sampled matrix of training options: which combinations are run, and what one rank says.

`sample()` draws combinations with a fixed seed until every pair of values that may go together has
been drawn at least once (and `LEAST` in all). So a mistake that needs two options to show is seen.
"""

import itertools
import random
from dataclasses import dataclass, replace

from utils.training.train import TrainConfig

LEAST = 44

AXES = {
    "ranks": (1, 2, 3),
    "accumulate": (1, 2, 3),
    "precision": ("fp32", "fp64", "bf16", "fp16"),
    "recompute": ("none", "full", "selective"),
    "offload": (
        "none",
        "activations",
        "optimizer",
        "parameters",
        "activations,optimizer",
        "activations,parameters",
    ),
    "shard": ("none", "1", "2", "3"),
    "engine": ("torch", "deepspeed"),
    "optimizer": ("adamw", "muon"),
    "batch": (11, 13),  # neither is divided by 2 or 3: unequal shares, unequal micro-batches
    "tie": (False, True),
    "clip": (0.0, 0.1, 1.0),
    "weight_decay": (0.0, 0.5),
}

PLAIN = TrainConfig(
    layers=2, hidden=24, heads=4, kv_heads=2, seq=17, steps=3, held_out_every=99, device="cpu",
    sample=0, warmup=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Combination:
    """One row of the matrix: a number of ranks and a run."""

    ranks: int
    config: TrainConfig

    def __str__(self):
        words = [f"{self.ranks} ranks"]
        for name in AXES:
            if name != "ranks" and getattr(self.config, name) != getattr(PLAIN, name):
                words.append(f"{name}={getattr(self.config, name)}")
        return " ".join(words)

    def alone(self):
        """The plain run on one rank that this one must equal."""
        plain = {name: getattr(PLAIN, name) for name in MEMORY}
        return replace(self.config, **plain)


# what changes where things are and when they are computed, and must not change the result
MEMORY = ("accumulate", "recompute", "offload", "shard", "engine")


def combination(values):
    """The Combination of a dictionary of AXES, or None where it makes no sense."""
    try:
        return Combination(
            values["ranks"],
            replace(PLAIN, **{name: value for name, value in values.items() if name != "ranks"}),
        )
    except ValueError:
        return None


def pairs(values):
    """Every pair of (option, value) in a dictionary."""
    return set(itertools.combinations(sorted(values.items(), key=str), 2))


def sample(seed=0, tries=400):
    """Combinations that cover all pairs, each chosen as the one of many that covers most new."""
    draw = random.Random(seed)
    covered, chosen = set(), []
    while True:
        drawn = [{name: draw.choice(AXES[name]) for name in AXES} for _ in range(tries)]
        best = max(
            (values for values in drawn if combination(values)),
            key=lambda values: len(pairs(values) - covered),
        )
        if not pairs(best) - covered and len(chosen) >= LEAST:
            return chosen
        covered |= pairs(best)
        chosen.append(combination(best))
