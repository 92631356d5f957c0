"""Takes the fastest, whether it fits or not.

hint: does not fit
"""

from labs.support.five_dimensions.cases import outcomes
from utils.planner import Strategy


def best_strategy(model, machine, gpus, global_batch):
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    tried = [
        Strategy(gpus // (tp * pp), pp, tp, 1, 1, 1, global_batch, mode, zero, sp)
        for tp in divisors
        for pp in divisors
        if gpus % (tp * pp) == 0
        for mode in ("none", "selective", "full")
        for zero in (0, 1, 3)
        for sp in (False, True)
    ]
    found = outcomes(model, machine, tried)
    good = [i for i, one in enumerate(found) if one is not None]
    return tried[min(good, key=lambda i: found[i].seconds)]
