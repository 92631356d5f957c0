"""Recursive doubling without a thought for three ranks.

hint: with 3 ranks
"""

import torch
import torch.distributed as dist


def tree_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    distance = 1
    while distance < size:
        partner, received = rank ^ distance, torch.empty_like(tensor)
        if partner < size:
            handle = dist.isend(tensor, partner)
            dist.recv(received, partner)
            handle.wait()
            tensor += received
        distance *= 2
