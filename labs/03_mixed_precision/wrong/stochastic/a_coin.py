"""Up or down with equal chance, wherever x lies.

hint: the part of the way
"""

import torch


def round_stochastically(x, generator):
    coin = torch.randint(0, 2, x.shape, generator=generator, dtype=torch.int32)
    low = x.view(torch.int32) & -(2**16)
    exact = x.view(torch.int32) == low
    return torch.where(exact, low, low + coin * 2**16).view(torch.float32).bfloat16()
