"""Does not see a NaN.

hint: NaN
"""

import torch
import torch.distributed as dist


class LossScaler(LossScaler):  # noqa: F821
    @torch.no_grad()
    def unscale(self, parameters):
        found = torch.zeros(1)
        for parameter in parameters:
            parameter.grad /= self.scale
            if parameter.grad.isinf().any():
                found.fill_(1.0)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())
