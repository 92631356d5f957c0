"""Modules that the forkserver imports once, so that each rank has them from the start.

The first step of any of torch's optimizers imports torch._dynamo, a second of work that every rank
would otherwise repeat.
"""

import importlib

from utils.imports import collector_at_rest

with collector_at_rest():
    for name in ("torch", "torch.distributed", "torch._dynamo", "numpy", "utils.ranks.worker"):
        importlib.import_module(name)
