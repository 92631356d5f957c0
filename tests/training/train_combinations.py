"""The matrix of training options that save memory, and of those that change the computation.

`combinations.csv` covers every feasible pair of values of AXES (tests/training/pairwise.py). After
a change of AXES or of what is feasible, write it again with

    python -m tests.training.train_combinations
"""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from tests.training.pairwise import covering_rows, read_rows, write_rows
from utils.training.train import TrainConfig

TABLE = Path(__file__).with_name("combinations.csv")

AXES = {
    "ranks": (1, 2, 3),
    "accumulate": (1, 2, 3),
    "precision": ("fp32", "fp64", "bf16", "fp16"),
    "recompute": ("none", "full", "selective"),
    "offload": ("none", "activations,optimizer", "activations,parameters"),
    "shard": ("none", "1", "2", "3"),
    "engine": ("torch", "deepspeed"),
    "optimizer": ("adamw", "muon"),
    "batch": (13,),  # not divisible by 2 or 3: unequal rows per rank and per micro-batch
    "tie": (False, True),
    "clip": (0.0, 0.1),
    "weight_decay": (0.0, 0.5),
}

PLAIN = TrainConfig(
    layers=2, hidden=24, heads=4, kv_heads=2, seq=17, steps=3, held_out_every=99, device="cpu",
    sample=0, warmup=0.0,
)


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
        """The plain single-rank run that this one must match."""
        plain = {name: getattr(PLAIN, name) for name in MEMORY}
        return replace(self.config, **plain)


# options that change where and when things are computed, but must not change the result
MEMORY = ("accumulate", "recompute", "offload", "shard", "engine")


def combination(values):
    """Return the Combination of a dictionary of AXES, or None if it is not feasible."""
    try:
        return Combination(
            values["ranks"],
            replace(PLAIN, **{name: value for name, value in values.items() if name != "ranks"}),
        )
    except ValueError:
        return None


def feasible(fixed):
    """Whether any combination has these values."""
    names = ("shard", "engine", "optimizer", "precision", "offload")
    free = [[fixed[name]] if name in fixed else AXES[name] for name in names]
    usual = {name: values[0] for name, values in AXES.items()}
    return any(
        combination({**usual, **fixed, **dict(zip(names, values))})
        for values in itertools.product(*free)
    )


def cost(values):
    """The approximate CPU-seconds of a combination and of its plain run."""
    passes = values["accumulate"] * (3 if values["shard"] in ("2", "3") else 1)
    return 0.5 + values["ranks"] * (0.1 + 0.05 * passes)


COMBINATIONS = [combination(row) for row in read_rows(TABLE, AXES)] if TABLE.exists() else []


if __name__ == "__main__":
    write_rows(TABLE, covering_rows(AXES, combination, cost))
