"""Every rank sends first: with blocking sends no one ever receives.

hint: dist.send comes back only when
"""

import torch.distributed as dist


def exchange(outgoing, incoming):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.send(outgoing, (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
