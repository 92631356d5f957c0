"""Each rank rounds by chances of its own.

hint: the ranks have drifted apart
"""

import torch


@torch.no_grad()
def sgd_step(parameters, lr, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for parameter in parameters:
        moved = parameter.float() - lr * parameter.grad.float()
        parameter.copy_(round_stochastically(moved, generator))  # noqa: F821
