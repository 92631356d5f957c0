"""N things shared out over M ranks: neighbours together, the first ranks take what is over.

    shares(7, 2)          (4, 3): how many each rank has
    share(7, 1, 2)        (4, 7): which ones rank 1 has, as (start, stop)

Rows of a batch, positions of a sequence, heads, columns of a matrix, words and experts are all
shared out so. This file imports nothing: the serving engine ships it.
"""


def shares(total: int, ranks: int) -> tuple[int, ...]:
    """How many of `total` things each rank holds: equal, or one more on the first ranks."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def share(total: int, rank: int, ranks: int) -> tuple[int, int]:
    """(start, stop): the things that one rank holds. Raises ValueError for a rank that is none."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} is outside a world of {ranks}: ranks go from 0")
    start = sum(shares(total, ranks)[:rank])
    return start, start + shares(total, ranks)[rank]
