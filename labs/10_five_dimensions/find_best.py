"""Exercise 10e: your own search.

    best_strategy(MODELS["gpt3-13b"], MACHINES["dgx-v100"], gpus=64, global_batch=512)

`outcomes` (given) evaluates many strategies at once; see `cases.py`.
"""

import itertools

from labs.support.five_dimensions.cases import outcomes
from utils.planner import Machine, Model, Strategy


def best_strategy(model: Model, machine: Machine, gpus: int, global_batch: int) -> Strategy:
    """The fastest strategy that fits, of those that use all `gpus` GPUs.

    Try at least: every tp and pp whose product divides gpus (not only powers of two); micro-batches
    of 1, 2, 4, 8 and 16; interleave 1, 2, 3, 4, 6 and 8; every recompute; zero 0, 1 and 3; with and
    without sequence parallelism. Invalid strategies may be among them: their outcome is None. At
    least one fits. `utils.planner.search` is what you are writing: do not call it.
    """
    raise NotImplementedError("list the strategies, get their outcomes, take the fastest that fits")
