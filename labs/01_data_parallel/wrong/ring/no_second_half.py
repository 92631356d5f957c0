"""Stops after the N-1 exchanges that add.

hint: N-1 that add and N-1 that copy
"""

import torch


def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()  # noqa: F821
    flat = tensor.view(-1)
    parts = flat.tensor_split(size)
    for step in range(size - 1):
        into = parts[(rank - step - 1) % size]
        received = torch.empty_like(into)
        exchange(parts[(rank - step) % size], received)  # noqa: F821
        into += received
