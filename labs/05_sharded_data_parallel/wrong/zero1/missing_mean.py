"""Sums the ranks' gradients and forgets to divide.

hint: times too large: a sum over the ranks
"""

import torch
import torch.distributed as dist


class Zero1(Zero1):  # noqa: F821
    def mean_gradient(self, unit):
        mine = torch.empty_like(unit.shard)
        dist.reduce_scatter(mine, unit.parts(unit.gradients()))
        return mine
