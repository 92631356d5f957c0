"""Returns norms, not their squares.

hint: take its square
"""

import torch
import torch.distributed as dist


def squared_norms(gradient):
    message = torch.cat([gradient, gradient.square().sum().view(1)])
    dist.all_reduce(message)
    message /= dist.get_world_size()
    gradient.copy_(message[:-1])
    return message[-1].item(), gradient.norm().item()
