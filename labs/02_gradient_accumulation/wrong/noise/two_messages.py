"""Sends the norm by itself.

hint: 2 collectives
"""

import torch.distributed as dist


def squared_norms(gradient):
    small = gradient.square().sum()
    dist.all_reduce(small)
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
    return (small / dist.get_world_size()).item(), gradient.square().sum().item()
