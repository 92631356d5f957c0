"""Gathers everybody's gradients and adds them up: N times the bytes.

hint: reduce_once calls all_gather
"""

import torch
import torch.distributed as dist


def reduce_once(model, losses, tokens):
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    numbers = parameters[0].new_tensor([losses, tokens])
    message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
    parts = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, message)
    message = sum(parts)
    start = 0
    for p in parameters:
        p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
        start += p.numel()
    return (message[-2] / message[-1]).item()
