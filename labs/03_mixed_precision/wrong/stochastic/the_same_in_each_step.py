"""The same chances in every step.

hint: in every step
"""

import torch


@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        moved = parameter.float() - lr * parameter.grad.float()
        parameter.copy_(round_stochastically(moved, generator))  # noqa: F821
