"""The two large matrices at the ends of the model, split by words of the vocabulary.

The embedding looks up the words that this rank holds, zero for the others, and adds up over the
ranks. The last matrix gives each rank the logits of its own words, (B, T, V_local), and the loss is
computed from these without ever bringing them together: what travels is three numbers a token, not
V (Shoeybi et al., arXiv:1909.08053, section 3).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from utils.models.gpt import cross_entropy

IGNORED = -100  # the target of a token that does not count, as in torch's cross_entropy


class VocabularyEmbedding(nn.Module):
    """An nn.Embedding whose rows are split: `weight` (V_local, C)."""

    def __init__(self, weight, region):
        super().__init__()
        self.weight, self.region = weight, region
        self.start = weight.tp_split.start

    def forward(self, tokens):
        """(B, T) -> (B, T, C), or this rank's positions of it."""
        local = tokens - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.region.leave(x.masked_fill(elsewhere[..., None], 0.0))


class VocabularyLinear(nn.Module):
    """The last matrix, split by rows: `weight` (V_local, C)."""

    def __init__(self, weight, bias, region):
        super().__init__()
        self.weight, self.bias, self.region = weight, bias, region
        self.axis, self.sizes = weight.tp_split.axis, weight.tp_split.sizes

    def forward(self, x):
        """(B, T, C), or this rank's positions of it -> logits of its own words (B, T, V_local)."""
        return F.linear(self.region.enter(x), self.weight, self.bias)


def vocabulary_cross_entropy(logits, targets, axis, reduction="mean", sizes=None):
    """The loss in nats, the same number on every rank; two all-reduces.

    logits     (B, T, V_local): this rank's words; targets (B, T), in words of the whole vocabulary
    reduction  "mean", "sum" or "none" over tokens
    sizes      words of each rank; None: they ask each other
    Never computed below fp32.
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
    """log(sum of exp(logits)) - logit of the target, for each token; the gradient of the logits is
    softmax - 1 at the target, of which each rank has its own columns."""

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


def loss_function(model):
    """callable(logits, targets, reduction) that fits what `model` returns, split or not."""
    for module in model.modules():
        if isinstance(module, VocabularyLinear):
            axis, sizes = module.axis, module.sizes
            return lambda logits, targets, reduction="mean": vocabulary_cross_entropy(
                logits, targets, axis, reduction, sizes
            )
    return cross_entropy


@torch.no_grad()
def gathered_logits(logits, axis, sizes=None):
    """(B, T, V_local) -> (B, T, V) on every rank, to measure or to generate; no gradient."""
    if axis.size == 1:
        return logits
    sizes = sizes or _sizes(logits, axis)
    part = F.pad(logits, (0, max(sizes) - logits.shape[-1])).contiguous()
    parts = [torch.empty_like(part) for _ in sizes]
    dist.all_gather(parts, part, group=axis.group)
    return torch.cat([one[..., :size] for one, size in zip(parts, sizes)], dim=-1)


def _sizes(logits, axis):
    """Words of each rank, by asking."""
    own = torch.tensor([logits.shape[-1]], device=logits.device)
    sizes = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(sizes, own, group=axis.group)
    return tuple(size.item() for size in sizes)
