"""Entering and leaving the layers that ranks split: the conjugate pair f and g.

                                    forward         backward
    copy_to_region               f  nothing         all-reduce      every rank has all of x
    reduce_from_region           g  all-reduce      nothing
    gather_to_region             f  all-gather      reduce-scatter  every rank has its positions
    reduce_scatter_from_region   g  reduce-scatter  all-gather      of x (sequence parallelism)

Inside, each rank computes with its slice of the weights. All ranks use the input, so its gradient
is the sum of theirs; the output is the sum of their partial results, and each rank takes the
gradient of that sum unchanged. f and g: Shoeybi et al., arXiv:1909.08053, section 3; with the
sequence split: Korthikanti et al., arXiv:2205.05198, section 4.2.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils.parallel.mesh import Axis
from utils.shares import shares

# torch 2.13 renames them and warns about the old names, the only ones in 2.11
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Region:
    """The entrance and exit of the layers that `axis` splits."""

    def __init__(self, axis: Axis, sequence_parallel: bool = False):
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.length = None  # positions of the whole sequence, which a slice does not reveal

    def copy_to(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C), or this rank's positions of it -> (B, T, C)."""
        if self.sequence_parallel:
            return gather_to_region(x, self.axis, self.length)
        return copy_to_region(x, self.axis)

    def reduce_from(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C), to be summed over the ranks -> the sum, or this rank's positions of it."""
        if self.sequence_parallel:
            self.length = x.shape[1]
            return reduce_scatter_from_region(x, self.axis)
        return reduce_from_region(x, self.axis)


def copy_to_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """f: x unchanged; its gradient is summed over the ranks of the axis."""
    return x if axis.size == 1 else _CopyToRegion.apply(x, axis.group)


def reduce_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g: the sum of x over the ranks of the axis; the gradient passes unchanged."""
    return x if axis.size == 1 else _ReduceFromRegion.apply(x, axis.group)


def gather_to_region(x: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
    """f with the sequence split: the positions of all ranks, (B, T_local, C) -> (B, length, C)."""
    return x if axis.size == 1 else _GatherToRegion.apply(x, axis, length)


def reduce_scatter_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g with the sequence split: this rank's positions of the sum, (B, T, C) -> (B, T_local, C)."""
    return x if axis.size == 1 else _ReduceScatterFromRegion.apply(x, axis)


def gather_sequence(x: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
    """The positions of all ranks for a computation that every rank repeats, (B, T_local, C) ->
    (B, length, C). Its gradient is whole on every rank, which takes its own positions of it."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis, length)


def split_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """This rank's positions of a result that all ranks computed, (B, T, C) -> (B, T_local, C)."""
    return x if axis.size == 1 else _SplitSequence.apply(x, axis)


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return summed(dy, ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class _GatherToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, length):
        ctx.axis = axis
        return all_positions(x, axis, length)

    @staticmethod
    def backward(ctx, dy):
        return own_positions_summed(dy, ctx.axis), None, None


class _ReduceScatterFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis, ctx.length = axis, x.shape[1]
        return own_positions_summed(x, axis)

    @staticmethod
    def backward(ctx, dy):
        return all_positions(dy, ctx.axis, ctx.length), None


class _GatherSequence(_GatherToRegion):
    @staticmethod
    def backward(ctx, dy):
        return own_positions(dy, ctx.axis), None, None


class _SplitSequence(_ReduceScatterFromRegion):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis, ctx.length = axis, x.shape[1]
        return own_positions(x, axis)


# ---- the collectives, on plain tensors


def summed(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sum over the ranks, in new memory, because branches may share gradients."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_positions(x: torch.Tensor, axis: Axis, length: int) -> torch.Tensor:
    """One all-gather of (B, T_local, C) -> (B, length, C)."""
    sizes = shares(length, axis.size)
    longest = max(sizes)  # a collective needs equal sizes: pad shorter ones
    part = F.pad(x, (0, 0, 0, longest - x.shape[1])).contiguous()
    parts = x.new_empty(axis.size, *part.shape)  # (ranks, B, longest, C)
    all_gather(parts.flatten(0, 1), part, group=axis.group)
    return torch.cat([one[:, :size] for one, size in zip(parts, sizes)], dim=1)


def own_positions_summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """One reduce-scatter of (B, T, C) -> (B, T_local, C)."""
    sizes = shares(x.shape[1], axis.size)
    longest = max(sizes)
    parts = torch.stack([F.pad(p, (0, 0, 0, longest - p.shape[1])) for p in x.split(sizes, dim=1)])
    own = torch.empty_like(parts[0])
    reduce_scatter(own, parts.flatten(0, 1), group=axis.group)
    return own[:, : sizes[axis.index]]


def own_positions(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """(B, T, C) -> (B, T_local, C); nothing is sent."""
    return x.split(shares(x.shape[1], axis.size), dim=1)[axis.index].contiguous()


# ---- random numbers


@contextmanager
def different_numbers(axis: Axis) -> Iterator[None]:
    """Inside, each rank of the axis draws its own random numbers; outside, all draw the same.

        with different_numbers(mesh.tp):
            probabilities = F.dropout(probabilities, 0.1)      # this rank's own heads: its own mask
        x = x + F.dropout(y, 0.1)                              # held by all ranks: the same mask

    Ranks that start with one seed draw the same numbers. That is right for values that all of them
    hold: different masks would make the copies differ. For values that each rank holds alone it is
    wrong: all would get the same mask (Shoeybi et al., arXiv:1909.08053, appendix B.2).

    The seed itself is drawn from the shared generator, so every `with` draws new numbers, but
    recomputation, which restores the shared state, draws the same ones again.
    """
    seed = torch.randint(2**62, (), device="cpu").item()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + axis.index)
        yield
