"""One model on many ranks: each way to split it is a file, and all give the same model.

mesh          the ranks in a grid, and the groups that communicate
ddp, zero     split rows, sum gradients; zero also shards the state (ZeRO, FSDP2)
tensor        split matrices (how: utils/models/tp_plan.py); tp_ops: the conjugate pairs
context       split positions of a sequence (ring, Ulysses, gathered keys and values)
stages        split layers; schedules: the order of work; pipeline: carries it out;
              zero_bubble: the backward pass in two halves
experts       split experts, and send tokens to them
full_tensor   full tensors and this rank's shards of them
parallelize   combines all of these, in order, for one training run
"""

from utils.parallel.mesh import Mesh, make_mesh

__all__ = ["Mesh", "make_mesh"]
