"""Lab 07: one sequence on N ranks, and attention over all of it.

    out, lse = merge(out, lse, more, more_lse)              # two attentions of the same queries
    out, lse = ring_attention(q, k, v, length)              # keys and values go round
    dq, dk, dv = ring_attention_backward(dout, q, k, v, out, lse, length)
    out, lse = zigzag_attention(q, k, v, length)            # an early and a late block on each rank
    out = ulysses_attention(q, k, v, length)                # positions for heads, and back

Shapes: q and out (B, T, H, D), k and v (B, T, K, D) with H a multiple of K, lse (B, T, H): the
logarithm of each query's sum of exponentials. T are this rank's positions of `length`; T differs by
rank where N does not divide. Everything is causal: a position looks at itself and at those before.

Inputs stay as they are, and nothing is kept when a function is done. Everything that you start is
waited for. Write with torch and torch.distributed, not with `utils.parallel` or
`torch.distributed.tensor`: they are what you build.
"""

import torch
import torch.distributed as dist

from utils.shares import shares

# ---- given: attention of some queries to some keys


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Given: (out, lse) of q (B, T, H, D) that looks at k and v (B, S, K, D), S > 0.

    causal: queries and keys are the same positions, and each looks at itself and those before;
    False: every query looks at every key.
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
    """Given: (dq, dk, dv), what these queries and these keys add to the gradients.

    dout, out and lse: of the queries' attention to *all* keys, of which k are some.
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
    """Two attentions of the same queries, to different keys, as one to all of these keys.

    out, more        (B, T, H, D) in fp64, fp32 or bf16; the result has their type
    lse, more_lse    (B, T, H) in fp64 for fp64, else in fp32; so is the result, and so it is
                     computed
    Sums of exponentials may be too large, or too small, for any type: only their logarithms are
    there. A query that has seen no key yet has lse −inf, and zeros in out; where neither has seen
    one, the result is zeros and −inf, too. A NaN that goes in comes out.
    """
    raise NotImplementedError(
        "the logarithm of both sums together, and each result by its share of it"
    )


# ---- b · the ring, forward


def pass_on(block: torch.Tensor, length: int) -> tuple[torch.Tensor, list[dist.Work]]:
    """Starts to send `block` to the next rank, and to receive one from the rank before.

    block (2, B, S, K, D) -> (coming, works): coming (2, B, length, K, D), filled when all works
    have been waited for. Until then block must stay as it is.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    raise NotImplementedError("make room for what comes, start both messages, and wait for none")


def wait(works: list[dist.Work]) -> None:
    """Given: waits for messages."""
    for work in works:
        work.wait()


def ring_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of this rank's positions, which look at those of all ranks.

    Rank r has `shares(length, N)[r]` neighbouring positions, at least one, behind those of the
    ranks before it. Types: fp64 or fp32, lse like out.

    Messages: sends to the next rank and receives from the rank before; a rank sends a block, keys
    and values of one rank, N − 1 times at most. While it computes with one block, the next one is
    under way to it, and that one to the next rank. Blocks that this rank's positions do not see are
    passed on, and not computed with. A rank never holds more than two blocks of others, nor makes
    scores of more than its queries and one block.
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
    """(dq, dk, dv) of this rank's positions, as one rank would have them.

    Positions, messages and work as in `ring_attention`; out and lse are what it returned. The
    gradients of keys and values travel too, to the next rank as the blocks do, N times at most:
    each rank adds its part. Whenever a rank computes and has more to receive, a receive is under
    way, and a send where it has more to send.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, block = shares(length, size), torch.stack((k, v))
    raise NotImplementedError("blocks as before; each gradient follows its block, one turn behind")


# ---- c, the other way · zigzag


def zigzag_positions(length: int, ranks: int) -> list[tuple[range, range]]:
    """(early, late) of each rank: the sequence in 2N blocks, of which rank r has the r-th from the
    front and the r-th from the back.

    Blocks are `shares(length, 2 * ranks)` long; none is empty: length is 2N or more.
    """
    raise NotImplementedError("two ranges for each rank")


def zigzag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ring_attention` where the positions of q, k and v are this rank's two blocks, early first.

    Of another rank's block only what this rank's positions see is computed with: where blocks are
    equal, all ranks multiply equally much. Messages and memory as in `ring_attention`.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    places = zigzag_positions(length, size)
    early = len(places[rank][0])  # how many of this rank's positions are early
    block = torch.stack((k, v))
    raise NotImplementedError(
        "the ring again; who sees what of a rank before, and of a rank behind?"
    )


# ---- d · Ulysses


def heads_of_ranks(
    heads: int, kv_heads: int, ranks: int
) -> tuple[list[list[int]], list[list[int]]]:
    """(query heads, key-value heads) that each rank computes, as lists of their numbers.

    Rank r has `shares(heads, ranks)[r]` neighbouring query heads, and the key-value heads that
    these look at, each once. Query head h looks at key-value head h // (heads // kv_heads). There
    may be fewer key-value heads than ranks: then several ranks have the same one. Raises ValueError
    if there are fewer query heads than ranks.
    """
    raise NotImplementedError(
        "refuse too many ranks; neighbouring query heads; which keys do they need?"
    )


def all_to_all(parts: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """One all-to-all: parts[r] goes to rank r, and from rank r comes a tensor of shapes[r]."""
    raise NotImplementedError(
        "one flat tensor to send, one to receive, and how many numbers each rank has"
    )


def ulysses_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int
) -> torch.Tensor:
    """out of this rank's positions, which look at those of all ranks; positions as in
    `ring_attention`.

    Messages: all-to-alls. Two will do, four are allowed (q, k, v, and the results); to each rank go
    this rank's positions of the heads that it computes, and nothing else: a key-value head once,
    however many query heads there look at it. Only these heads are computed. Raises ValueError,
    before anything is sent, if there are fewer query heads than ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = shares(length, size)  # positions of each rank
    raise NotImplementedError(
        "positions for heads, attention as one rank has it, heads for positions"
    )
