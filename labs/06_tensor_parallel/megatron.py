"""Lab 06: the Megatron layer, four steps of one file.

    y = ParallelMLP(mlp)(x)                     # equal to mlp(x), with 1/N of the weights on a rank
    y = ParallelAttention(attention)(x, cos, sin)
    loss = vocabulary_loss(logits, targets, sizes)

Every rank begins with the same whole layer and keeps its part. `part` (given) cuts a tensor.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from utils.models.ops import rotate
from utils.shares import shares


def part(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Given: this rank's part of a tensor, a view. sizes: the length of each rank's part."""
    return tensor.split(list(sizes), dim=dim)[dist.get_rank()]


# ---- a · the conjugate pair


class Enter(torch.autograd.Function):
    """f: into the layers that the ranks share. `Enter.apply(x)`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("return x, as it is (x.view_as(x): autograd wants a new object)")

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("x was used by all ranks, so what is its gradient?")


class Leave(torch.autograd.Function):
    """g: out of the layers that the ranks share. `Leave.apply(x)`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("every rank has a partial result: return their sum")

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("y = x + what the others add: what is the gradient of x?")


# ---- b · column, row, MLP


def column(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's outputs only. sizes: how many outputs each rank has."""
    weight, bias = linear.weight.data, linear.bias.data
    raise NotImplementedError(
        "this rank's part of weight and of bias, in memory of their own (.clone())"
    )
    return as_linear(weight, bias)


def row(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's inputs only. Its bias stays whole: who adds it, and when?"""
    weight, bias = linear.weight.data, linear.bias.data
    raise NotImplementedError("this rank's part of weight, in memory of its own")
    return as_linear(weight, bias)


def as_linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    """Given: a linear layer with these weights (outputs, inputs)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


class ParallelMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), its M columns shared out. `mlp`: the whole layer."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        sizes = shares(mlp.gate_proj.out_features, dist.get_world_size())
        self.gate_proj, self.up_proj = column(mlp.gate_proj, sizes), column(mlp.up_proj, sizes)
        self.down_proj = row(mlp.down_proj, sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C), the same on every rank."""
        raise NotImplementedError(
            "f, gate and up, the product with down's weight, g, and then the bias"
        )


# ---- c · attention


def head_sizes(heads: int, kv_heads: int, head_size: int) -> tuple[tuple, tuple]:
    """How many outputs of q, and how many of k and v, each rank computes.

    heads = kv_heads times a whole number: so many query heads attend to one key-value head.
    """
    kv_shares = shares(kv_heads, dist.get_world_size())  # key-value heads of each rank
    raise NotImplementedError(
        "(outputs of q by rank, outputs of k by rank): whole heads, groups together"
    )


class ParallelAttention(nn.Module):
    """Causal grouped-query attention, its heads shared out. `attention`: the whole layer."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.head_size = attention.head_size
        heads = attention.q_proj.out_features // self.head_size
        kv_heads = attention.k_proj.out_features // self.head_size
        q_sizes, kv_sizes = head_sizes(heads, kv_heads, self.head_size)
        self.q_proj = column(attention.q_proj, q_sizes)
        self.k_proj = column(attention.k_proj, kv_sizes)
        self.v_proj = column(attention.v_proj, kv_sizes)
        self.o_proj = row(attention.o_proj, q_sizes)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C), the same on every rank."""
        raise NotImplementedError(
            "f once, q, k, v, attend, the product with o's weight, g, the bias"
        )

    def attend(self, q, k, v, cos, sin) -> torch.Tensor:
        """Given: (B, T, outputs) each -> (B, T, outputs of q). However many heads there are."""
        q, k, v = (t.unflatten(-1, (-1, self.head_size)) for t in (q, k, v))  # (B, T, heads, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, D)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.transpose(1, 2).flatten(2)


# ---- d · the loss


def vocabulary_loss(
    logits: torch.Tensor, targets: torch.Tensor, sizes: tuple[int, ...]
) -> torch.Tensor:
    """The mean of log Σ exp(logits) − logit of the target, the same number on every rank.

    logits   (B, T, V_local): this rank's words; sizes: how many words each rank has
    targets  (B, T), numbers in the whole vocabulary
    """
    first = sum(sizes[: dist.get_rank()])  # the number of this rank's first word
    raise NotImplementedError(
        "the largest logit of all ranks, Σ exp and the target's logit through Leave"
    )
