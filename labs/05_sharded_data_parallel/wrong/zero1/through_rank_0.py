"""Rank 0 adds up and shares out, as a parameter server would.

hint: in too many pieces
"""

import torch
import torch.distributed as dist


class Zero1(Zero1):  # noqa: F821
    def mean_gradient(self, unit):
        flat, mine = unit.gradients(), torch.empty_like(unit.shard)
        dist.reduce(flat, dst=0)
        dist.scatter(mine, unit.parts(flat) if self.rank == 0 else None, src=0)
        return mine / self.size
