"""Puts the two sums into a float32 tensor: the loss is right to seven digits only.

hint: Is there a float32 tensor on the way
"""

import torch
import torch.distributed as dist


def reduce_once(model, losses, tokens):
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    numbers = torch.tensor([losses, tokens])
    message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
    dist.all_reduce(message)
    start = 0
    for p in parameters:
        p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
        start += p.numel()
    return (message[-2] / message[-1]).item()
