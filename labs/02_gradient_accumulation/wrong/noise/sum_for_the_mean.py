"""Leaves the sum of the gradients in place.

hint: times the mean
"""

import torch
import torch.distributed as dist


def squared_norms(gradient):
    size = dist.get_world_size()
    message = torch.cat([gradient, gradient.square().sum().view(1)])
    dist.all_reduce(message)
    gradient.copy_(message[:-1])
    return message[-1].item() / size, (gradient / size).square().sum().item()
