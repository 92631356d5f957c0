"""Lab 06: the Megatron layer, five steps in one file.

    y = ParallelMLP(mlp)(x)                     # equals mlp(x), with 1/N of the weights per rank
    y = ParallelAttention(attention)(x, cos, sin)
    loss = vocabulary_loss(logits, targets, sizes)
    y = SequenceMLP(norm, mlp)(x, length)       # and with 1/N of the positions between the matrices

Every rank begins with the same whole layer and keeps its shard. `part` (given) returns a rank's
shard of a tensor. A single rank need not communicate. Tensors are kept at most until the backward
pass: after the step only results and gradients are left, none of them a view of a larger tensor
(except for shards that were padded). The autograd functions in a and e keep no tensors at all.
Without gradients, too, inputs are not changed, and the same is sent. Use torch and
torch.distributed, not `utils.parallel` or `torch.distributed.tensor`: they are what you build.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from utils.models.ops import rotate
from utils.shares import shares


def part(tensor: torch.Tensor, dim: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Given: this rank's shard of a tensor, a view. sizes: the length of each rank's shard."""
    return tensor.split(list(sizes), dim=dim)[dist.get_rank()]


# ---- a · the conjugate pair


class CopyToRegion(torch.autograd.Function):
    """f: the entry to the region, the layers that are split among the ranks.

    forward: x, not a copy of it. backward: one all-reduce, of a tensor of dy's shape and type; dy
    itself is not changed, since others may hold it too.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("return x unchanged (x.view_as(x): autograd needs a new object)")

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("x was used by all ranks, so what is its gradient?")


class ReduceFromRegion(torch.autograd.Function):
    """g: the exit from the region.

    forward: one all-reduce, of a tensor of x's shape and type; x itself is not changed. backward:
    nothing is sent or copied.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("every rank has a partial result: return their sum")

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("y = x + the other ranks' results: what is the gradient of x?")


def copy_to_region(x: torch.Tensor) -> torch.Tensor:
    """Given: f."""
    return CopyToRegion.apply(x)


def reduce_from_region(x: torch.Tensor) -> torch.Tensor:
    """Given: g."""
    return ReduceFromRegion.apply(x)


# ---- b · column, row, MLP


def column(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's outputs only, in memory of its own.

    sizes: the number of outputs of each rank, equal or not, possibly none.
    """
    weight, bias = linear.weight.data, linear.bias.data
    raise NotImplementedError(
        "this rank's shard of weight and bias, in memory of their own (.clone())"
    )
    return as_linear(weight, bias)


def row(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's inputs only, in memory of its own. sizes: inputs by rank.

    Its bias is not split: when should it be added?
    """
    weight, bias = linear.weight.data, linear.bias.data.clone()
    raise NotImplementedError("this rank's shard of weight, in memory of its own")
    return as_linear(weight, bias)


def as_linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    """Given: a linear layer with these weights (outputs, inputs)."""
    layer = nn.Linear(1, 1, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


class ParallelMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with its M columns split. `mlp`: the whole layer, with biases.

    A rank keeps its shards and nothing else; a forward pass calls one all-reduce and a backward
    pass one, each of a tensor like x, and they multiply only with the shards.
    """

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
    """The numbers of outputs of q, and of k and v, that each rank computes.

    heads is a multiple of kv_heads: heads // kv_heads query heads attend to each key-value head.
    There are at least as many key-value heads as ranks.
    """
    kv_shares = shares(kv_heads, dist.get_world_size())  # key-value heads of each rank
    raise NotImplementedError(
        "(outputs of q by rank, outputs of k by rank): whole heads, groups together"
    )


class ParallelAttention(nn.Module):
    """Causal grouped-query attention, with its heads split. `attention`: the whole layer.

    Memory, messages and work are as in ParallelMLP.
    """

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.head_size = attention.head_size
        heads = attention.q_proj.out_features // self.head_size
        kv_heads = attention.k_proj.out_features // self.head_size
        q_sizes, kv_sizes = map(tuple, head_sizes(heads, kv_heads, self.head_size))
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
        """Given: (B, T, outputs) each -> (B, T, outputs of q), for any number of heads."""
        q, k, v = (t.unflatten(-1, (-1, self.head_size)) for t in (q, k, v))  # (B, T, heads, D)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, D)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.transpose(1, 2).flatten(2)


# ---- d · the loss

IGNORED = -100  # the target of a token that does not count: padding, a prompt


def vocabulary_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    sizes: tuple[int, ...],
    smoothing: float = 0.0,
    z: float = 0.0,
) -> torch.Tensor:
    """The mean over the tokens that count, the same bits on every rank; 0 if none counts.

    The loss of a token, with Z = Σ exp(logits) over all V words:

        log Z − (1 − smoothing) · target's logit − smoothing · mean of all logits + z · (log Z)²

    logits     (B, T, V_local): this rank's words, fp64, fp32 or bf16; where smoothing is 0, −inf
               for a word that is masked
    targets    (B, T), indices into the whole vocabulary, or IGNORED
    sizes      the number of words of each rank: at least one, not always equal
    Computed in fp64 for fp64, otherwise in fp32. At most as much is sent as by three all-reduces of
    one value per token, and nothing in the backward pass. For it, one tensor of V_local values per
    token is kept, and a few single values per token; no tensor is ever longer than V_local.
    """
    first = sum(sizes[: dist.get_rank()])  # the index of this rank's first word
    raise NotImplementedError(
        "what a rank can compute itself, what it needs from others, and the mean"
    )


# ---- e · the sequence


def all_positions(x: torch.Tensor, length: int) -> torch.Tensor:
    """One all-gather, (B, T_local, C) -> (B, length, C).

    Rank r has `shares(length, N)[r]` consecutive positions, possibly none. The tensors of a
    collective have equal lengths: shorter ones are padded to the longest, and no further.
    """
    raise NotImplementedError(
        "gather padded tensors of equal length; concatenate them without the padding"
    )


def own_positions_summed(x: torch.Tensor) -> torch.Tensor:
    """One reduce-scatter, (B, T, C) -> (B, T_local, C), of tensors of equal length as above."""
    raise NotImplementedError("a padded tensor for each rank; the result is the sum of this rank's")


def filled_up(x: torch.Tensor, length: int) -> torch.Tensor:
    """Given: (B, positions, C) -> (B, length, C), zeros at the end."""
    return F.pad(x, (0, 0, 0, length - x.shape[1])).contiguous()


class GatherToRegion(torch.autograd.Function):
    """f for a split sequence: (B, T_local, C) -> (B, T, C)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, length: int) -> torch.Tensor:
        raise NotImplementedError("every rank needs all positions")

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        raise NotImplementedError("all ranks used x: what is its gradient? (None: for the length)")


class ReduceScatterFromRegion(torch.autograd.Function):
    """g for a split sequence: this rank's positions of the sum.

    (B, T, C) -> (B, T_local, C)
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("each rank gets its own positions of the sum over the ranks")

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("x has all positions: where are the gradients of the others?")


def gather_to_region(x: torch.Tensor, length: int) -> torch.Tensor:
    """Given: f for a split sequence; length: T."""
    return GatherToRegion.apply(x, length)


def reduce_scatter_from_region(x: torch.Tensor) -> torch.Tensor:
    """Given: g for a split sequence."""
    return ReduceScatterFromRegion.apply(x)


class SequenceMLP(nn.Module):
    """x + mlp(norm(x)); outside the matrices a rank has only its own positions.

    norm, mlp: the whole layers. A rank keeps the norm and its shards of mlp. A forward pass calls
    one all-gather and one reduce-scatter, as does a backward pass. For the backward pass it keeps
    one tensor of all positions, (B, T, C), in addition to what the MLP keeps of its own columns and
    the norm of its own positions.
    """

    def __init__(self, norm: nn.Module, mlp: nn.Module):
        super().__init__()
        sizes = shares(mlp.gate_proj.out_features, dist.get_world_size())
        self.norm = norm
        self.gate_proj, self.up_proj = column(mlp.gate_proj, sizes), column(mlp.up_proj, sizes)
        self.down_proj = row(mlp.down_proj, sizes)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """(B, T_local, C) -> (B, T_local, C), this rank's positions; length: T."""
        raise NotImplementedError(
            "what is done to a rank's own positions, and what to all of them?"
        )


def sum_partial_gradients(layer: SequenceMLP) -> None:
    """After the backward passes of a step, make every `.grad` of the layer that of the whole batch.

    Some parameters have seen only their rank's positions. Sum their gradients, and no others, over
    the ranks, in one all-reduce.
    """
    raise NotImplementedError("which parameters are these?")
