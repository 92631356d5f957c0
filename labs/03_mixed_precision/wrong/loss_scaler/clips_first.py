"""Clips gradients that are still scaled.

hint: clipped before
"""

import torch


class LossScaler(LossScaler):  # noqa: F821
    def step(self, optimizer, clip=None):
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        overflow = self.unscale(parameters)
        if not overflow:
            optimizer.step()
        self.update(overflow)
        return not overflow
