"""Cuts N parts of length // N: the rest is never summed.

hint: parts of different lengths
"""

import torch


def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()  # noqa: F821
    flat = tensor.view(-1)
    parts = flat[: len(flat) // size * size].view(size, -1)
    for step in range(size - 1):
        into = parts[(rank - step - 1) % size]
        received = torch.empty_like(into)
        exchange(parts[(rank - step) % size], received)  # noqa: F821
        into += received
    for step in range(size - 1):
        exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])  # noqa: F821
