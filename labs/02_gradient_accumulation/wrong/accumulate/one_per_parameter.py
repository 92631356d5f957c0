"""One all-reduce for each parameter.

hint: where one is enough
"""

import torch
import torch.distributed as dist


def reduce_once(model, losses, tokens):
    parameters = list(model.parameters())
    numbers = parameters[0].new_tensor([losses, tokens])
    dist.all_reduce(numbers)
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= numbers[1]
    return (numbers[0] / numbers[1]).item()
