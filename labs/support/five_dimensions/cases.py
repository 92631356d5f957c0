"""Given: the machines of the exercises, and what many strategies cost.

outcomes(model, machine, strategies)      # [Outcome or None]: None where sizes do not go together
compare("cluster", strategy)              # a table: yours beside the best, without telling it
"""

from typing import NamedTuple

import numpy as np

from utils.planner import MACHINES, MODELS, Machine, Model, Plan, Strategy, plan, search
from utils.planner.plan import evaluate
from utils.planner.step import KINDS
from utils.planner.strategy import Columns, valid


class Case(NamedTuple):
    """A model, a machine, its GPUs and the sequences of a step."""

    model: Model
    machine: Machine
    gpus: int
    global_batch: int


CASES = {
    "one_node": Case(MODELS["llama2-13b"], MACHINES["dgx-a100"], 8, 256),
    "cluster": Case(MODELS["gpt3-175b"], MACHINES["dgx-a100"], 1024, 1536),
    "frontier": Case(MODELS["1t"], MACHINES["frontier"], 3072, 3072),
}


class Outcome(NamedTuple):
    """What a strategy costs: seconds of a step, bytes on the fullest rank, whether these fit."""

    seconds: float
    bytes: float
    fits: bool


def outcomes(model: Model, machine: Machine, strategies: list[Strategy]) -> list[Outcome | None]:
    """The outcome of each strategy, None where its sizes do not go together."""
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
    """The fastest that fits, of all that the course's search tries."""
    return search(case.model, case.machine, case.gpus, case.global_batch, top=1, cp=1)[0]


def compare(name: str, strategy: Strategy) -> None:
    """Prints where the time goes, yours beside that of the fastest, in % of the fastest step."""
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
        f"{'GB on a rank':<24}{yours.memory['total'] / 1e9:>8.1f}{top.memory['total'] / 1e9:>9.1f}"
    )
