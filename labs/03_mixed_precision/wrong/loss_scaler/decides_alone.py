"""Every rank looks at its own gradients only.

hint: The ranks do not agree
"""

import torch


class LossScaler(LossScaler):  # noqa: F821
    @torch.no_grad()
    def unscale(self, parameters):
        found = False
        for parameter in parameters:
            parameter.grad /= self.scale
            found = found or not parameter.grad.isfinite().all()
        return bool(found)
