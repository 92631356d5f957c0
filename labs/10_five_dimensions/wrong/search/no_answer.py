"""Makes a strategy and forgets to return it.

hint: this is of type NoneType
"""

from utils.planner import Strategy


def best_strategy(model, machine, gpus, global_batch):
    Strategy(dp=gpus)
