"""Overwrites the gradients of the earlier micro-batches.

hint: only the last micro-batch
"""

import torch


class MasterWeights(MasterWeights):  # noqa: F821
    @torch.no_grad()
    def collect(self):
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = parameter.grad.float()
            parameter.grad = None
