"""Exercise 01b: ring all-reduce from sends and receives.

Use `dist.send(tensor, rank)` and `dist.recv(tensor, rank)`. Both *block*: a send comes back when
the other rank has begun to receive, not earlier. (Exercise e is about their asynchronous sisters.)
"""

import torch
import torch.distributed as dist


def exchange(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """Sends `outgoing` to the next rank and fills `incoming` from the previous one.

    All ranks call this at the same time. Rank N-1 is followed by rank 0. The two tensors may differ
    in length; each travels as one message.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    raise NotImplementedError(
        "send to `following`, receive from `previous`, and no one waits forever"
    )


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sums `tensor` over all ranks, in place, the same bits on every rank.

    tensor: contiguous, float32 or float64, of any shape and length, also shorter than the number of
    ranks; a NaN on one rank is one in the sum. Each of the N ranks sends 2(N-1) messages of at most
    ⌈length/N⌉ numbers, by `exchange`.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    flat = tensor.view(-1)  # shares the memory: what you write into `flat` stands in `tensor`
    raise NotImplementedError("cut `flat` into N parts; N-1 exchanges that add, then N-1 that copy")
