"""Looks for overflows and forgets to divide.

hint: not divided by the scale
"""

import torch
import torch.distributed as dist


class LossScaler(LossScaler):  # noqa: F821
    @torch.no_grad()
    def unscale(self, parameters):
        bad = any(not parameter.grad.isfinite().all() for parameter in parameters)
        found = torch.tensor([float(bad)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())
