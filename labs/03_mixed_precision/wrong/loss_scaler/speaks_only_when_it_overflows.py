"""Only the rank that sees an overflow calls the all-reduce.

hint: also the ranks that see no overflow
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
        if found.item():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())
