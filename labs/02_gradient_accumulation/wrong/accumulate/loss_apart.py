"""Sends the tokens and the loss in a message of their own.

hint: 2 all-reduces in a step
"""

import torch
import torch.distributed as dist


def reduce_once(model, losses, tokens):
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    numbers = parameters[0].new_tensor([losses, tokens])
    dist.all_reduce(numbers)
    message = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(message)
    start = 0
    for p in parameters:
        p.grad.copy_((message[start : start + p.numel()] / numbers[1]).view_as(p))
        start += p.numel()
    return (numbers[0] / numbers[1]).item()
