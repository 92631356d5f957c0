"""Every rank takes all rows.

hint: some rows belong to several ranks
"""


def shard(rows, rank, size):
    return slice(0, rows)
