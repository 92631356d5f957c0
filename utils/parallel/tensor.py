"""Tensor parallelism: every rank multiplies by its slice of every matrix.

    tensor_parallel(model, mesh.tp)                  in place, before the optimizer is made
    loss = loss_function(model)(model(x), y)         model(x): logits of this rank's entries
    loss.backward()
    split_by_plan(bert, mesh.tp, TP_PLANS["bert"], heads)      a model of another library

A pair of matrices needs one exchange in each direction (Shoeybi et al., arXiv:1909.08053):

    column   the first matrix is split by its outputs: q, k and v by heads, gate and up
    row      the second by its inputs, which are those outputs: o, down; partial results add up

A table in `utils.models.tp_plan` says how each matrix is split.

The two large matrices at the ends of the model are split by vocabulary entries. The embedding looks
up the entries that this rank holds, uses zeros for the others, and sums over the ranks. The
last matrix gives each rank the logits of its own entries, (B, T, V_local), and the loss is computed
from these without ever gathering them: three values per token travel, not V.

The model's own code does not change; its modules just hold less. Parameters stay plain and keep
their names; a split one has `parameter.tp_split`, which says which slice of the whole it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from utils.models.gpt import MLP, Attention, RMSNorm, cross_entropy
from utils.models.moe import Expert, MoE
from utils.models.tp_plan import (
    KV_HEADS,
    MLP_COLUMNS,
    QUERY_HEADS,
    TP_PLAN,
    WORDS,
    head_shares,
    key_value_heads,
    planned,
)
from utils.parallel.mesh import Axis
from utils.parallel.tp_ops import (
    Region,
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    split_sequence,
)
from utils.shares import shares

IGNORED = -100  # the target of a token that does not count, as in torch's cross_entropy


@dataclass(frozen=True)
class Split:
    """The slice of a whole parameter that this rank holds."""

    dim: int  # the dimension that is split
    axis: Axis
    sizes: tuple[int, ...]  # each rank's length in that dimension, in the order of axis.ranks
    packed: int = 1  # number of matrices concatenated in that dimension; sizes: of one of them

    @property
    def start(self) -> int:
        return sum(self.sizes[: self.axis.index])

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a whole tensor; a view unless matrices are packed."""
        own = self.start, self.sizes[self.axis.index]
        parts = [one.narrow(self.dim, *own) for one in whole.chunk(self.packed, self.dim)]
        return parts[0] if self.packed == 1 else torch.cat(parts, self.dim)

    @torch.no_grad()
    def full_tensor(self, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor on every rank of the axis; each rank passes its slice."""
        if self.packed > 1:
            one = Split(self.dim, self.axis, self.sizes)
            parts = part.chunk(self.packed, self.dim)
            return torch.cat([one.full_tensor(p) for p in parts], self.dim)
        shape = list(part.shape)
        shape[self.dim] = max(self.sizes)
        filled = part.new_zeros(shape)  # a collective needs equal sizes
        filled.narrow(self.dim, 0, part.shape[self.dim]).copy_(part)
        parts = [torch.empty_like(filled) for _ in self.sizes]
        dist.all_gather(parts, filled, group=self.axis.group)
        kept = [one.narrow(self.dim, 0, size) for one, size in zip(parts, self.sizes)]
        return torch.cat(kept, dim=self.dim)


def split_parameter(
    parameter: nn.Parameter | None, dim: int, axis: Axis, sizes: Sequence[int], packed: int = 1
) -> nn.Parameter | None:
    """A new parameter with this rank's slice of `parameter`; None stays None."""
    if parameter is None:
        return None
    split = Split(dim, axis, tuple(sizes), packed)
    part = nn.Parameter(split.part(parameter.detach()).clone(), parameter.requires_grad)
    part.tp_split = split
    return part


# ---- the two kinds of matrix


def column_parallel(linear: nn.Linear, axis: Axis, sizes: Sequence[int] | None = None) -> nn.Linear:
    """Split an nn.Linear by its outputs, in place; it then returns this rank's outputs.

    Its input must have passed through `copy_to_region`, once for all matrices that read it.
    sizes   outputs per rank; None: equal, or one more on the first ranks
    """
    sizes = sizes or shares(linear.out_features, axis.size)
    linear.weight = split_parameter(linear.weight, 0, axis, sizes)
    linear.bias = split_parameter(linear.bias, 0, axis, sizes)
    linear.out_features = sizes[axis.index]
    return linear


def row_parallel(
    linear: nn.Linear, region: Region, sizes: Sequence[int] | None = None
) -> "RowParallelLinear":
    """A RowParallelLinear to replace an nn.Linear, split by its inputs."""
    sizes = sizes or shares(linear.in_features, region.axis.size)
    return RowParallelLinear(
        split_parameter(linear.weight, 1, region.axis, sizes), linear.bias, region
    )


class RowParallelLinear(nn.Module):
    """A matrix split by its inputs: it computes partial results, then sums them over the ranks.

    `weight` (outputs, inputs of this rank). The bias is not split: it is added once, to the sum.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region):
        super().__init__()
        self.weight, self.bias, self.region = weight, bias, region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.region.reduce_from(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class RowParallelConv1D(RowParallelLinear):
    """A row-parallel GPT-2 linear layer: `weight` (inputs of this rank, outputs)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region.reduce_from(x @ self.weight) + self.bias


class SharedHeads(nn.Module):
    """k or v when there are fewer key-value heads than ranks: every rank keeps the whole matrix and
    computes the heads that its queries attend to.

    The gradient of the matrix is the sum over the ranks, which takes an additional all-reduce.
    """

    def __init__(self, linear: nn.Linear, axis: Axis, head_size: int, heads: Sequence[int]):
        super().__init__()
        self.weight, self.bias, self.axis = linear.weight, linear.bias, axis
        self.head_size, self.heads = head_size, heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._pick(self.weight)
        return F.linear(x, weight, None if self.bias is None else self._pick(self.bias))

    def _pick(self, parameter):
        by_head = copy_to_region(parameter, self.axis).unflatten(0, (-1, self.head_size))
        return by_head[self.heads].flatten(0, 1)


# ---- the two matrices at the ends


class VocabularyEmbedding(nn.Module):
    """An nn.Embedding split by rows: `weight` (V_local, C)."""

    def __init__(self, weight: nn.Parameter, region: Region):
        super().__init__()
        self.weight, self.region = weight, region
        self.start = weight.tp_split.start

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(B, T) -> (B, T, C), or this rank's positions of it."""
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.region.reduce_from(x.masked_fill(elsewhere[..., None], 0.0))


class VocabularyLinear(nn.Module):
    """The last matrix, split by rows: `weight` (V_local, C)."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region):
        super().__init__()
        self.weight, self.bias, self.region = weight, bias, region
        self.axis, self.sizes = weight.tp_split.axis, weight.tp_split.sizes

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T, C), or this rank's positions of it -> logits of its own entries (B, T, V_local);
        with targets (B, T) the sum of their losses over all entries."""
        logits = F.linear(self.region.copy_to(x), self.weight, self.bias)
        if targets is None:
            return logits
        return vocabulary_cross_entropy(logits, targets, self.axis, "sum", self.sizes)


class GatheredLogits(VocabularyLinear):
    """A VocabularyLinear that returns the logits of all entries, (B, T, V), for a model whose own
    code needs them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x).transpose(1, 2)
        return gather_sequence(logits, self.axis, sum(self.sizes)).transpose(1, 2).contiguous()


# ---- a whole model


def tensor_parallel(model: nn.Module, axis: Axis, sequence_parallel: bool = False) -> nn.Module:
    """Split a GPT, or a stage of one, over the ranks of `axis`, in place; return it.

    Every rank must start with the same weights. A layer then performs two all-reduces in the
    forward pass and two in the backward pass; the embedding one (forward), lm_head one (backward).

    sequence_parallel   between the split layers every rank keeps T/N of the positions; each
                        all-reduce becomes a reduce-scatter and an all-gather. Call
                        `reduce_replicated_gradients` once per step.
    Raises ValueError if there are more ranks than heads, MLP columns or vocabulary entries.
    """
    if axis.size == 1:
        return model
    region = Region(axis, sequence_parallel)
    split = {}  # id of a whole parameter -> its slice; a tied matrix is split once
    for name, module in list(model.named_modules()):
        if isinstance(module, Attention):
            _split_attention(module, region)
        elif isinstance(module, MLP):
            _split_mlp(module, region)
        elif isinstance(module, MoE):
            _split_experts(module, region)
        elif TP_PLAN.get(name.rpartition(".")[2]) == ("column", WORDS):
            _split_words(model, name, region, split)
    return model


def _split_matrices(module, region, sizes, partial=False):
    """Split the matrices of one module according to `TP_PLAN`.

    sizes     {dimension that is split: length of each rank's slice}
    partial   whether the results of row matrices stay partial, for the caller to sum
    """
    for name, linear in list(module.named_children()):
        how, what = TP_PLAN.get(name, (None, None))
        if what not in sizes:
            continue
        if how == "column":
            column_parallel(linear, region.axis, sizes[what])
        elif partial:
            linear.weight = split_parameter(linear.weight, 1, region.axis, sizes[what])
        else:
            setattr(module, name, row_parallel(linear, region, sizes[what]))


def _split_attention(attention, region):
    axis, size = region.axis, attention.head_size
    heads = attention.q_proj.out_features // size
    kv_heads = attention.k_proj.out_features // size
    _check(axis, heads, "attention heads", "a head is not split")
    queries, keys = head_shares(heads, kv_heads, axis.size)
    sizes = {QUERY_HEADS: tuple(share * size for share in queries)}
    if keys is not None:
        sizes[KV_HEADS] = tuple(share * size for share in keys)
    else:
        first = sum(queries[: axis.index])
        own = range(first, first + queries[axis.index])
        needed = key_value_heads(own, heads // kv_heads)
        attention.k_proj = SharedHeads(attention.k_proj, axis, size, needed)
        attention.v_proj = SharedHeads(attention.v_proj, axis, size, needed)
    _split_matrices(attention, region, sizes)

    def enter_attention(module, args):
        x, cos, *rest = args
        region.length = cos.shape[0]  # a pipeline stage learns it only here
        return region.copy_to(x), cos, *rest

    attention.register_forward_pre_hook(enter_attention)


def _split_mlp(mlp, region):
    columns = mlp.gate_proj.out_features
    _check(region.axis, columns, MLP_COLUMNS, "a column is not split")
    _split_matrices(mlp, region, {MLP_COLUMNS: shares(columns, region.axis.size)})
    mlp.register_forward_pre_hook(lambda module, args: (region.copy_to(args[0]), *args[1:]))


def _split_experts(moe, region):
    """Split every expert like an MLP; the router stays whole and computes the same on every rank.

    f comes after the router, which reads x directly, so the router's gradient and its contribution
    to the gradient of x are whole on every rank. The weights of the choices multiply partial
    results, so they pass through f too.
    """
    axis = region.axis
    for module in moe.modules():
        if isinstance(module, Expert):
            columns = module.w1.out_features
            _check(axis, columns, "columns of an expert", "a column is not split")
            sizes = {MLP_COLUMNS: shares(columns, axis.size)}
            _split_matrices(module, region, sizes, partial=True)
    whole = moe.compute

    def compute(experts, tokens, chosen, weights):
        tokens, weights = copy_to_region(tokens, axis), copy_to_region(weights, axis)
        return reduce_from_region(whole(experts, tokens, chosen, weights), axis)

    moe.compute = compute
    if region.sequence_parallel:  # the router needs whole sequences
        moe.register_forward_pre_hook(
            lambda module, args: (gather_sequence(args[0], axis, region.length), *args[1:])
        )
        moe.register_forward_hook(lambda module, args, y: split_sequence(y, axis))


def _split_words(model, name, region, split, logits=VocabularyLinear):
    module, axis = model.get_submodule(name), region.axis
    weight = module.weight
    _check(axis, weight.shape[0], WORDS, "a row is not split")
    if id(weight) not in split:
        sizes = shares(weight.shape[0], axis.size)
        split[id(weight)] = split_parameter(weight, 0, axis, sizes)
    part = split[id(weight)]
    if isinstance(module, nn.Linear):
        bias = split_parameter(module.bias, 0, axis, part.tp_split.sizes)
        if bias is not None:
            split[id(module.bias)] = bias
        new = logits(part, bias, region)
    else:
        new = VocabularyEmbedding(part, region)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def _check(axis, size, what, why):
    if size < axis.size:
        raise ValueError(
            f"{axis.name} {axis.size} is more than the {size} {what}: {why}, "
            f"so take at most {size} ranks"
        )


# ---- the loss over a split vocabulary


def vocabulary_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    axis: Axis,
    reduction: str = "mean",
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """The loss in nats, the same value on every rank; two all-reduces.

    logits     (B, T, V_local): this rank's entries; targets (B, T), in the whole vocabulary
    reduction  "mean", "sum" or "none" over tokens
    sizes      entries per rank; None: the ranks exchange them
    Computed in fp32 or higher.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction {reduction!r} is not one of "mean", "sum" and "none"')
    if axis.size == 1:
        return cross_entropy(logits, targets, reduction=reduction)
    sizes = sizes or _sizes(logits, axis)
    start = sum(sizes[: axis.index])
    losses = _CrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), axis.group, start)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


class _CrossEntropy(torch.autograd.Function):
    """log(sum of exp(logits)) - logit of the target, per token. The gradient of the logits is the
    softmax, minus 1 at the target; each rank computes its own columns."""

    @staticmethod
    def forward(ctx, logits, targets, group, start):
        values = logits if logits.dtype == torch.float64 else logits.float()  # (N, V_local)
        largest = values.max(dim=-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        values = values - largest[:, None]
        local = targets - start
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        own = values.gather(1, local[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        exponentials = values.exp_()
        both = torch.stack((exponentials.sum(dim=-1), own))  # (2, N): summed in one call
        dist.all_reduce(both, group=group)
        total, target = both
        counts = targets != IGNORED
        softmax = exponentials.div_(total[:, None])
        ctx.save_for_backward(softmax, local, elsewhere, counts)
        ctx.dtype = logits.dtype
        return torch.where(counts, total.log() - target, 0.0)

    @staticmethod
    def backward(ctx, dlosses):
        softmax, local, elsewhere, counts = ctx.saved_tensors
        dlogits = softmax.clone()
        hit = (~elsewhere).to(softmax.dtype)[:, None]
        dlogits.scatter_add_(1, local[:, None], -hit)
        dlogits.mul_((dlosses * counts)[:, None])
        return dlogits.to(ctx.dtype), None, None, None


def loss_function(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The callable(logits, targets, reduction) for the output of `model`, split or not."""
    for module in model.modules():
        if isinstance(module, VocabularyLinear):
            axis, sizes = module.axis, module.sizes
            return lambda logits, targets, reduction="mean": vocabulary_cross_entropy(
                logits, targets, axis, reduction, sizes
            )
    return cross_entropy


@torch.no_grad()
def gathered_logits(
    logits: torch.Tensor, axis: Axis, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """(B, T, V_local) -> (B, T, V) on every rank, for measuring or generating; no gradient."""
    if axis.size == 1:
        return logits
    sizes = sizes or _sizes(logits, axis)
    part = F.pad(logits, (0, max(sizes) - logits.shape[-1])).contiguous()
    parts = [torch.empty_like(part) for _ in sizes]
    dist.all_gather(parts, part, group=axis.group)
    return torch.cat([one[..., :size] for one, size in zip(parts, sizes)], dim=-1)


def _sizes(logits, axis):
    """The number of vocabulary entries of each rank, by an all-gather."""
    own = torch.tensor([logits.shape[-1]], device=logits.device)
    sizes = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(sizes, own, group=axis.group)
    return tuple(size.item() for size in sizes)


# ---- once per step, if the sequence is split


@torch.no_grad()
def reduce_replicated_gradients(model: nn.Module, axis: Axis) -> None:
    """Sum, in one all-reduce, the gradients that each rank has only for its own positions.

    Needed under sequence parallelism, once per step, after the last backward pass; otherwise it
    does nothing and sends nothing. Gradients may be DTensors of FSDP2, split the same way on all
    ranks of the axis.
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
    """Parameters that each rank uses only for its own positions: norms and biases of row layers."""
    modules = list(model.modules())
    if not any(getattr(getattr(m, "region", None), "sequence_parallel", False) for m in modules):
        return
    for module in modules:
        if isinstance(module, RMSNorm):
            yield module.weight
        elif isinstance(module, RowParallelLinear) and module.bias is not None:
            yield module.bias


# ---- any model, by a plan

REMEMBERED = ("n_heads", "num_heads", "split_size")  # in an attention: depend on its heads


def split_by_plan(
    model: nn.Module,
    axis: Axis,
    plan: dict[str, tuple[str, str]],
    heads: int,
    kv_heads: int | None = None,
    strict: bool = True,
) -> nn.Module:
    """Split any model in place according to one of `TP_PLANS`; return it.

        split_by_plan(bert, mesh.tp, TP_PLANS["bert"], bert.config.num_attention_heads)

    Works if the model's code takes the number of heads from the shapes, or from one of the
    attributes in `REMEMBERED`. The last matrix gathers the logits of all entries, because the
    model's own loss needs them. Every column matrix has its own f, since a plan does not say which
    of them read the same input: the backward pass performs more all-reduces than in
    `tensor_parallel`.

    strict   refuse to split a weight under one of its names and leave it whole under another;
             otherwise the two become different weights
    Raises ValueError for a plan of another model, and for more ranks than key-value heads.
    """
    if axis.size == 1:
        return model
    kv_heads = kv_heads or heads
    _check(axis, kv_heads, "heads of keys and values", "a head is not split")
    queries, keys = head_shares(heads, kv_heads, axis.size)
    units = {QUERY_HEADS: (heads, queries), KV_HEADS: (kv_heads, keys)}
    region, split = Region(axis), {}
    modules = [  # one module may have several names
        (name, module, *planned(plan, name))
        for name, module in model.named_modules(remove_duplicate=False)
        if planned(plan, name)
    ]
    if not modules:
        raise ValueError(f"no module of {type(model).__name__} is in this plan")
    for name, module, how, what in modules:
        if what == WORDS:
            _split_words(model, name, region, split, logits=GatheredLogits)
        elif how == "table":
            module.weight = split_parameter(module.weight, 1, axis, queries)
        elif how == "row":
            _split_row(model, name, region, units.get(what))
        else:
            _split_column(module, region, units.get(what), 3 if how == "packed column" else 1)
        if (how, what) == ("row", QUERY_HEADS):  # one per attention
            attention = model.get_submodule(name.rpartition(".")[0])
            for known in set(REMEMBERED) & set(vars(attention)):
                setattr(attention, known, getattr(attention, known) // heads * queries[axis.index])
    _split_ties(model, split, strict)
    return model


def _is_conv1d(module):
    """Whether a module is GPT-2's linear layer, whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D"


def _lengths(length, unit, axis):
    """The length of each rank's slice of a dimension: whole heads, or any columns."""
    if unit is None:
        return shares(length, axis.size)
    count, counts = unit
    return tuple(length // count * own for own in counts)


def _split_column(module, region, unit, packed):
    axis = region.axis
    if _is_conv1d(module):
        sizes = _lengths(module.nf // packed, unit, axis)
        module.weight = split_parameter(module.weight, 1, axis, sizes, packed)
        module.bias = split_parameter(module.bias, 0, axis, sizes, packed)
        module.nf = packed * sizes[axis.index]
    else:
        column_parallel(module, axis, _lengths(module.out_features, unit, axis))
    module.register_forward_pre_hook(
        lambda module, args: (copy_to_region(args[0], axis), *args[1:])
    )


def _split_row(model, name, region, unit):
    module, axis = model.get_submodule(name), region.axis
    if _is_conv1d(module):
        weight = split_parameter(module.weight, 0, axis, _lengths(module.nx, unit, axis))
        new = RowParallelConv1D(weight, module.bias, region)
    else:
        new = row_parallel(module, region, _lengths(module.in_features, unit, axis))
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def _split_ties(model, split, strict):
    """Replace split weights under their other names too, if those modules do not compute."""
    for name, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter is None or id(parameter) not in split:
                continue
            if not isinstance(module, (nn.Linear, nn.Embedding)):
                setattr(module, kind, split[id(parameter)])
            elif strict:
                raise ValueError(
                    f"{name}.{kind} is a weight that the plan splits only under another name: "
                    f"add {name.rpartition('.')[2]!r} to the plan"
                )
