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
        ### BEGIN SOLUTION: return x, as it is (x.view_as(x): autograd wants a new object)
        return x.view_as(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION: x was used by all ranks, so what is its gradient?
        dx = dy.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx)
        return dx
        ### END SOLUTION


class Leave(torch.autograd.Function):
    """g: out of the layers that the ranks share. `Leave.apply(x)`."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION: every rank has a partial result: return their sum
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y)
        return y
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION: y = x + what the others add: what is the gradient of x?
        return dy
        ### END SOLUTION


# ---- b · column, row, MLP


def column(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's outputs only. sizes: how many outputs each rank has."""
    weight, bias = linear.weight.data, linear.bias.data
    ### BEGIN SOLUTION: this rank's part of weight and of bias, in memory of their own (.clone())
    weight, bias = part(weight, 0, sizes).clone(), part(bias, 0, sizes).clone()
    ### END SOLUTION
    return as_linear(weight, bias)


def row(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's inputs only. Its bias stays whole: who adds it, and when?"""
    weight, bias = linear.weight.data, linear.bias.data
    ### BEGIN SOLUTION: this rank's part of weight, in memory of its own
    weight = part(weight, 1, sizes).clone()
    ### END SOLUTION
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
        ### BEGIN SOLUTION: f, gate and up, the product with down's weight, g, and then the bias
        x = Enter.apply(x)
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)  # (B, T, M_local)
        y = Leave.apply(F.linear(hidden, self.down_proj.weight))
        return y + self.down_proj.bias
        ### END SOLUTION


# ---- c · attention


def head_sizes(heads: int, kv_heads: int, head_size: int) -> tuple[tuple, tuple]:
    """How many outputs of q, and how many of k and v, each rank computes.

    heads = kv_heads times a whole number: so many query heads attend to one key-value head.
    """
    kv_shares = shares(kv_heads, dist.get_world_size())  # key-value heads of each rank
    ### BEGIN SOLUTION: (outputs of q by rank, outputs of k by rank): whole heads, groups together
    group = heads // kv_heads
    q_sizes = tuple(share * group * head_size for share in kv_shares)
    return q_sizes, tuple(share * head_size for share in kv_shares)
    ### END SOLUTION


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
        ### BEGIN SOLUTION: f once, q, k, v, attend, the product with o's weight, g, the bias
        x = Enter.apply(x)
        y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
        return Leave.apply(F.linear(y, self.o_proj.weight)) + self.o_proj.bias
        ### END SOLUTION

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
    ### BEGIN SOLUTION: the largest logit of all ranks, Σ exp and the target's logit through Leave
    largest = logits.detach().amax(dim=-1)  # (B, T)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[..., None]
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    local = (targets - first).where(mine, 0)
    own = logits.gather(-1, local[..., None]).squeeze(-1).where(mine, 0.0)  # (B, T)
    total, target = Leave.apply(torch.stack((logits.exp().sum(dim=-1), own)))
    return (total.log() - target).mean()
    ### END SOLUTION
