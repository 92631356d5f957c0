"""The memory options of a training run, in the words that trainer and planner share.

This file imports nothing, because the planner must start without torch.
"""

# What the backward pass recomputes: nothing; everything except the results of matrix products and
# attention; or everything inside a layer.
RECOMPUTE = ("none", "selective", "full")
# What ZeRO shards among the data-parallel ranks: nothing; the optimizer's state; also gradients;
# also parameters.
ZERO = (0, 1, 2, 3)
# What may leave the device between uses.
OFFLOADS = ("activations", "optimizer", "parameters")
