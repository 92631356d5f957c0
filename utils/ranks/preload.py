"""What the forkserver imports once, so that each rank has it at its first moment.

torch._dynamo is what the first step of any of torch's optimizers imports: a second of work that
every rank would else do anew. The garbage collector rests meanwhile (a quarter of the time of these
imports), and what they made is no longer looked at afterwards: 285,000 objects, 0.2 s for each
`gc.collect` on each rank.
"""

import gc
import importlib

gc.disable()
for name in ("torch", "torch.distributed", "torch._dynamo", "numpy", "utils.ranks.worker"):
    importlib.import_module(name)
gc.enable()
gc.freeze()
