"""One random number for the whole tensor.

hint: of its own
"""

import torch


def round_stochastically(x, generator):
    noise = torch.randint(0, 2**16, (), generator=generator, dtype=torch.int32)
    return ((x.view(torch.int32) + noise) & -(2**16)).view(torch.float32).bfloat16()
