"""A sum whose gradient is summed again: N times too large.

hint: times what it should be
"""

# ruff: noqa: F821


class BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Leave.apply(x)

    @staticmethod
    def backward(ctx, dy):
        return Leave.apply(dy)


def vocabulary_loss(logits, targets, sizes):
    first = sum(sizes[: dist.get_rank()])
    largest = logits.detach().amax(dim=-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    logits = logits - largest[..., None]
    mine = (targets >= first) & (targets < first + logits.shape[-1])
    local = (targets - first).where(mine, 0)
    own = logits.gather(-1, local[..., None]).squeeze(-1).where(mine, 0.0)
    total, target = BothWays.apply(torch.stack((logits.exp().sum(dim=-1), own)))
    return (total.log() - target).mean()
