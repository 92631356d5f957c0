"""The noise has torch's default type, int64.

hint: dtype=torch.int32
"""

import torch


def round_stochastically(x, generator):
    noise = torch.randint(0, 2**16, x.shape, generator=generator)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()
