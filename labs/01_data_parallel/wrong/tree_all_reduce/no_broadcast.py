"""Adds up the tree and forgets the way down: only rank 0 has the sum.

hint: Ranks [0] have the sum
"""

import torch
import torch.distributed as dist


def tree_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    received, distance = torch.empty_like(tensor), 1
    while distance < size:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.recv(received, rank + distance)
            tensor += received
        distance *= 2
