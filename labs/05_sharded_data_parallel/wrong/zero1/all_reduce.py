"""All-reduces the gradients and throws away all but its own part: right values, half more bytes.

hint: sends 3 times the parameters
"""

import torch.distributed as dist


class Zero1(Zero1):  # noqa: F821
    def mean_gradient(self, unit):
        flat = unit.gradients()
        dist.all_reduce(flat)
        return unit.parts(flat)[self.rank] / self.size
