"""Noise of one size for large and small numbers.

hint: neighbour
"""

import torch


def round_stochastically(x, generator):
    noise = torch.rand(x.shape, generator=generator) - 0.5
    return (x + noise * 2.0**-7).bfloat16()
