"""Changes the scale first, and then divides by the new one.

hint: divided by another scale
"""

import torch
import torch.distributed as dist


class LossScaler(LossScaler):  # noqa: F821
    @torch.no_grad()
    def step(self, optimizer, clip=None):
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        bad = any(not parameter.grad.isfinite().all() for parameter in parameters)
        found = torch.tensor([float(bad)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.update(bool(found))
        for parameter in parameters:
            parameter.grad /= self.scale
        if not found:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
        return not found
