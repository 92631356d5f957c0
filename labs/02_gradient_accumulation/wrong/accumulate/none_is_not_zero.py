"""A rank without micro-batches has gradients that are None.

hint: NoneType
"""

import torch
import torch.distributed as dist


def reduce_once(model, losses, tokens):
    parameters = list(model.parameters())
    numbers = parameters[0].new_tensor([losses, tokens])
    message = torch.cat([*(p.grad.flatten() for p in parameters), numbers])
    dist.all_reduce(message)
    start = 0
    for p in parameters:
        p.grad.copy_((message[start : start + p.numel()] / message[-1]).view_as(p))
        start += p.numel()
    return (message[-2] / message[-1]).item()
