"""N items divided among M ranks in contiguous runs; the first ranks take any remainder.

    shares(7, 2)          (4, 3): how many each rank has
    share(7, 1, 2)        (4, 7): those of rank 1, as (start, stop)

Rows of a batch, positions of a sequence, heads, columns of a matrix, vocabulary entries and experts
are all divided this way. This file imports nothing, because the serving engine ships it.
"""


def shares(total: int, ranks: int) -> tuple[int, ...]:
    """How many of `total` items each rank holds: equal, or one more on the first ranks."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def share(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, stop): the items that one rank holds. Raises ValueError for an invalid rank."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is outside a world of {ranks}: ranks start at 0")
    start = sum(shares(total, ranks)[:rank])
    return start, start + shares(total, ranks)[rank]
