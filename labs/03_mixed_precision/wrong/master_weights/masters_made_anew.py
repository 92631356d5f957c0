"""Takes the bf16 weights up into fp32 at each step: what was rounded away is gone.

hint: for the whole training
"""

import torch


class MasterWeights(MasterWeights):  # noqa: F821
    @torch.no_grad()
    def step(self):
        for master, parameter in zip(self.masters, self.parameters):
            master.copy_(parameter)
        super().step()
