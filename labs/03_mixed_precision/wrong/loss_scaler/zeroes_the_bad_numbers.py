"""Replaces what is not finite by 0 and goes on.

hint: GradScaler skips it
"""

import torch
import torch.distributed as dist


class LossScaler(LossScaler):  # noqa: F821
    def step(self, optimizer, clip=None):
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        overflow = self.unscale(parameters)
        for parameter in parameters:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        self.update(overflow)
        return True
