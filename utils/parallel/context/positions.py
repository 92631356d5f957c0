"""Which positions of a sequence each rank holds, and which keys its queries attend to.

    positions(16, 4)          ((range(0, 2), range(14, 16)), (range(2, 4), range(12, 14)), …)
    own_positions(x, axis)    (B, T, …) -> (B, T_local, …): this rank's part of a whole sequence

A causal position attends to all before it: the last of T positions does T times the work of the
first. If each rank held consecutive positions, all would wait for the last rank. A sequence is
therefore divided into 2N blocks, and each rank holds an early and a late one, r and 2N − 1 − r
(Llama 3, arXiv:2407.21783, 3.3.2; also called zigzag). Every rank then computes the same number of
products, even in each turn of a ring. Any length is accepted: blocks are equal, or the first ones
are one longer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from utils.parallel.mesh import Axis
from utils.shares import share, shares

Ranges = tuple[range, ...]


def positions(length: int, ranks: int, balanced: bool = True) -> tuple[Ranges, ...]:
    """The positions of each rank, as ranges in ascending order; some may be empty.

    balanced   an early and a late block each; False: one contiguous block each, for comparison
    """
    if not balanced:
        return tuple((range(*share(length, rank, ranks)),) for rank in range(ranks))
    sizes = shares(length, 2 * ranks)
    blocks = [range(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(2 * ranks)]
    return tuple((blocks[rank], blocks[-1 - rank]) for rank in range(ranks))


def held(ranges: Ranges) -> int:
    """The number of positions in these ranges."""
    return sum(map(len, ranges))


def own_positions(x: torch.Tensor, axis: Axis, dim: int = 1) -> torch.Tensor:
    """This rank's part of a whole sequence, whose positions are on dimension `dim`."""
    if axis.size == 1:
        return x
    mine = positions(x.shape[dim], axis.size)[axis.index]
    return torch.cat([x.narrow(dim, one.start, len(one)) for one in mine], dim)


def in_order(parts: Sequence[torch.Tensor], length: int, dim: int = 1) -> torch.Tensor:
    """The whole sequence from the ranks' parts: the inverse of `own_positions`."""
    blocks = [
        (one.start, block)
        for part, mine in zip(parts, positions(length, len(parts)), strict=True)
        for one, block in zip(mine, part.split([len(one) for one in mine], dim))
    ]
    return torch.cat([block for _, block in sorted(blocks, key=lambda pair: pair[0])], dim)


class Product(NamedTuple):
    """Queries that attend to keys: slices on this rank, and on the rank that holds the keys."""

    queries: slice
    keys: slice
    causal: bool  # both are the same positions, and each attends to those before it


def products(mine: Ranges, theirs: Ranges) -> list[Product]:
    """The products of queries at positions `mine` with keys at `theirs`: a few large ones.

    A block of queries sees a block of keys fully, partly (if it is the same block), or not at all.
    Adjacent queries that see the same keys form one product.
    """
    if mine == theirs:
        everything = slice(0, held(mine))
        return [Product(everything, everything, True)] if held(mine) else []
    found, place = [], 0
    for block in mine:
        rows = slice(place, place + len(block))
        seen = sum(len(keys) for keys in theirs if keys.start < block.start)
        place = rows.stop
        if not (seen and len(block)):
            continue
        if found and found[-1].keys.stop == seen and found[-1].queries.stop == rows.start:
            rows = slice(found.pop().queries.start, rows.stop)
        found.append(Product(rows, slice(0, seen), False))
    return found


def pairs(mine: Ranges, theirs: Ranges) -> int:
    """The number of pairs of a query in `mine` and a key in `theirs` that it attends to."""
    return sum(
        (queries.stop - queries.start) * (keys.stop - keys.start + causal) // (1 + causal)
        for queries, keys, causal in products(mine, theirs)
    )
