"""All-reduces in the backward pass and keeps its own part.

hint: times the parameters
"""

import torch.distributed as dist


class Zero2(Zero2):  # noqa: F821
    def mean_gradient(self, unit):
        flat = unit.gradients()
        dist.all_reduce(flat)
        return unit.parts(flat)[self.rank].clone() / self.size
