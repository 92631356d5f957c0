"""One model on many ranks: each way to break it is a file, and each gives the same model.

mesh          who talks to whom: the ranks in a grid
ddp, zero     rows are shared out: gradients summed; the state shared out too (ZeRO, FSDP2)
tensor        matrices are cut (which how: utils/models/tp_plan.py); tp_ops: the conjugate pairs
context       positions of a sequence are shared out (ring, Ulysses, gathered keys and values)
stages        layers are shared out; schedules: the order of work; pipeline: carries it out;
              zero_bubble: the backward pass in two halves
experts       experts are shared out, and tokens travel
full_tensor   full tensors and this rank's shards of them
parallelize   puts the ways in order for one training run
"""

from utils.parallel.mesh import Mesh, make_mesh

__all__ = ["Mesh", "make_mesh"]
