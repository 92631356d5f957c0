"""Given: the machines of the exercises, and the costs of many strategies.

outcomes(model, machine, strategies)      # [Outcome or None]: None if sizes are incompatible
compare("cluster", strategy)              # a table of yours and the best, without its sizes
"""

from typing import NamedTuple

import numpy as np

from utils.planner import MACHINES, MODELS, Machine, Model, Plan, Strategy, plan, search
from utils.planner.plan import evaluate
from utils.planner.step import KINDS
from utils.planner.strategy import Columns, valid


class Case(NamedTuple):
    """A model, a machine, its number of GPUs and the sequences per step."""

    model: Model
    machine: Machine
    gpus: int
    global_batch: int

    def __str__(self) -> str:
        return (
            f"{self.model.layers} layers of {self.model.hidden_size} on {self.gpus} x "
            f"{self.machine.name} of {self.machine.memory / 1e9:.0f} GB, {self.global_batch} "
            "sequences"
        )


CASES = {
    "one_node": Case(MODELS["llama2-13b"], MACHINES["dgx-a100"], 8, 256),
    "cluster": Case(MODELS["gpt3-175b"], MACHINES["dgx-a100"], 1024, 1536),
    "frontier": Case(MODELS["1t"], MACHINES["frontier"], 3072, 3072),
}


def unseen(sizes: tuple, machine: str, gpus: int, global_batch: int) -> Case:
    """A case. sizes: layers, hidden size, heads, vocabulary, sequence, whether the MLP is gated."""
    layers, hidden, heads, vocabulary, seq, gated = sizes
    model = Model(layers, hidden, heads, vocab_size=vocabulary, seq=seq, gated=gated, name="unseen")
    return Case(model, MACHINES[machine], gpus, global_batch)


UNSEEN = [  # each needs sizes that a narrower search leaves out
    unseen((7, 768, 12, 50_257, 1024, False), "dgx-a100", 1, 8),
    unseen((43, 12_288, 96, 50_257, 1024, False), "dgx-a100", 24, 144),
    unseen((87, 4480, 35, 50_257, 2048, True), "dgx-v100", 48, 48),
    unseen((41, 1024, 8, 32_000, 1024, True), "frontier", 48, 384),
    unseen((46, 6144, 48, 51_200, 1024, False), "dgx-h100", 35, 70),
    unseen((105, 6400, 50, 50_257, 2048, False), "frontier", 560, 2240),
]


class Outcome(NamedTuple):
    """A strategy's cost: seconds per step, bytes on the fullest rank, and whether they fit."""

    seconds: float
    bytes: float
    fits: bool


def outcomes(model: Model, machine: Machine, strategies: list[Strategy]) -> list[Outcome | None]:
    """The outcome of each strategy; None if its sizes are incompatible."""
    if not strategies:
        return []
    c = Columns.of(strategies, model, machine)
    good = valid(c, model, machine)
    found: list[Outcome | None] = [None] * len(strategies)
    if good.any():
        held, _, seconds, _, fits = evaluate(model, c.take(good), machine)
        rows = zip(seconds["total"].tolist(), held["total"].tolist(), fits.tolist())
        for index, row in zip(np.flatnonzero(good), rows):
            found[index] = Outcome(*row)
    return found


def best(case: Case) -> Plan:
    """The fastest plan that fits, among all sizes that the exercises allow."""
    return search(*case, top=1, micro_batch=(1, 2, 4, 8, 16), cp=1)[0]


def compare(name: str, strategy: Strategy) -> None:
    """Print where the time goes in your strategy and in the fastest, in % of the fastest step."""
    case = CASES[name]
    strategy = Strategy(**{**vars(strategy), "global_batch": case.global_batch})
    yours, top = plan(case.model, strategy, case.machine), best(case)
    unit = top.seconds["total"] / 100
    print(f"{'% of the fastest step':<24}{'yours':>8}{'fastest':>9}")
    for kind in (*KINDS, "total"):
        if yours.seconds[kind] or top.seconds[kind]:
            row = f"{yours.seconds[kind] / unit:>8.1f}{top.seconds[kind] / unit:>9.1f}"
            print(f"{kind:<24}{row}")
    print(
        f"{'GB per rank':<24}{yours.memory['total'] / 1e9:>8.1f}{top.memory['total'] / 1e9:>9.1f}"
    )
