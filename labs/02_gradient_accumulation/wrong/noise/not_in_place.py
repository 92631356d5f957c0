"""Rebinds the name: the caller's gradient stays what it was.

hint: It is still this rank's own
"""

import torch
import torch.distributed as dist


def squared_norms(gradient):
    message = torch.cat([gradient, gradient.square().sum().view(1)])
    dist.all_reduce(message)
    message /= dist.get_world_size()
    gradient = message[:-1]
    return message[-1].item(), gradient.square().sum().item()
