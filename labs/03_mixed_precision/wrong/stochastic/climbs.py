"""Adds the gradient.

hint: the other way
"""

import torch


@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        moved = parameter.float() + lr * parameter.grad.float()
        parameter.copy_(round_stochastically(moved, generator))  # noqa: F821
