"""Backs off, but makes the step all the same.

hint: GradScaler skips it
"""

import torch


class LossScaler(LossScaler):  # noqa: F821
    def step(self, optimizer, clip=None):
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        overflow = self.unscale(parameters)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        self.update(overflow)
        return True
