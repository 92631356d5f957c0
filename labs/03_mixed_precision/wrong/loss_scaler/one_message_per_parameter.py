"""Asks the other ranks about each parameter.

hint: one all-reduce of one number is enough
"""

import torch
import torch.distributed as dist


class LossScaler(LossScaler):  # noqa: F821
    @torch.no_grad()
    def unscale(self, parameters):
        overflow = False
        for parameter in parameters:
            parameter.grad /= self.scale
            found = (~parameter.grad.isfinite()).any().float()
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
            overflow = overflow or bool(found)
        return overflow
