"""Divides by the number of ranks, as DDP does.

hint: as many as there are tokens: divide
"""

import torch
import torch.distributed as dist


def reduce_once(model, losses, tokens):
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    numbers = parameters[0].new_tensor([losses, tokens])
    message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
    dist.all_reduce(message)
    start = 0
    for p in parameters:
        p.grad.copy_(message[start : start + p.numel()].view_as(p) / dist.get_world_size())
        start += p.numel()
    return (message[-2] / message[-1]).item()
