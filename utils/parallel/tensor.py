"""Tensor parallelism: every rank multiplies with its part of every matrix.

    tensor_parallel(model, mesh.tp)                  in place, before the optimizer is made
    loss = loss_function(model)(model(x), y)         model(x): logits of this rank's words
    loss.backward()

One pair of matrices needs one exchange each way (Shoeybi et al., arXiv:1909.08053):

    column   the first matrix is split by its outputs: q, k and v by heads, gate and up
    row      the second by its inputs, which are those outputs: o, down; partial results add up

The model's own code does not change: its modules hold less. Parameters stay plain and keep their
names; one that is split has `parameter.tp_split`, which tells which part of the whole it is.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from utils.models.gpt import MLP, Attention, RMSNorm
from utils.models.moe import Expert, MoE
from utils.parallel.mesh import Axis, shares
from utils.parallel.tp_ops import Region, all_of, enter, leave, own_of
from utils.parallel.vocabulary import (
    VocabularyEmbedding,
    VocabularyLinear,
    gathered_logits,
    loss_function,
    vocabulary_cross_entropy,
)

__all__ = [
    "Split",
    "column",
    "gathered_logits",
    "loss_function",
    "reduce_replicated_gradients",
    "row",
    "split_parameter",
    "tensor_parallel",
    "vocabulary_cross_entropy",
]


@dataclass(frozen=True)
class Split:
    """Which part of a whole parameter this rank holds."""

    dim: int  # the dimension that is split
    axis: Axis
    sizes: tuple[int, ...]  # each rank's length on it, in the order of axis.ranks

    @property
    def start(self):
        return sum(self.sizes[: self.axis.index])

    def part(self, whole):
        """This rank's part of a whole tensor: a view."""
        return whole.narrow(self.dim, self.start, self.sizes[self.axis.index])

    @torch.no_grad()
    def whole(self, part):
        """The whole tensor on every rank of the axis, each of which gives its part."""
        shape = list(part.shape)
        shape[self.dim] = max(self.sizes)
        filled = part.new_zeros(shape)  # a collective wants equal parts
        filled.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        parts = [torch.empty_like(filled) for _ in self.sizes]
        dist.all_gather(parts, filled, group=self.axis.group)
        kept = [one.narrow(self.dim, 0, size) for one, size in zip(parts, self.sizes)]
        return torch.cat(kept, dim=self.dim)


def split_parameter(parameter, dim, axis, sizes):
    """A new parameter with this rank's part of `parameter`; None stays None."""
    if parameter is None:
        return None
    split = Split(dim, axis, tuple(sizes))
    part = nn.Parameter(split.part(parameter.detach()).clone(), parameter.requires_grad)
    part.tp_split = split
    return part


# ---- the two kinds of matrix


def column(linear, axis, sizes=None):
    """Splits an nn.Linear by its outputs, in place; it then returns this rank's outputs.

    Its input must have come through `enter`, once for all matrices that read it.
    sizes   outputs of each rank; None: equal, or one more on the first ranks
    """
    sizes = sizes or shares(linear.out_features, axis.size)
    linear.weight = split_parameter(linear.weight, 0, axis, sizes)
    linear.bias = split_parameter(linear.bias, 0, axis, sizes)
    linear.out_features = sizes[axis.index]
    return linear


def row(linear, region, sizes=None):
    """A RowLinear in place of an nn.Linear: split by its inputs."""
    sizes = sizes or shares(linear.in_features, region.axis.size)
    return RowLinear(split_parameter(linear.weight, 1, region.axis, sizes), linear.bias, region)


class RowLinear(nn.Module):
    """A matrix that is split by its inputs: partial results, then their sum over the ranks.

    `weight` (outputs, inputs of this rank). The bias is not split: it is added once, to the sum.
    """

    def __init__(self, weight, bias, region):
        super().__init__()
        self.weight, self.bias, self.region = weight, bias, region

    def forward(self, x):
        y = self.region.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class SharedHeads(nn.Module):
    """k or v where there are fewer key-value heads than ranks: every rank keeps all of the matrix
    and computes the heads that its queries attend to.

    The gradient of the matrix is the sum over the ranks, which takes an all-reduce of its own.
    """

    def __init__(self, linear, axis, head_size, heads):
        super().__init__()
        self.weight, self.bias, self.axis = linear.weight, linear.bias, axis
        self.head_size, self.heads = head_size, heads

    def forward(self, x):
        weight = self._pick(self.weight)
        return F.linear(x, weight, None if self.bias is None else self._pick(self.bias))

    def _pick(self, parameter):
        by_head = enter(parameter, self.axis).unflatten(0, (-1, self.head_size))
        return by_head[self.heads].flatten(0, 1)


# ---- a whole model


def tensor_parallel(model, axis, sequence_parallel=False):
    """Splits a GPT, or a stage of one, over the ranks of `axis`, in place; returns it.

    Every rank must come with the same weights. A layer then makes two all-reduces in the forward
    pass and two in the backward pass, the embedding one (forward), lm_head one (backward).

    sequence_parallel   between the split layers every rank keeps T/N of the positions; each
                        all-reduce becomes a reduce-scatter and an all-gather. Call
                        `reduce_replicated_gradients` once a step.
    Raises ValueError where there are more ranks than heads, MLP columns or words.
    """
    if axis.size == 1:
        return model
    region = Region(axis, sequence_parallel)
    split = {}  # id of a whole parameter -> its part: a tied matrix is split once
    for name, module in list(model.named_modules()):
        if isinstance(module, Attention):
            _split_attention(module, region)
        elif isinstance(module, MLP):
            _split_mlp(module, region)
        elif isinstance(module, MoE):
            _split_experts(module, region)
        elif name.endswith("embed_tokens"):
            weight = _split_words(module.weight, axis, split)
            _replace(model, name, VocabularyEmbedding(weight, region))
        elif name.endswith("lm_head"):
            weight = _split_words(module.weight, axis, split)
            bias = split_parameter(module.bias, 0, axis, weight.tp_split.sizes)
            _replace(model, name, VocabularyLinear(weight, bias, region))
    return model


def _split_attention(attention, region):
    axis, size = region.axis, attention.head_size
    heads = attention.q_proj.out_features // size
    kv_heads = attention.k_proj.out_features // size
    _check(axis, heads, "attention heads", "a head is not split")
    if kv_heads >= axis.size:  # each rank: some key-value heads and all queries that use them
        kv_shares = shares(kv_heads, axis.size)
        q_shares = tuple(share * (heads // kv_heads) for share in kv_shares)
        for linear in (attention.k_proj, attention.v_proj):
            column(linear, axis, tuple(share * size for share in kv_shares))
    else:
        q_shares = shares(heads, axis.size)
        first = sum(q_shares[: axis.index])
        queries = range(first, first + q_shares[axis.index])
        needed = _key_value_heads(queries, heads // kv_heads)
        attention.k_proj = SharedHeads(attention.k_proj, axis, size, needed)
        attention.v_proj = SharedHeads(attention.v_proj, axis, size, needed)
    sizes = tuple(share * size for share in q_shares)
    column(attention.q_proj, axis, sizes)
    attention.o_proj = row(attention.o_proj, region, sizes)

    def enter_attention(module, args):
        x, cos, *rest = args
        region.length = cos.shape[0]  # a stage of a pipeline learns it only here
        return region.enter(x), cos, *rest

    attention.register_forward_pre_hook(enter_attention)


def _key_value_heads(queries, group):
    """The key-value heads for these query heads: one for each equal group, else one for each."""
    per_query = [query // group for query in queries]
    distinct = sorted(set(per_query))
    equal = len({per_query.count(head) for head in distinct}) == 1
    return distinct if equal else per_query


def _split_mlp(mlp, region):
    axis = region.axis
    _check(axis, mlp.gate_proj.out_features, "columns of the MLP", "a column is not split")
    column(mlp.gate_proj, axis)
    column(mlp.up_proj, axis)
    mlp.down_proj = row(mlp.down_proj, region)
    mlp.register_forward_pre_hook(lambda module, args: (region.enter(args[0]), *args[1:]))


def _split_experts(moe, region):
    """Every expert as an MLP; the router stays whole and does the same on every rank.

    f stands behind the router, which reads x as it is: so its gradient, and what it gives to x, is
    whole on every rank. The weights of the choices multiply partial results, so they need f too.
    """
    axis = region.axis
    for module in moe.modules():
        if isinstance(module, Expert):
            _check(axis, module.w1.out_features, "columns of an expert", "a column is not split")
            column(module.w1, axis)
            column(module.w3, axis)
            column_sizes = module.w1.weight.tp_split.sizes
            module.w2.weight = split_parameter(module.w2.weight, 1, axis, column_sizes)
    whole = moe.compute

    def compute(experts, tokens, chosen, weights):
        partial = whole(experts, enter(tokens, axis), chosen, enter(weights, axis))
        return leave(partial, axis)

    moe.compute = compute
    if region.sequence_parallel:  # the router judges whole sequences
        moe.register_forward_pre_hook(
            lambda module, args: (all_of(args[0], axis, region.length), *args[1:])
        )
        moe.register_forward_hook(lambda module, args, y: own_of(y, axis))


def _split_words(weight, axis, split):
    _check(axis, weight.shape[0], "words of the vocabulary", "a row is not split")
    if id(weight) not in split:
        part = split_parameter(weight, 0, axis, shares(weight.shape[0], axis.size))
        split[id(weight)] = part
    return split[id(weight)]


def _replace(model, name, module):
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def _check(axis, size, what, why):
    if size < axis.size:
        raise ValueError(
            f"{axis.name} {axis.size} is more than the {size} {what}: {why}, "
            f"so take at most {size} ranks"
        )


# ---- once a step, where the sequence is split


@torch.no_grad()
def reduce_replicated_gradients(model, axis):
    """Sums, in one all-reduce, the gradients that each rank has from its own positions only.

    Needed under sequence parallelism, once a step, after the last backward pass; without it there
    is nothing to do and nothing is sent. Gradients may be DTensors of FSDP2, alike on all ranks of
    the axis.
    """
    gradients = [p.grad for p in _of_some_positions(model) if p.grad is not None]
    if not gradients:
        return
    gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=axis.group)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


def _of_some_positions(model):
    """Parameters that each rank uses for its positions only: norms, and biases of row layers."""
    modules = list(model.modules())
    if not any(getattr(getattr(m, "region", None), "sequence_parallel", False) for m in modules):
        return
    for module in modules:
        if isinstance(module, RMSNorm):
            yield module.weight
        elif isinstance(module, RowLinear) and module.bias is not None:
            yield module.bias
