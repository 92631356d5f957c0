"""The sum of exp is each rank's own.

hint: is still a rank's own
"""

# ruff: noqa: F821


def vocabulary_loss(logits, targets, sizes):
    first = sum(sizes[: dist.get_rank()])
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[..., None]
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    local = (targets - first).where(mine, 0)
    own = logits.gather(-1, local[..., None]).squeeze(-1).where(mine, 0.0)
    return (logits.exp().sum(dim=-1).log() - Leave.apply(own)).mean()
