"""Sends the part of its own rank in the second half: it is not complete.

hint: Which part does each rank send
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
    for step in range(size - 1):
        exchange(parts[(rank - step) % size], parts[(rank - step - 1) % size])  # noqa: F821
