"""The sampled matrix of mixes: how many ways a model is broken up at once, with all else.

`sample()` draws mixes with a fixed seed until every pair of values that may go together has been
drawn at least once (and `LEAST` in all). So a mistake that needs two options to show is seen.
"""

import itertools
import random
from dataclasses import dataclass, fields, replace

from utils.data import corpus
from utils.training.train import TrainConfig

LEAST = 40
# how often a mix on so many ranks is drawn: those on few ranks are quicker
RANKS = {2: 1.0, 3: 1.0, 4: 1.0, 6: 0.2, 8: 0.03}

AXES = {
    "dp": (1, 2, 3, 4),
    "pp": (1, 2, 3, 4),
    "tp": (1, 2, 4),
    "ep": (1, 2),
    "schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "micro_batches": (1, 2, 3),
    "sequence_parallel": (False, True),
    "precision": ("fp32", "fp64", "bf16", "fp16"),
    "recompute": ("none", "full", "selective"),
    "offload": ("none", "activations", "optimizer", "parameters"),
    "shard": ("none", "1", "2", "3"),
    "optimizer": ("adamw", "muon"),
    "experts": (None, 5),  # 3 + 2 on two ranks
    # models that no number of ranks divides
    "layers": (4, 6),
    "kv_heads": (1, 2, 6),
    "vocab": (257, 263),
    "batch": (13, 16),
    "seq": (12, 17),  # 17: unequal shares of the positions
    "tie": (False, True),
    "clip": (0.0, 0.1),
}

WAYS = ("dp", "pp", "tp", "ep", "schedule", "sequence_parallel", "shard", "precision")

PLAIN = TrainConfig(
    text=corpus.__file__,  # short, so that the held-out part is one batch
    layers=4, hidden=24, heads=6, steps=2, held_out_every=99, device="cpu", sample=0, warmup=0.0,
    weight_decay=0.1, balance=0.1,
)  # fmt: skip

# what changes where things are and when they are computed, and must not change the result
PLACES = (
    "dp", "pp", "tp", "ep", "sequence_parallel", "schedule", "chunks", "micro_batches",
    "accumulate", "recompute", "offload", "shard", "engine",
)  # fmt: skip


@dataclass(frozen=True)
class Mix:
    """One row of the matrix: a run on dp · pp · tp ranks."""

    config: TrainConfig

    @property
    def ranks(self):
        return self.config.dp * self.config.pp * self.config.tp

    def __str__(self):
        config = self.config
        words = [f"dp{config.dp} pp{config.pp} tp{config.tp} ep{config.ep}"]
        for entry in fields(config):
            value = getattr(config, entry.name)
            if entry.name not in ("dp", "pp", "tp", "ep") and value != getattr(PLAIN, entry.name):
                words.append(f"{entry.name}={value}")
        return " ".join(words)

    def alone(self):
        """The plain run on one rank that this one must equal."""
        return replace(self.config, **{name: getattr(PLAIN, name) for name in PLACES})


def mix(values):
    """The Mix of a dictionary of AXES, or None where it makes no sense."""
    dp, pp, tp = (values[name] for name in ("dp", "pp", "tp"))
    if dp * pp * tp not in RANKS or dp % values["ep"]:
        return None
    if values["batch"] // dp < values["micro_batches"]:
        return None
    if values["experts"] and (values["precision"] == "fp16" or dp * pp * tp == 8):
        return None  # so many small products take seconds
    if pp == 1 and values["schedule"] != PLAIN.schedule:  # would be another name for the same run
        return None
    try:
        return Mix(replace(PLAIN, **values))
    except ValueError:
        return None


def pairs(values):
    """Every pair of (option, value) in a dictionary."""
    return set(itertools.combinations(sorted(values.items(), key=str), 2))


def sample(seed=0, tries=40):
    """Mixes that cover all pairs, each chosen as the one of many that covers most new."""
    draw = random.Random(seed)
    covered, chosen = set(), []

    def drawn(fixed=()):
        return {name: draw.choice(AXES[name]) for name in AXES} | dict(fixed)

    def take(values):
        covered.update(pairs(values))
        chosen.append(mix(values))

    while True:
        found = []
        while len(found) < tries:
            values = drawn()
            ranks = values["dp"] * values["pp"] * values["tp"]
            if draw.random() < RANKS.get(ranks, 0.0) and mix(values):
                found.append(values)
        best = max(found, key=lambda values: len(pairs(values) - covered))
        if not pairs(best) - covered and len(chosen) >= LEAST:
            break
        take(best)
    for pair in pairs_of_ways():  # the rare ones
        if not pair <= covered:
            some = (drawn(*pair) for _ in range(500))
            found = next((values for values in some if mix(values)), None)
            if found:
                take(found)
    return chosen


def pairs_of_ways():
    """Every pair of values, as `pairs` gives it, of the options that break a model up."""
    for one, other in itertools.combinations(WAYS, 2):
        for values in itertools.product(AXES[one], AXES[other]):
            yield pairs(dict(zip((one, other), values)))


# plain enough that a formula tells what they send (tests/training/mix_traffic.py)
CLEAR = replace(PLAIN, steps=3, kv_heads=6, vocab=257, batch=13, seq=17, optimizer="adamw")
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
    )
]
