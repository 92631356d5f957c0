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
    ### BEGIN SOLUTION: pair ranks at distance 1, 2, 4 … and add; then back, at distance … 4, 2, 1
    received = torch.empty_like(tensor)
    distances = [2**step for step in range(math.ceil(math.log2(size)))]
    for distance in distances:  # up: a rank that has sent is done
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.recv(received, rank + distance)
            tensor += received
    for distance in reversed(distances):  # down: the same pairs, in the other direction
        if rank % (2 * distance) == distance:
            dist.recv(tensor, rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < size:
            dist.send(tensor, rank + distance)
    ### END SOLUTION


def crossover_bytes(size: int, alpha: float, beta: float) -> float:
    """The tensor size n, in bytes, above which the ring beats the tree on `size` ranks.

    A message of n bytes takes α + β·n seconds. The tree sends 2·⌈log2 N⌉ messages of n bytes in
    sequence. The ring of exercise 01b has 2(N-1) exchanges with messages of n/N bytes; an exchange
    takes two messages, since a rank that sends does not receive. `math.inf`: the ring never wins.
    size: at least 2; alpha in seconds and beta in seconds per byte, above 0.
    """
    ### BEGIN SOLUTION: write down both times, set them equal and solve for n
    tree_messages, ring_messages = 2 * math.ceil(math.log2(size)), 4 * (size - 1)
    fewer_bytes = tree_messages - ring_messages / size  # saved by the ring, in units of n
    if fewer_bytes <= 0:
        return math.inf
    return alpha * (ring_messages - tree_messages) / (beta * fewer_bytes)
    ### END SOLUTION
