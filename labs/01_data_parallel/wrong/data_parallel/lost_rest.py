"""Drops the rows that are left over by the division.

hint: rows belong to no rank
"""


def shard(rows, rank, size):
    each = rows // size
    return slice(rank * each, (rank + 1) * each)
