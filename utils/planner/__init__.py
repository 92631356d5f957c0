"""Parameters, memory, step time and the best strategy of a training run, by arithmetic.

    from utils.planner import MACHINES, MODELS, Strategy, plan, search

    machine = MACHINES["dgx-a100"]
    strategy = Strategy(tp=8, pp=8, dp=16, global_batch=1536, recompute="full")
    print(plan(MODELS["gpt3-175b"], strategy, machine))     # a table: memory and time by kind
    search(MODELS["gpt3-175b"], machine, gpus=1024)[0]      # the fastest that fits

The same from a shell: `python -m utils.planner --model gpt3-175b --machine dgx-a100 --gpus 1024`.

    model       sizes, parameters, FLOPs; presets          machine   peaks, links; presets
    strategy    how the model is split, and the checks     memory    bytes per rank, by kind
    kernels     seconds of a layer's computation           network   seconds of messages
    step        seconds of a step, by kind                 plan      one strategy, in full
    search      every strategy that fits, ranked           published measurements by others
    failures    how often, and how long between checkpoints

All arithmetic runs on numpy arrays with one entry per strategy, so a search costs microseconds per
strategy; `plan` is an array of one.
"""

from utils.planner.machine import MACHINES, Machine
from utils.planner.model import MODELS, Model
from utils.planner.plan import Plan, plan, plan_all
from utils.planner.search import search
from utils.planner.strategy import Strategy

__all__ = [
    "MACHINES",
    "MODELS",
    "Machine",
    "Model",
    "Plan",
    "Strategy",
    "plan",
    "plan_all",
    "search",
]
