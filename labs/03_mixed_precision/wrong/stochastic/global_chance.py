"""Takes torch's global random numbers, not those of the generator.

hint: from `generator`
"""

import torch


def round_stochastically(x, generator):
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()
