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
    ### BEGIN SOLUTION: the logarithm of both sums together, and each result by its share of it
    total = torch.logaddexp(lse, more_lse)
    nothing = -torch.inf
    both = []
    for part, result in ((lse, out), (more_lse, more)):
        share = (part - total).exp().masked_fill(part == nothing, 0.0)
        both.append(result.to(total.dtype) * share[..., None])
    return (both[0] + both[1]).to(out.dtype), total
    ### END SOLUTION


# ---- b · the ring, forward


def pass_on(block: torch.Tensor, length: int) -> tuple[torch.Tensor, list[dist.Work]]:
    """Starts to send `block` to the next rank, and to receive one from the rank before.

    block (2, B, S, K, D) -> (coming, works): coming (2, B, length, K, D), filled when all works
    have been waited for. Until then block must stay as it is.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    ### BEGIN SOLUTION: make room for what comes, start both messages, and wait for none
    shape = list(block.shape)
    shape[2] = length
    coming = block.new_empty(shape)
    works = [dist.isend(block, (rank + 1) % size), dist.irecv(coming, (rank - 1) % size)]
    return coming, works
    ### END SOLUTION


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
    ### BEGIN SOLUTION: N turns: start the next messages, compute with the block that is here, wait
    out, lse = None, None
    for turn in range(size):
        owner = (rank - turn) % size  # whose positions these are
        if turn < size - 1:
            coming, works = pass_on(block, sizes[(owner - 1) % size])
        if turn == 0:
            out, lse = attend(q, *block, causal=True)
        elif owner < rank:
            out, lse = merge(out, lse, *attend(q, *block, causal=False))
        if turn < size - 1:
            wait(works)
            block = coming
    return out, lse
    ### END SOLUTION


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
    ### BEGIN SOLUTION: blocks as before; each gradient follows its block, one turn behind
    if size == 1:
        return attend_backward(dout, q, k, v, out, lse, causal=True)
    dq, arriving, grad_works = torch.zeros_like(q), None, []
    for turn in range(size):
        owner = (rank - turn) % size
        before = sizes[(owner - 1) % size]  # positions of what comes next, block or gradient
        if turn < size - 1:
            coming, works = pass_on(block, before)
        gradient = torch.zeros_like(block)
        if owner <= rank:
            dq_part, *parts = attend_backward(dout, q, *block, out, lse, causal=turn == 0)
            dq, gradient = dq + dq_part, torch.stack(parts)
        if turn:
            wait(grad_works)
            gradient += arriving  # what the ranks before have added
        arriving, grad_works = pass_on(gradient, before)
        if turn < size - 1:
            wait(works)
            block = coming
    wait(grad_works)  # the last one is of this rank's own keys and values
    return dq, arriving[0], arriving[1]
    ### END SOLUTION


# ---- c, the other way · zigzag


def zigzag_positions(length: int, ranks: int) -> list[tuple[range, range]]:
    """(early, late) of each rank: the sequence in 2N blocks, of which rank r has the r-th from the
    front and the r-th from the back.

    Blocks are `shares(length, 2 * ranks)` long; none is empty: length is 2N or more.
    """
    ### BEGIN SOLUTION: two ranges for each rank
    sizes = shares(length, 2 * ranks)
    blocks = [range(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(2 * ranks)]
    return [(blocks[rank], blocks[-1 - rank]) for rank in range(ranks)]
    ### END SOLUTION


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
    ### BEGIN SOLUTION: the ring again; who sees what of a rank before, and of a rank behind?
    out, lse = None, None
    for turn in range(size):
        owner = (rank - turn) % size
        if turn < size - 1:
            coming, works = pass_on(block, sum(map(len, places[(owner - 1) % size])))
        if turn == 0:
            out, lse = attend(q, *block, causal=True)
        elif owner < rank:  # all see its early block, nobody its late one
            seen = len(places[owner][0])
            out, lse = merge(out, lse, *attend(q, *block[:, :, :seen], causal=False))
        else:  # only the late positions see it, and all of it
            part = attend(q[:, early:], *block, causal=False)
            part = merge(out[:, early:], lse[:, early:], *part)
            out, lse = (torch.cat((x[:, :early], y), dim=1) for x, y in zip((out, lse), part))
        if turn < size - 1:
            wait(works)
            block = coming
    return out, lse
    ### END SOLUTION


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
    ### BEGIN SOLUTION: refuse too many ranks; neighbouring query heads; which keys do they need?
    if ranks > heads:
        raise ValueError(f"{ranks} ranks for {heads} query heads: a head is not split")
    counts, group = shares(heads, ranks), heads // kv_heads
    queries = [[*range(sum(counts[:r]), sum(counts[: r + 1]))] for r in range(ranks)]
    return queries, [sorted({head // group for head in mine}) for mine in queries]
    ### END SOLUTION


def all_to_all(parts: list[torch.Tensor], shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """One all-to-all: parts[r] goes to rank r, and from rank r comes a tensor of shapes[r]."""
    ### BEGIN SOLUTION: one flat tensor to send, one to receive, and how many numbers each rank has
    send = [part.numel() for part in parts]
    receive = [torch.Size(shape).numel() for shape in shapes]
    arrived = parts[0].new_empty(sum(receive))
    dist.all_to_all_single(arrived, torch.cat([part.flatten() for part in parts]), receive, send)
    return [part.view(shape) for part, shape in zip(arrived.split(receive), shapes)]
    ### END SOLUTION


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
    ### BEGIN SOLUTION: positions for heads, attention as one rank has it, heads for positions
    queries, keys = heads_of_ranks(q.shape[2], k.shape[2], size)
    batch, positions, heads, width = q.shape
    n, m = len(queries[rank]), len(keys[rank])
    parts = [
        torch.cat((q[:, :, mine], k[:, :, theirs], v[:, :, theirs]), dim=2)
        for mine, theirs in zip(queries, keys)
    ]
    arrived = all_to_all(parts, [(batch, t, n + 2 * m, width) for t in lengths])
    whole_q, whole_k, whole_v = torch.cat(arrived, dim=1).split((n, m, m), dim=2)
    group = heads // k.shape[2]
    looks_at = [keys[rank].index(head // group) for head in queries[rank]]
    out, _ = attend(whole_q, whole_k[:, :, looks_at], whole_v[:, :, looks_at], causal=True)
    shapes = [(batch, positions, len(mine), width) for mine in queries]
    return torch.cat(all_to_all(list(out.split(lengths, dim=1)), shapes), dim=2)
    ### END SOLUTION
