"""Trade positions for heads and back: every rank computes the whole sequence for some heads.

    y = ulysses_attention(q, k, v, axis, length)

Each pass takes two all-to-alls, whatever the number of ranks: queries, keys and values travel
together from positions to heads, the results from heads to positions (DeepSpeed-Ulysses,
arXiv:2309.14509). Between them is ordinary single-rank attention. There can be at most as many
ranks as query heads. If there are fewer key-value heads than ranks, several ranks compute with the
same head, which is sent to each of them: beyond that number, more ranks no longer reduce the cost
of keys and values.
"""

from functools import partial

import torch

from utils.models.gpt import causal_attention
from utils.models.tp_plan import head_shares, key_value_heads
from utils.parallel.context.positions import held, in_order, positions
from utils.parallel.experts import AllToAll
from utils.parallel.mesh import Axis


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, axis: Axis, length: int
) -> torch.Tensor:
    """Causal attention of this rank's positions to those of all ranks of the axis.

    q (B, T_local, H, D), k and v (B, T_local, K, D), rotated to their true positions; length of
    the whole sequence -> (B, T_local, H·D). Every rank of the axis calls it. Raises ValueError if
    there are more ranks than heads.
    """
    B, T, H, D = q.shape
    queries, keys = heads_of_ranks(H, k.shape[2], axis.size)
    places = positions(length, axis.size)
    travel = partial(_all_to_all, axis=axis, batch=B)
    mine, theirs = len(queries[axis.index]), len(keys[axis.index])
    parts = [
        torch.cat((q[:, :, some.start : some.stop], k[:, :, those], v[:, :, those]), dim=2)
        for some, those in zip(queries, keys)
    ]
    parts = travel(parts, [(held(place), mine + 2 * theirs) for place in places])
    parts = in_order(parts, length)  # (B, length, its heads, D)
    y = causal_attention(*parts.split((mine, theirs, theirs), dim=2)).unflatten(2, (mine, D))
    parts = [torch.cat([y[:, p.start : p.stop] for p in place], dim=1) for place in places]
    parts = travel(parts, [(T, len(heads)) for heads in queries])
    return torch.cat(parts, dim=2).flatten(2)


def heads_of_ranks(heads: int, kv_heads: int, ranks: int) -> tuple[list[range], list[list[int]]]:
    """(query heads, key-value heads) that each rank computes. Raises ValueError."""
    if ranks > heads:
        raise ValueError(
            f"cp {ranks} is more than the {heads} attention heads of a rank, but Ulysses does not "
            f"split a head: take at most {heads} ranks, or --context ring"
        )
    counts, _ = head_shares(heads, kv_heads, ranks)
    own = [range(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(ranks)]
    return own, [key_value_heads(queries, heads // kv_heads) for queries in own]


def _all_to_all(parts, shapes, axis, batch):
    """parts[r] (B, positions, heads, D) goes to rank r; from rank r comes (B, *shapes[r], D)."""
    size = parts[0].shape[-1]
    rows = torch.cat([part.reshape(-1, size) for part in parts])
    send = [part.shape[:-1].numel() for part in parts]
    receive = [batch * positions * heads for positions, heads in shapes]
    arrived = AllToAll.apply(rows, send, receive, axis.group).split(receive)
    return [part.view(batch, *shape, size) for part, shape in zip(arrived, shapes)]
