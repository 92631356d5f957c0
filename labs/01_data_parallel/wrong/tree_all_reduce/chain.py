"""From rank to rank and back: each rank says little, but all wait.

hint: messages follow one another, a tree has at most
"""

import torch
import torch.distributed as dist


def tree_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank + 1 < size:
        received = torch.empty_like(tensor)
        dist.recv(received, rank + 1)
        tensor += received
    if rank > 0:
        dist.send(tensor, rank - 1)
        dist.recv(tensor, rank - 1)
    if rank + 1 < size:
        dist.send(tensor, rank + 1)
