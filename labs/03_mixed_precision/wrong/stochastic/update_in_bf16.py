"""Computes the new weight in bf16: it is rounded before it can be rounded well.

hint: computed in bf16
"""

import torch


@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        moved = parameter - lr * parameter.grad
        parameter.copy_(round_stochastically(moved.float(), generator))  # noqa: F821
