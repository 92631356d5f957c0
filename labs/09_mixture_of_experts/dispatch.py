"""Lab 09: send tokens to their experts and back across ranks, however uneven the loads.

    rows, way = dispatch(tokens, chosen, experts)    # every row to the rank that holds its expert
    results = run(own_experts, rows, way.loads)      # given
    y = combine(results, weights, way)               # back home, weighted and added up

E experts on N ranks: rank r holds E/N experts, starting with number r · E/N. Each rank has its own
S tokens; S differs by rank and may be 0. k different experts compute each token.

Rows have any width, and are fp32 or fp64. Arguments, a `Way` included, are not changed, with or
without gradients; nothing is kept between calls, and no result is a view of a larger tensor. Write
all of it by hand, with the collectives of torch.distributed, not those of torch.distributed.nn.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn


class AllToAll(torch.autograd.Function):
    """A differentiable all-to-all of rows: one message in each direction, in which every rank takes
    part, with or without rows."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        """rows (sum(send), C), possibly not contiguous: first those for rank 0, then for rank 1 …
        -> (sum(receive), C): first those from rank 0, then those from rank 1 …

        send, receive   lists of N integers: rows to each rank, rows from each rank
        """
        raise NotImplementedError("keep both lists in ctx, then one all-to-all with these sizes")

    @staticmethod
    def backward(ctx, gradient):
        """The gradient of the received rows (sum(receive), C) -> that of the rows sent (sum(send),
        C), and None for each of the two lists."""
        raise NotImplementedError("where must the gradient of a row go?")


@dataclass
class Way:
    """Recorded by `dispatch`, so that `combine` can send results back."""

    order: torch.Tensor  # (S·k) the places of chosen.flatten(), in the order of the rows sent
    send: list[int]  # rows sent to each rank
    receive: list[int]  # rows that came from each rank
    by_expert: torch.Tensor  # (n) places of the rows that arrived, expert by expert
    loads: list[int]  # rows of each expert of this rank


def tell(counts):
    """counts (E) int64, this rank's rows for each expert -> (N, E/N): row r has rank r's counts for
    each expert of this rank. Even millions are exact. One collective of your choice: counts are
    small."""
    raise NotImplementedError(
        "every rank must learn how many rows will arrive: one all-to-all of counts"
    )


def dispatch(tokens, chosen, experts):
    """tokens (S, C), chosen (S, k) int64 -> rows (n, C) for this rank's experts, and a `Way`.

    experts   E, their number on all ranks together
    The rows of this rank's first expert come first, then those of its second …
    """
    raise NotImplementedError(
        "sort choices by expert, tell the counts, send the rows, sort those received"
    )


def combine(results, weights, way):
    """results (n, C) of this rank's experts, in the order of dispatch's rows -> (S, C): for each
    token of this rank, the sum of its k results, weighted by weights (S, k)."""
    raise NotImplementedError(
        "undo the three steps of dispatch in reverse, then multiply and add up"
    )


# Given: the experts, and the layer that uses your functions.


def make_experts(count, size, hidden=16, seed=0):
    """`count` experts for vectors of `size`, the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        mlps = [(nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, size)) for _ in range(count)]
    return nn.ModuleList(nn.Sequential(*layers) for layers in mlps)


def run(experts, rows, loads):
    """Each expert computes its rows (n, C); one without rows is also called, so that it gets a
    gradient of zeros."""
    return torch.cat([expert(part) for expert, part in zip(experts, rows.split(loads))])


def layer(tokens, chosen, weights, experts, count):
    """A mixture across ranks: `experts` are this rank's, `count` is their number on all ranks."""
    rows, way = dispatch(tokens, chosen, count)
    return combine(run(experts, rows, way.loads), weights, way)
