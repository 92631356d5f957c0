"""What the forkserver imports once, so that each rank has it at its first moment.

torch._dynamo is what the first step of any of torch's optimizers imports: a second of work that
every rank would else do anew.
"""

import importlib

from utils.imports import collector_at_rest

with collector_at_rest():
    for name in ("torch", "torch.distributed", "torch._dynamo", "numpy", "utils.ranks.worker"):
        importlib.import_module(name)
