"""15 random bits where 16 are cut off.

hint: the part of the way
"""

import torch


def round_stochastically(x, generator):
    noise = torch.randint(0, 2**15, x.shape, generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()
