"""Only cuts the lower bits off.

hint: always rounded
"""

import torch


def round_stochastically(x, generator):
    return (x.view(torch.int32) & -(2**16)).view(torch.float32).bfloat16()
