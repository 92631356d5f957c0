"""Lab 07: one sequence on N ranks, and attention over all of it.

    out, lse = merge(out, lse, more, more_lse)              # two attentions of the same queries
    out, lse = ring_attention(q, k, v, length)              # keys and values go around
    dq, dk, dv = ring_attention_backward(dout, q, k, v, out, lse, length)
    out, lse = zigzag_attention(q, k, v, length)            # an early and a late block on each rank
    out = ulysses_attention(q, k, v, length)                # positions for heads, and back

Shapes: q and out (B, T, H, D), k and v (B, T, K, D) with H a multiple of K, lse (B, T, H): the
logarithm of each query's sum of exponentials. T is the number of this rank's positions, of `length`
in total; it differs by rank if N does not divide. Everything is causal: a position attends to
itself and to earlier ones.

Inputs are not changed, and nothing is kept after a function returns. Wait on everything that you
start. Use torch and torch.distributed, not `utils.parallel` or `torch.distributed.tensor`: they are
what you build.
"""

import torch
import torch.distributed as dist

from utils.shares import shares

# ---- given: attention of some queries to some keys


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Given: (out, lse) of q (B, T, H, D) attending to k and v (B, S, K, D), S > 0.

    causal: queries and keys are the same positions, and each attends to itself and earlier ones;
    False: every query attends to every key.
    """
    scores = _scores(q, k, causal)  # (B, H, T, S)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ _heads_first(v, q)
    return out.transpose(1, 2), lse.transpose(1, 2)


def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Given: (dq, dk, dv), the contribution of these queries and keys to the gradients.

    dout, out and lse: of the queries' attention to *all* keys, of which k holds some.
    """
    weights = (_scores(q, k, causal) - lse.transpose(1, 2)[..., None]).exp()  # (B, H, T, S)
    dout, out = dout.transpose(1, 2), out.transpose(1, 2)
    dweights = dout @ _heads_first(v, q).mT
    dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    dq, dk, dv = dscores @ _heads_first(k, q), dscores.mT @ q.transpose(1, 2), weights.mT @ dout
    dk, dv = (x.unflatten(1, (k.shape[2], -1)).sum(dim=2).transpose(1, 2) for x in (dk, dv))
    return dq.transpose(1, 2), dk, dv


def _scores(q, k, causal):
    scores = q.transpose(1, 2) @ _heads_first(k, q).mT / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores


def _heads_first(x, q):
    """(B, S, K, D) -> (B, H, S, D): each key-value head for all query heads of its group."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2)


# ---- a · two partial softmaxes


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attentions of the same queries, to different keys, into one to all of these keys.

    out, more        (B, T, H, D) in fp64, fp32 or bf16; the result has their type
    lse, more_lse    (B, T, H) in fp64 for fp64, otherwise in fp32; the result is computed in, and
                     has, this type
    Sums of exponentials may be too large, or too small, for any type: only their logarithms are
    available. A query that has seen no key yet has lse −inf, and zeros in out; if it has seen none
    in either, the result is zeros and −inf too. A NaN that goes in comes out.
    """
    raise NotImplementedError(
        "the logarithm of both sums together; weight each result by its share"
    )


# ---- b · the ring, forward


def pass_on(block: torch.Tensor, length: int) -> tuple[torch.Tensor, list[dist.Work]]:
    """Start sending `block` to the next rank and receiving one from the previous rank.

    block (2, B, S, K, D) -> (coming, works): coming (2, B, length, K, D), filled when all works
    have been waited on. Until then block must not change.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError(
        "allocate the incoming block, start both messages, and wait on neither"
    )


def wait(works: list[dist.Work]) -> None:
    """Given: wait on messages."""
    for work in works:
        work.wait()


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's positions, which attend to those of all ranks.

    Rank r has `shares(length, N)[r]` consecutive positions, at least one, after those of earlier
    ranks. Types: fp64 or fp32, lse like out.

    Messages: sends to the next rank and receives from the previous one; a rank sends at most N − 1
    blocks (keys and values of one rank). While it computes with one block, the next one is on its
    way to it, and the current one on its way to the next rank. Blocks that this rank's positions do
    not see are passed on but not computed with. A rank never holds more than two received blocks,
    and never computes scores of more than its queries and one block.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = shares(length, size)  # positions of each rank
    block = torch.stack((k, v))  # (2, B, T, K, D): one message for both, in memory of its own
    raise NotImplementedError(
        "N turns: start the next messages, compute with the block that is here, wait"
    )


# ---- c, one way · its backward


def ring_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of this rank's positions, as one rank would compute them.

    Positions, messages and work as in `ring_attention`; out and lse are its results. The gradients
    of keys and values are sent to the next rank as well, like the blocks, at most N times: each
    rank adds its contribution. While a rank computes and has more to receive, a receive is in
    flight; likewise for sends.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, block = shares(length, size), torch.stack((k, v))
    raise NotImplementedError("blocks as before; each gradient follows its block, one turn behind")


# ---- c, the other way · zigzag


def zigzag_positions(length: int, ranks: int) -> list[tuple[range, range]]:
    """(early, late) of each rank: the sequence is split into 2N blocks, and rank r has the r-th
    from the front and the r-th from the back.

    Blocks are `shares(length, 2 * ranks)` long; none is empty: length is at least 2N.
    """
    raise NotImplementedError("two ranges for each rank")


def zigzag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ring_attention` for q, k and v at the positions of this rank's two blocks, early first.

    Only those parts of another rank's blocks are computed with that this rank's positions see: if
    blocks are equal, all ranks do the same number of multiplications. Messages and memory as in
    `ring_attention`.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    places = zigzag_positions(length, size)
    early = len(places[rank][0])  # number of this rank's early positions
    block = torch.stack((k, v))
    raise NotImplementedError(
        "the ring again; which positions see what of a lower rank, and of a higher?"
    )


# ---- d · Ulysses


def heads_of_ranks(
    heads: int, kv_heads: int, ranks: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(query heads, key-value heads) that each rank computes, as lists of their indices.

    Rank r has `shares(heads, ranks)[r]` consecutive query heads, and the key-value heads that these
    use, each once. Query head h uses key-value head h // (heads // kv_heads). There may be fewer
    key-value heads than ranks: then several ranks have the same one. Raises ValueError if there are
    fewer query heads than ranks.
    """
    raise NotImplementedError(
        "refuse too many ranks; consecutive query heads; which keys do they need?"
    )


def all_to_all(parts: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """One all-to-all: parts[r] goes to rank r, and a tensor of shapes[r] comes from rank r."""
    raise NotImplementedError(
        "one flat tensor to send, one to receive, and the number of elements per rank"
    )


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> torch.Tensor:
    """out of this rank's positions, which attend to those of all ranks; positions as in
    `ring_attention`.

    Messages: all-to-alls. Two are enough, four are allowed (q, k, v, and the results). Each rank is
    sent this rank's positions of the heads that it computes, and nothing else: a key-value head
    once, however many query heads there use it. A rank computes only its heads. Raises ValueError,
    before anything is sent, if there are fewer query heads than ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = shares(length, size)  # positions of each rank
    raise NotImplementedError(
        "trade positions for heads, attend as on one rank, trade heads for positions"
    )
