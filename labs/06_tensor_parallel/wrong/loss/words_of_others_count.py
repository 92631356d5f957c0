"""A word of another rank counts as this rank's first word.

hint: is still a rank's own
"""

# ruff: noqa: F821


def vocabulary_loss(logits, targets, sizes):
    first = sum(sizes[: dist.get_rank()])
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[..., None]
    local = (targets - first).clamp(0, logits.shape[-1] - 1)
    own = logits.gather(-1, local[..., None]).squeeze(-1)
    total, target = Leave.apply(torch.stack((logits.exp().sum(dim=-1), own)))
    return (total.log() - target).mean()
