"""Exercise 01b: ring all-reduce from sends and receives.

Use `dist.send(tensor, rank)` and `dist.recv(tensor, rank)`. Both *block*: a send returns only when
the other rank has begun to receive. (Exercise e uses their asynchronous counterparts.)
"""

import torch
import torch.distributed as dist


def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Send `outgoing` to the next rank and fill `incoming` from the previous one.

    All ranks call this at the same time. Rank N-1 is followed by rank 0. The two tensors may differ
    in length; each is sent as one message.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    raise NotImplementedError(
        "send to `following`, receive from `previous`, and let no rank wait forever"
    )


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` over all ranks, in place, with the same bits on every rank.

    tensor: contiguous, float32 or float64, of any shape and length, even shorter than the number of
    ranks; a NaN on one rank is a NaN in the sum. Each of the N ranks sends 2(N-1) messages of at
    most ⌈length/N⌉ elements, with `exchange`.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)  # shares memory: writing to `flat` changes `tensor`
    raise NotImplementedError(
        "split `flat` into N chunks; N-1 exchanges that add, then N-1 that copy"
    )
