"""Each rank subtracts the largest of its own logits.

hint: adds up only if all ranks subtract the same number
"""

# ruff: noqa: F821


def vocabulary_loss(logits, targets, sizes):
    first = sum(sizes[: dist.get_rank()])
    logits = logits - logits.detach().amax(dim=-1, keepdim=True)
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    local = (targets - first).where(mine, 0)
    own = logits.gather(-1, local[..., None]).squeeze(-1).where(mine, 0.0)
    total, target = Leave.apply(torch.stack((logits.exp().sum(dim=-1), own)))
    return (total.log() - target).mean()
