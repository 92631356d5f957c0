"""Lab 06: the Megatron layer, five steps of one file.

    y = ParallelMLP(mlp)(x)                     # equal to mlp(x), with 1/N of the weights on a rank
    y = ParallelAttention(attention)(x, cos, sin)
    loss = vocabulary_loss(logits, targets, sizes)
    y = SequenceMLP(norm, mlp)(x, length)       # and with 1/N of the positions between the matrices

Every rank begins with the same whole layer and keeps its part. `part` (given) cuts a tensor. On one
rank nothing needs to travel. What a function makes is kept for the backward pass at most: when the
step is over, results and gradients are left, none of them a part of a larger tensor (but for pieces
that were filled up). The functions of autograd in a and e keep no tensor at all. Where nobody asks
for gradients, what is given stays as it is and what is sent is the same. Write with torch and
torch.distributed, not with `utils.parallel` or `torch.distributed.tensor`: they are what you build.
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


class CopyToRegion(torch.autograd.Function):
    """f: into the region, the layers that the ranks share.

    forward: x, not a copy of it. backward: one all-reduce, of a tensor of dy's shape and type; dy
    itself stays as it is, others may hold it too.
    """

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


class ReduceFromRegion(torch.autograd.Function):
    """g: out of the region.

    forward: one all-reduce, of a tensor of x's shape and type; x itself stays as it is. backward:
    nothing is sent and nothing copied.
    """

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


def copy_to_region(x: torch.Tensor) -> torch.Tensor:
    """Given: f."""
    return CopyToRegion.apply(x)


def reduce_from_region(x: torch.Tensor) -> torch.Tensor:
    """Given: g."""
    return ReduceFromRegion.apply(x)


# ---- b · column, row, MLP


def column(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's outputs only, in memory of its own.

    sizes: how many outputs each rank has, equal or not; perhaps none.
    """
    weight, bias = linear.weight.data, linear.bias.data
    ### BEGIN SOLUTION: this rank's part of weight and of bias, in memory of their own (.clone())
    weight, bias = part(weight, 0, sizes).clone(), part(bias, 0, sizes).clone()
    ### END SOLUTION
    return as_linear(weight, bias)


def row(linear: nn.Linear, sizes: tuple[int, ...]) -> nn.Linear:
    """The same layer with this rank's inputs only, in memory of its own. sizes: how many each has.

    Its bias stays whole: who adds it, and when?
    """
    weight, bias = linear.weight.data, linear.bias.data.clone()
    ### BEGIN SOLUTION: this rank's part of weight, in memory of its own
    weight = part(weight, 1, sizes).clone()
    ### END SOLUTION
    return as_linear(weight, bias)


def as_linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
    """Given: a linear layer with these weights (outputs, inputs)."""
    layer = nn.Linear(1, 1, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight, layer.bias = nn.Parameter(weight), nn.Parameter(bias)
    return layer


class ParallelMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), its M columns shared out. `mlp`: the whole layer, with biases.

    A rank keeps its parts, nothing else; a forward pass makes one all-reduce and a backward pass
    one, each of a tensor like x, and they multiply with nothing but the parts.
    """

    def __init__(self, mlp: nn.Module):
        super().__init__()
        sizes = shares(mlp.gate_proj.out_features, dist.get_world_size())
        self.gate_proj, self.up_proj = column(mlp.gate_proj, sizes), column(mlp.up_proj, sizes)
        self.down_proj = row(mlp.down_proj, sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, T, C), the same on every rank."""
        ### BEGIN SOLUTION: f, gate and up, the product with down's weight, g, and then the bias
        x = copy_to_region(x)
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)  # (B, T, M_local)
        y = reduce_from_region(F.linear(hidden, self.down_proj.weight))
        return y + self.down_proj.bias
        ### END SOLUTION


# ---- c · attention


def head_sizes(heads: int, kv_heads: int, head_size: int) -> tuple[tuple, tuple]:
    """How many outputs of q, and how many of k and v, each rank computes.

    heads = kv_heads times a whole number: so many query heads attend to one key-value head.
    There are at least as many key-value heads as ranks.
    """
    kv_shares = shares(kv_heads, dist.get_world_size())  # key-value heads of each rank
    ### BEGIN SOLUTION: (outputs of q by rank, outputs of k by rank): whole heads, groups together
    group = heads // kv_heads
    q_sizes = tuple(share * group * head_size for share in kv_shares)
    return q_sizes, tuple(share * head_size for share in kv_shares)
    ### END SOLUTION


class ParallelAttention(nn.Module):
    """Causal grouped-query attention, its heads shared out. `attention`: the whole layer.

    Memory, messages and work: as ParallelMLP.
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
        ### BEGIN SOLUTION: f once, q, k, v, attend, the product with o's weight, g, the bias
        x = copy_to_region(x)
        y = self.attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), cos, sin)
        return reduce_from_region(F.linear(y, self.o_proj.weight)) + self.o_proj.bias
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
    targets    (B, T), numbers in the whole vocabulary, or IGNORED
    sizes      how many words each rank has: at least one, not always alike
    Computed in fp64 for fp64, else in fp32. No more is sent than three all-reduces of one number a
    token do, nothing in the backward pass. For the backward pass one tensor of V_local numbers a
    token is kept, and some single numbers a token; none is ever longer than V_local.
    """
    first = sum(sizes[: dist.get_rank()])  # the number of this rank's first word
    ### BEGIN SOLUTION: what a rank can add up alone, what it must hear from others, and the mean
    local = targets - first
    mine = (local >= 0) & (local < logits.shape[-1])  # (B, T); IGNORED is nobody's
    own = logits.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)  # keeps its input: logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[..., None]
    linear = (1 - smoothing) * (own.to(logits.dtype) - largest).where(mine, 0.0)
    if smoothing:
        linear = linear + smoothing / sum(sizes) * logits.sum(dim=-1)
    total, linear = reduce_from_region(torch.stack((logits.exp().sum(dim=-1), linear)))
    losses = total.log() - linear + z * (largest + total.log()).square()
    counts = targets != IGNORED
    return losses.where(counts, 0.0).sum() / counts.sum().clamp(min=1)
    ### END SOLUTION


# ---- e · the sequence


def all_positions(x: torch.Tensor, length: int) -> torch.Tensor:
    """One all-gather, (B, T_local, C) -> (B, length, C).

    Rank r has `shares(length, N)[r]` neighbouring positions, perhaps none. The pieces of a
    collective have equal lengths: shorter ones are filled up to the longest, and no further.
    """
    ### BEGIN SOLUTION: gather equal pieces; of each, take what is no filling, in order
    sizes = shares(length, dist.get_world_size())
    piece = filled_up(x, max(sizes))
    pieces = [torch.empty_like(piece) for _ in sizes]
    dist.all_gather(pieces, piece)
    return torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes)], dim=1)
    ### END SOLUTION


def own_positions_summed(x: torch.Tensor) -> torch.Tensor:
    """One reduce-scatter, (B, T, C) -> (B, T_local, C), in pieces of equal length as above."""
    ### BEGIN SOLUTION: a piece for each rank; what comes back is the sum of this rank's pieces
    sizes = shares(x.shape[1], dist.get_world_size())
    pieces = [filled_up(piece, max(sizes)) for piece in x.split(sizes, dim=1)]
    own = torch.empty_like(pieces[0])
    dist.reduce_scatter(own, pieces)
    return own[:, : sizes[dist.get_rank()]]
    ### END SOLUTION


def filled_up(x: torch.Tensor, length: int) -> torch.Tensor:
    """Given: (B, positions, C) -> (B, length, C), zeros at the end."""
    return F.pad(x, (0, 0, 0, length - x.shape[1])).contiguous()


class GatherToRegion(torch.autograd.Function):
    """f where the sequence is split: (B, T_local, C) -> (B, T, C)."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, length: int) -> torch.Tensor:
        ### BEGIN SOLUTION: every rank needs all positions
        return all_positions(x, length)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        ### BEGIN SOLUTION: all ranks used x: what is its gradient? (None: for the length)
        return own_positions_summed(dy), None
        ### END SOLUTION


class ReduceScatterFromRegion(torch.autograd.Function):
    """g where the sequence is split: of the sum, this rank's positions.

    (B, T, C) -> (B, T_local, C)
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION: the sum over the ranks, of which each gets its own positions
        ctx.length = x.shape[1]
        return own_positions_summed(x)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> torch.Tensor:
        ### BEGIN SOLUTION: x has all positions: who has the gradients of the others?
        return all_positions(dy, ctx.length)
        ### END SOLUTION


def gather_to_region(x: torch.Tensor, length: int) -> torch.Tensor:
    """Given: f where the sequence is split; length: T."""
    return GatherToRegion.apply(x, length)


def reduce_scatter_from_region(x: torch.Tensor) -> torch.Tensor:
    """Given: g where the sequence is split."""
    return ReduceScatterFromRegion.apply(x)


class SequenceMLP(nn.Module):
    """x + mlp(norm(x)); outside of the matrices a rank has its own positions only.

    norm, mlp: the whole layers. A rank keeps the norm and its parts of mlp. A forward pass makes
    one all-gather and one reduce-scatter, and a backward pass the same. For the backward pass it
    keeps one tensor of all positions, (B, T, C), besides what the MLP keeps of its own columns and
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
        ### BEGIN SOLUTION: what happens to a rank's own positions, and what to all?
        y = gather_to_region(self.norm(x), length)
        hidden = F.silu(self.gate_proj(y)) * self.up_proj(y)  # (B, T, M_local)
        y = reduce_scatter_from_region(F.linear(hidden, self.down_proj.weight))
        return x + y + self.down_proj.bias
        ### END SOLUTION


def sum_partial_gradients(layer: SequenceMLP) -> None:
    """After the backward passes of a step: makes every `.grad` of the layer the whole batch's.

    Some parameters have seen the positions of their rank alone. Their gradients are summed over the
    ranks, in one all-reduce of no more than these.
    """
    ### BEGIN SOLUTION: which parameters are these?
    gradients = [layer.norm.weight.grad, layer.down_proj.bias.grad]
    flat = torch.cat(gradients)
    dist.all_reduce(flat)
    for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(summed)
    ### END SOLUTION
