"""A new generator with the same seed for each parameter.

hint: two parameters
"""

import torch


@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    for parameter in parameters:
        generator = torch.Generator().manual_seed(step)
        moved = parameter.float() - lr * parameter.grad.float()
        parameter.copy_(round_stochastically(moved, generator))  # noqa: F821
