"""Partners that both send before they receive.

hint: dist.send comes back only when
"""

import torch
import torch.distributed as dist


def tree_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    distance = 1
    while distance < size:
        partner, received = rank ^ distance, torch.empty_like(tensor)
        dist.send(tensor, partner)
        dist.recv(received, partner)
        tensor += received
        distance *= 2
