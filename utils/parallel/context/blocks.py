"""Attention of some queries to some keys, in a form that can be merged with other results.

    out, lse = attend(q, k, v, causal)                          softmax(q kᵀ / √D) v
    out, lse = merge(out, lse, *attend(q, other_k, other_v, False))
    dq, dk, dv = attend_backward(dout, q, k, v, out, lse, causal)

A softmax over all keys can be assembled from softmaxes over subsets of them; in addition to the
results it needs only the logarithm of each sum of exponentials, lse (Milakov and Gimelshein,
arXiv:1805.02867; FlashAttention, arXiv:2205.14135). Given the lse over *all* keys, the gradients
for some keys need nothing else from the others.

Shapes: q (B, T, H, D), k and v (B, S, K, D) with H a multiple of K, out like q, lse (B, H, T). lse
is fp32, or fp64 if the inputs are.

Fused kernels compute each block on the CPU, and in 16 bits on a GPU; other cases are written out in
torch. (The GPU's kernels were not run here for lack of a GPU.)
"""

import torch

Kernel = torch.ops.aten


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse). causal: queries and keys are at the same positions. Inputs must not be empty: see
    `positions.products`."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]  # (B, heads, positions, D)
    if q.device.type == "cpu":
        out, lse = Kernel._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal)
    elif _is_fused(q):
        out, lse, *_ = Kernel._scaled_dot_product_flash_attention(*heads, 0.0, causal)
    else:
        out, lse = _written_out(*heads, causal)
    return out.transpose(1, 2), lse


def merge(
    out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attention of the same queries to two sets of keys into attention to both.

    Each result is weighted by its share of the sum of exponentials. Shares are computed from
    differences of logarithms, so nothing overflows, however large the scores are.
    """
    total = torch.logaddexp(lse, more_lse)
    shares = [(part - total).exp().transpose(1, 2)[..., None] for part in (lse, more_lse)]
    return out * shares[0] + more * shares[1], total


def attend_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of these queries and keys; dout, out and lse belong to attention to all keys."""
    heads = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    if q.device.type == "cpu":
        found = Kernel._scaled_dot_product_flash_attention_for_cpu_backward(
            *heads, lse, 0.0, causal
        )
    elif _is_fused(q):
        none = torch.empty(0, dtype=torch.int64, device=q.device)  # no dropout, no packed lengths
        found = Kernel._scaled_dot_product_flash_attention_backward(
            *heads, lse, none, none, q.shape[1], k.shape[1], 0.0, causal, none, none
        )
    else:
        found = _written_out_backward(*heads, lse, causal)
    return tuple(gradient.transpose(1, 2) for gradient in found)


def _is_fused(q):
    return q.dtype in (torch.bfloat16, torch.float16)


# ---- the same in plain torch: one block's scores are in memory at a time


def _scores(q, k, causal):
    """(B, H, T, S) in lse's type."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(exact) @ _for_each_query(k, q).to(exact).mT / q.shape[-1] ** 0.5
    if causal:
        before = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~before, -torch.inf)
    return scores


def _for_each_query(x, q):
    """(B, K, S, D) -> (B, H, S, D)."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _written_out(q, k, v, causal):
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return (weights @ _for_each_query(v, q).to(weights.dtype)).to(q.dtype), lse


def _written_out_backward(dout, q, k, v, out, lse, causal):
    weights = (_scores(q, k, causal) - lse[..., None]).exp()  # (B, H, T, S)
    exact, groups = weights.dtype, (k.shape[1], -1)
    dout, scale = dout.to(exact), q.shape[-1] ** 0.5
    dv = weights.mT @ dout
    dweights = dout @ _for_each_query(v, q).to(exact).mT
    dscores = weights * (dweights - (dout * out.to(exact)).sum(-1, keepdim=True)) / scale
    dq, dk = dscores @ _for_each_query(k, q).to(exact), dscores.mT @ q.to(exact)
    dk, dv = (x.unflatten(1, groups).sum(dim=2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
