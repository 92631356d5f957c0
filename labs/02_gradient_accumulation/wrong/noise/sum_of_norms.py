"""Adds the ranks' norms up, without the mean.

hint: ranks: take the mean
"""

import torch
import torch.distributed as dist


def squared_norms(gradient):
    message = torch.cat([gradient, gradient.square().sum().view(1)])
    dist.all_reduce(message)
    message /= dist.get_world_size()
    gradient.copy_(message[:-1])
    return dist.get_world_size() * message[-1].item(), gradient.square().sum().item()
