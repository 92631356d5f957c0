"""Exercise 01a: data parallel by hand, over MPI.

Write the three functions below; the training loop is given. To run it yourself, in a terminal:

    mpirun -n 3 python data_parallel.py

`comm` is an MPI communicator (mpi4py) with `comm.rank` and `comm.size`; it may have fewer ranks
than MPI.COMM_WORLD. Its collectives for NumPy arrays begin with a capital letter and change the
array in place: `comm.Bcast(array, root=0)` and `comm.Allreduce(MPI.IN_PLACE, array)`, which sums.
"""

import numpy as np
from mpi4py import MPI

from labs.support.data_parallel import digits


def shard(rows: int, rank: int, size: int) -> slice:
    """The rows that belong to `rank`: one slice of 0 … rows-1, for any `rows` and `size`, even
    billions of rows.

    Together the slices of all ranks cover every row once, in order, and their lengths differ by
    at most one: 7 rows on 3 ranks are 3, 2 and 2 (or 2, 2 and 3).
    """
    raise NotImplementedError("return slice(first row, row after the last) for this rank")


def broadcast(parameters: np.ndarray, comm) -> None:
    """Give every rank rank 0's parameters, in place, with one collective for arrays.

    parameters: float64, (any length,).
    """
    raise NotImplementedError("send rank 0's parameters to all ranks")


def all_reduce_gradient(gradient: np.ndarray, rows: int, rows_global: int, comm) -> None:
    """Turn this rank's mean gradient into the mean over the global batch, in place, with one
    all-reduce of as many bytes.

    gradient: the mean over this rank's `rows` images, float64, (any length,); ranks may have
    different numbers of rows, `rows_global` in total. Without rows it is zeros. A NaN on one rank
    is a NaN in the mean.
    """
    raise NotImplementedError(
        "weight this rank's gradient by its fraction of the rows, then sum over ranks"
    )


def train(comm, epochs: int = 4, batch: int = 200, lr: float = 0.5) -> list[float]:
    """Given: train on all images; return the loss on all images after each step."""
    images, labels = digits.load()
    parameters = digits.new_parameters(seed=comm.rank)  # each rank begins with its own network …
    broadcast(parameters, comm)  # … and now all have the same
    curve = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(images))  # the same on every rank
        for first in range(0, len(images), batch):
            everyone = order[first : first + batch]  # the global batch: 200 images, finally 197
            mine = everyone[shard(len(everyone), comm.rank, comm.size)]
            _, gradient = digits.loss_and_gradient(parameters, images[mine], labels[mine])
            all_reduce_gradient(gradient, len(mine), len(everyone), comm)
            parameters -= lr * gradient  # the same update on every rank
            curve.append(digits.loss_and_gradient(parameters, images, labels)[0])
    return curve


if __name__ == "__main__":
    curve = train(MPI.COMM_WORLD)
    if MPI.COMM_WORLD.rank == 0:
        for step in range(0, len(curve), 5):
            print(f"step {step:2d}  loss {curve[step]:.6f}")
