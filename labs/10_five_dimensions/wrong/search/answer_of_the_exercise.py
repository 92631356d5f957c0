"""Returns what was right for another machine.

hint: there are 64 GPUs: all of them must work
"""

from utils.planner import Strategy


def best_strategy(model, machine, gpus, global_batch):
    return Strategy(32, 8, 4, 1, 6, 1, 1536, "selective", 1, True)
