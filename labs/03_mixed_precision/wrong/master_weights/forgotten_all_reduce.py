"""Every rank follows its own gradients.

hint: no all-reduce
"""

import torch


class MasterWeights(MasterWeights):  # noqa: F821
    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.copy_(master)
        self.optimizer.zero_grad()
