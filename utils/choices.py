"""What a training run may choose to need less memory: the words that trainer and planner share.

This file imports nothing: the planner must start without torch.
"""

# What the backward pass computes again: nothing, all but the results of matrix products and
# attention, or everything inside a layer.
RECOMPUTE = ("none", "selective", "full")
# What the data-parallel ranks share out (ZeRO): nothing, the optimizer's state, gradients too,
# parameters too.
ZERO = (0, 1, 2, 3)
# What may leave the device between its uses.
OFFLOADS = ("activations", "optimizer", "parameters")
