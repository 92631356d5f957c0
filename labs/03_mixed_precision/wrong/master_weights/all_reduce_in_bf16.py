"""Sends half the bytes, and adds up in bf16.

hint: bytes, and
"""

import torch
import torch.distributed as dist


class MasterWeights(MasterWeights):  # noqa: F821
    @torch.no_grad()
    def step(self):
        flat = torch.cat([master.grad.view(-1) for master in self.masters]).bfloat16()
        dist.all_reduce(flat)
        flat = flat.float() / dist.get_world_size()
        sizes = [master.numel() for master in self.masters]
        for master, mean in zip(self.masters, flat.split(sizes)):
            master.grad.copy_(mean.view_as(master))
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.copy_(master)
        self.optimizer.zero_grad()
