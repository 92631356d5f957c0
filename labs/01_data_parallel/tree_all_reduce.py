"""Exercise 01d: an all-reduce with fewer steps: a tree. And when does it beat the ring?"""

import math

import torch
import torch.distributed as dist


def tree_all_reduce(tensor: torch.Tensor) -> None:
    """Sums `tensor` over all N ranks, in place, with messages of the whole tensor.

    tensor: contiguous, float32 or float64, of any shape; a NaN on one rank is one in the sum. At
    most 2·⌈log2 N⌉ messages follow one another, for any N: up a tree to rank 0, adding, and down
    again (or any other way with so few steps). Use sends and receives only, and wait for those that
    do not block.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError(
        "pair ranks at distance 1, 2, 4 … and add; then back, at distance … 4, 2, 1"
    )


def crossover_bytes(size: int, alpha: float, beta: float) -> float:
    """The tensor's size n in bytes from which on the ring beats the tree on `size` ranks.

    A message of n bytes takes α + β·n seconds. The tree: 2·⌈log2 N⌉ messages of n bytes, one after
    another. The ring of exercise 01b: 2(N-1) exchanges with messages of n/N bytes, and an exchange
    takes two messages, since a rank that sends does not receive. `math.inf`: the ring never wins.
    size: 2 or more; alpha in seconds and beta in seconds per byte, above 0.
    """
    raise NotImplementedError("write down both times, set them equal and solve for n")
