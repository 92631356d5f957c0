"""Micro-batches are added up in bf16, and only the sum becomes fp32.

hint: added up in bf16
"""

import torch


class MasterWeights(MasterWeights):  # noqa: F821
    @torch.no_grad()
    def collect(self):
        for parameter, master in zip(self.parameters, self.masters):
            before = 0.0 if master.grad is None else master.grad.bfloat16()
            master.grad = (before + parameter.grad).float()
            parameter.grad = None
