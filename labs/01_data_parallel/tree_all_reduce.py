"""Exercise 01d: a tree, an all-reduce with fewer steps. When does it beat the ring?"""

import math

import torch
import torch.distributed as dist


def tree_all_reduce(tensor: torch.Tensor) -> None:
    """Sum `tensor` over all N ranks, in place, with messages of the whole tensor.

    tensor: contiguous, float32 or float64, of any shape; a NaN on one rank is a NaN in the sum. At
    most 2·⌈log2 N⌉ messages are in sequence, for any N: up a tree to rank 0, adding, and down again
    (or any other way with as few steps). Use only sends and receives, and wait on those that do not
    block.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError(
        "pair ranks at distance 1, 2, 4 … and add; then back, at distance … 4, 2, 1"
    )


def crossover_bytes(size: int, alpha: float, beta: float) -> float:
    """The tensor size n, in bytes, above which the ring beats the tree on `size` ranks.

    A message of n bytes takes α + β·n seconds. The tree sends 2·⌈log2 N⌉ messages of n bytes in
    sequence. The ring of exercise 01b has 2(N-1) exchanges with messages of n/N bytes; an exchange
    takes two messages, since a rank that sends does not receive. `math.inf`: the ring never wins.
    size: at least 2; alpha in seconds and beta in seconds per byte, above 0.
    """
    raise NotImplementedError("write down both times, set them equal and solve for n")
