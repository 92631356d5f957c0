"""Takes the smallest flag: skips only if every rank has overflowed.

hint: One rank's overflow is everybody's
"""

import torch
import torch.distributed as dist


class LossScaler(LossScaler):  # noqa: F821
    @torch.no_grad()
    def unscale(self, parameters):
        found = torch.zeros(1)
        for parameter in parameters:
            parameter.grad /= self.scale
            if not parameter.grad.isfinite().all():
                found.fill_(1.0)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())
