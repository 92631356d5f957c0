"""An all-reduce for each parameter.

hint: One message
"""

import torch
import torch.distributed as dist


class MasterWeights(MasterWeights):  # noqa: F821
    @torch.no_grad()
    def step(self):
        for master in self.masters:
            dist.all_reduce(master.grad)
            master.grad /= dist.get_world_size()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.copy_(master)
        self.optimizer.zero_grad()
