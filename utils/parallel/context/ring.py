"""Attention to the keys and values of all ranks of an axis, which arrive in turn.

    y = attention_over(q, k, v, axis, length, travel=Ring)       each from the previous neighbour
    y = attention_over(q, k, v, axis, length, travel=Gather)     all in one all-gather

    Ring     keys and values travel around a ring: N − 1 messages forward, and N − 1 backward plus N
             with gradients, which end at their owners. While a block is in use, the next one is
             under way (Liu et al., arXiv:2310.01889)
    Gather   every rank briefly holds all keys and values; one reduce-scatter sums their gradients.
             With few key-value heads this is little data (Llama 3, arXiv:2407.21783, 3.3.2)

The arithmetic is the same: this rank's queries attend to each rank's keys, and the partial results
are merged. No rank ever has the scores of the whole sequence, or keeps other ranks' keys and values
for the backward pass: they are sent again.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist

from utils.memory.checkpointing import in_parts
from utils.parallel.context.blocks import attend, attend_backward, merge
from utils.parallel.context.positions import Ranges, held, positions, products
from utils.parallel.mesh import Axis
from utils.parallel.tp_ops import all_gather, reduce_scatter

# ---- 1. how keys and values travel


Others = Iterator[tuple[int, torch.Tensor]]
OthersWithGradients = Iterator[tuple[int, torch.Tensor, torch.Tensor]]


class Travel:
    """The travel of one attention's keys and values.

    axis, places   the ranks, and the positions of each
    kv             (2, B, T_local, K, D): keys and values of this rank
    """

    def __init__(self, axis: Axis, places: tuple[Ranges, ...]):
        self.axis, self.places = axis, places

    def all(self, kv: torch.Tensor) -> Others:
        """Yield (rank, its keys and values) in any order."""
        raise NotImplementedError

    def all_with_gradients(self, kv: torch.Tensor, gradient: torch.Tensor) -> OthersWithGradients:
        """Yield (rank, its keys and values, a gradient to add to) likewise. In the end `gradient`,
        given as zeros like kv in the type of sums, holds what all ranks have added for this
        rank."""
        raise NotImplementedError

    def _like(self, x, rank):
        """Memory for another rank's keys and values."""
        shape = list(x.shape)
        shape[2] = held(self.places[rank])
        return x.new_empty(shape)


class Ring(Travel):
    """Receives from the previous rank and sends to the next."""

    def all(self, kv: torch.Tensor) -> Others:
        size, here = self.axis.size, self.axis.index
        for turn in range(size):
            rank = (here - turn) % size
            if turn < size - 1:  # under way while the caller computes
                work, coming = self._pass_on(kv, (rank - 1) % size)
            yield rank, kv
            if turn < size - 1:
                _wait(work)
                kv = coming

    def all_with_gradients(self, kv: torch.Tensor, gradient: torch.Tensor) -> OthersWithGradients:
        size, here = self.axis.size, self.axis.index
        work_on_sums, sums = [], None  # a gradient follows its keys one turn behind
        for turn in range(size):
            rank = (here - turn) % size
            if turn < size - 1:
                work, coming = self._pass_on(kv, (rank - 1) % size)
            added = self._like(gradient, rank).zero_() if turn else gradient
            yield rank, kv, added
            _wait(work_on_sums)
            if turn:
                added += sums  # from the ranks that had these keys before
            work_on_sums, sums = self._pass_on(added, (rank - 1) % size)
            if turn < size - 1:
                _wait(work)
                kv = coming
        _wait(work_on_sums)
        gradient.copy_(sums)

    def _pass_on(self, x, rank):
        """Send x to the next rank; receive that of `rank` from the previous one: (work, tensor)."""
        axis, coming = self.axis, self._like(x, rank)
        after = axis.ranks[(axis.index + 1) % axis.size]
        before = axis.ranks[axis.index - 1]
        sent = x.contiguous()
        messages = [
            dist.P2POp(dist.isend, sent, after, axis.group),
            dist.P2POp(dist.irecv, coming, before, axis.group),
        ]
        return [(work, sent) for work in dist.batch_isend_irecv(messages)], coming


def _wait(works):
    for work, _ in works:
        work.wait()


class Gather(Travel):
    """Gathers all at once; a collective needs equal sizes, so shorter ones are padded."""

    def all(self, kv: torch.Tensor) -> Others:
        for rank, (theirs, _) in enumerate(self._gathered(kv)):
            yield rank, theirs

    def all_with_gradients(self, kv: torch.Tensor, gradient: torch.Tensor) -> OthersWithGradients:
        sizes = [held(place) for place in self.places]
        sums = gradient.new_zeros(len(sizes), *self._filled(gradient).shape)
        for rank, (theirs, size) in enumerate(self._gathered(kv)):
            yield rank, theirs, sums[rank].narrow(2, 0, size)
        own = torch.empty_like(sums[0])
        reduce_scatter(own, sums.flatten(0, 1), group=self.axis.group)
        gradient.copy_(own.narrow(2, 0, gradient.shape[2]))

    def _gathered(self, kv):
        filled = self._filled(kv)
        everything = kv.new_empty(self.axis.size, *filled.shape)
        all_gather(everything.flatten(0, 1), filled, group=self.axis.group)
        sizes = [held(place) for place in self.places]
        return [(part.narrow(2, 0, size), size) for part, size in zip(everything, sizes)]

    def _filled(self, x):
        """(2, B, longest, K, D)."""
        longest = max(held(place) for place in self.places)
        return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - x.shape[2])).contiguous()


# ---- 2. the arithmetic


def attention_over(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    axis: Axis,
    length: int,
    travel: type[Travel] = Ring,
    balanced: bool = True,
) -> torch.Tensor:
    """Causal attention of this rank's positions to those of all ranks of the axis.

    q (B, T_local, H, D), k and v (B, T_local, K, D), rotated to their true positions; length of
    the whole sequence -> (B, T_local, H·D). Every rank of the axis calls it.
    """
    places = positions(length, axis.size, balanced)
    return _Attention.apply(q, k, v, travel(axis, places), places, axis.index).flatten(2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, travel, places, here):
        exact = torch.promote_types(q.dtype, torch.float32)
        B, T, H, _ = q.shape
        out = torch.zeros(q.shape, dtype=exact, device=q.device)
        lse = torch.full((B, H, T), -torch.inf, dtype=exact, device=q.device)
        kv = torch.stack((k, v))  # (2, B, T_local, K, D): one message for both
        with in_parts():
            for rank, (keys, values) in travel.all(kv):
                for rows, seen, causal in products(places[here], places[rank]):
                    part = attend(q[:, rows], keys[:, seen], values[:, seen], causal)
                    out[:, rows], lse[..., rows] = merge(out[:, rows], lse[..., rows], *part)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse)
        ctx.travel, ctx.places, ctx.here = travel, places, here
        return out

    @staticmethod
    def backward(ctx, dout):
        q, kv, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = torch.zeros_like(kv, dtype=lse.dtype)
        for rank, (keys, values), sums in ctx.travel.all_with_gradients(kv, dkv):
            for rows, seen, causal in products(ctx.places[ctx.here], ctx.places[rank]):
                parts = [x[:, rows] for x in (dout, q)]
                theirs = [x[:, seen] for x in (keys, values)]
                whole = out[:, rows], lse[..., rows]
                dq_part, dk, dv = attend_backward(*parts, *theirs, *whole, causal)
                dq[:, rows] += dq_part
                sums[0, :, seen] += dk
                sums[1, :, seen] += dv
        dk, dv = dkv.to(kv.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None
