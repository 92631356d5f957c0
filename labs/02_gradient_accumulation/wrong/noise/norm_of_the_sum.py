"""The squared norm of the sum, not of the mean.

hint: squared norm of the sum
"""

import torch
import torch.distributed as dist


def squared_norms(gradient):
    message = torch.cat([gradient, gradient.square().sum().view(1)])
    dist.all_reduce(message)
    big = message[:-1].square().sum().item()
    message /= dist.get_world_size()
    gradient.copy_(message[:-1])
    return message[-1].item(), big
