"""The matrix of mixes: several kinds of parallelism at once, combined with every other option.

`mixes.csv` covers every feasible pair of values of AXES (tests/training/pairwise.py). After a
change of AXES or of what is feasible, write it again with

    python -m tests.training.mixes
"""

import itertools
from dataclasses import dataclass, fields, replace
from pathlib import Path

from tests.training.pairwise import covering_rows, read_rows, write_rows
from utils.data import corpus
from utils.training.train import TrainConfig

TABLE = Path(__file__).with_name("mixes.csv")
RANKS = (2, 3, 4, 6, 8)

AXES = {
    "dp": (1, 2, 4),
    "pp": (1, 2, 3),
    "cp": (1, 2, 3),
    "context": ("ring", "ulysses", "gather"),
    "tp": (1, 2),
    "ep": (1, 2),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble"),
    "micro_batches": (1, 3),
    "sequence_parallel": (False, True),
    "precision": ("fp32", "fp64", "bf16", "fp16"),
    "recompute": ("none", "full", "selective"),
    "offload": ("none", "activations", "optimizer", "parameters"),
    "shard": ("none", "1", "2", "3"),
    "optimizer": ("adamw", "muon"),
    "experts": (None, 3),  # 2 + 1 on two ranks
    "more_layers": (0, 1),  # beyond the minimum
    "kv_heads": (1, 2, 6),
    "tie": (False, True),
    "clip": (0.0, 0.1),
}

SIZES = ("dp", "pp", "cp", "tp", "ep")
PLAIN = TrainConfig(
    text=corpus.__file__,  # short, so that the held-out part is one batch
    layers=2, hidden=24, heads=6, steps=2, held_out_every=99, device="cpu", sample=0, warmup=0.0,
    weight_decay=0.1, balance=0.1,
    vocab=257, batch=13, seq=17,  # primes: no number of ranks divides them
)

# options that change where and when things are computed, but must not change the result
PLACES = (
    "dp", "pp", "cp", "context", "tp", "ep", "sequence_parallel", "schedule", "chunks",
    "micro_batches", "accumulate", "recompute", "offload", "shard", "engine",
)


@dataclass(frozen=True)
class Mix:
    """One row of the matrix: a run on dp · pp · cp · tp ranks."""

    config: TrainConfig

    @property
    def ranks(self):
        return self.config.dp * self.config.pp * self.config.cp * self.config.tp

    def __str__(self):
        config = self.config
        words = [" ".join(f"{name}{getattr(config, name)}" for name in SIZES)]
        for entry in fields(config):
            value = getattr(config, entry.name)
            if entry.name not in SIZES and value != getattr(PLAIN, entry.name):
                words.append(f"{entry.name}={value}")
        return " ".join(words)

    def alone(self):
        """The plain single-rank run that this one must match."""
        return replace(self.config, **{name: getattr(PLAIN, name) for name in PLACES})


def layers(values):
    """At least two, so that a block has a neighbour, and at least one per pipeline stage."""
    stages = values["pp"] * (2 if values["schedule"] == "interleaved" else 1)
    return max(2, stages) + values["more_layers"]


def mix(values):
    """Return the Mix of a dictionary of AXES, or None if it is not feasible."""
    dp, pp, cp, tp = (values[name] for name in ("dp", "pp", "cp", "tp"))
    ranks = dp * pp * cp * tp
    if ranks not in RANKS[:-1] or dp % values["ep"]:  # only COUNTED has 8 ranks
        return None
    if values["experts"] and values["precision"] == "fp16":
        return None  # its many small matmuls take seconds
    if pp == 1 and values["schedule"] != PLAIN.schedule:  # the same run by another name
        return None
    if cp == 1 and values["context"] != PLAIN.context:
        return None
    options = {name: value for name, value in values.items() if name != "more_layers"}
    try:
        return Mix(replace(PLAIN, layers=layers(values), **options))
    except ValueError:
        return None


def feasible(fixed):
    """Whether any mix has these values."""
    usual = {name: values[0] for name, values in AXES.items()}
    free = {
        "dp": (1, 2, 4), "pp": (1, 2, 3), "cp": (1, 2), "tp": (1, 2), "experts": AXES["experts"],
        "shard": ("none", "3"), "schedule": ("1f1b", "interleaved"),
    }
    free = {name: values for name, values in free.items() if name not in fixed}
    return any(
        mix({**usual, **dict(zip(free, values)), **fixed})
        for values in itertools.product(*free.values())
    )


def cost(values):
    """The approximate CPU-seconds of a mix and of the plain run that it is compared with."""
    ranks = values["dp"] * values["pp"] * values["cp"] * values["tp"]
    said = 0.045 if values["tp"] > 1 else 0.01  # seconds of communication per layer
    said *= 2 if values["shard"] in ("2", "3") else 1
    said *= 2 if values["experts"] else 1
    said += 0.01 * (values["cp"] - 1)
    passes = layers(values) / values["pp"] * values["micro_batches"]
    return 0.8 + ranks * (0.12 + said * passes)


# simple enough for a formula of their traffic (tests/training/mix_traffic.py)
CLEAR = replace(PLAIN, dp=1, steps=3, layers=3, kv_heads=6, optimizer="adamw")
COUNTED = [
    Mix(replace(CLEAR, **values))
    for values in (
        {"dp": 1, "tp": 2, "optimizer": "muon"},
        {"dp": 1, "pp": 3, "schedule": "zero-bubble", "micro_batches": 3, "layers": 5},
        {"dp": 2, "tp": 2, "tie": True, "micro_batches": 2},
        {"dp": 2, "tp": 2, "shard": "1", "optimizer": "muon", "vocab": 263},
        {"dp": 2, "pp": 2, "tie": True, "micro_batches": 3, "precision": "fp64"},
        {"dp": 2, "pp": 2, "schedule": "interleaved", "shard": "1", "layers": 7, "tie": True},
        {"dp": 1, "pp": 2, "tp": 2, "schedule": "gpipe", "micro_batches": 2, "optimizer": "muon"},
        {"dp": 2, "pp": 2, "tp": 2, "micro_batches": 2, "kv_heads": 2, "precision": "fp64"},
        {"cp": 2, "micro_batches": 2, "tie": True},
        {"cp": 4, "context": "ulysses", "shard": "1", "kv_heads": 2},
        {"cp": 3, "context": "gather", "pp": 2, "micro_batches": 2, "precision": "fp64"},
        {"cp": 2, "dp": 2, "tp": 2, "kv_heads": 2, "shard": "1", "optimizer": "muon"},
        {"cp": 2, "context": "ulysses", "tp": 2, "pp": 2, "tie": True},
    )
]


MIXES = [mix(row) for row in read_rows(TABLE, AXES)] if TABLE.exists() else []


if __name__ == "__main__":
    write_rows(TABLE, covering_rows(AXES, mix, cost, patience=30_000))
