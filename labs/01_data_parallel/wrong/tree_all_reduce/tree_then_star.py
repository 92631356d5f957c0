"""Up by a tree, down from rank 0 to each in turn.

hint: messages follow one another, a tree has at most
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
    for other in range(1, size):
        if rank == 0:
            dist.send(tensor, other)
        elif rank == other:
            dist.recv(tensor, 0)
