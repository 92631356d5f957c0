"""The last rank takes all that is left over.

hint: the others wait for the longest
"""


def shard(rows, rank, size):
    each = rows // size
    return slice(rank * each, rows if rank == size - 1 else (rank + 1) * each)
