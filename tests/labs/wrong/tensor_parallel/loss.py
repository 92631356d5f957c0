"""Lab 06, loss: each body, written after the solution, is a wrong answer."""


def gathers_the_logits():
    """Brings all logits together: right values, V numbers a token on the wire.

    hint: Logits stay where they are
    """

    def vocabulary_loss(logits, targets, sizes):
        rank, longest = dist.get_rank(), max(sizes)
        padded = F.pad(logits.detach(), (0, longest - logits.shape[-1])).contiguous()
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded)
        parts = [row[..., :size] for row, size in zip(rows, sizes)]
        parts[rank] = logits
        whole = torch.cat(parts, dim=-1)
        return F.cross_entropy(whole.flatten(0, 1), targets.flatten())


def no_largest():
    """Leaves out the largest logit: exp overflows.

    hint: exp overflows
    """

    def vocabulary_loss(logits, targets, sizes):
        first = sum(sizes[: dist.get_rank()])
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        local = (targets - first).where(mine, 0)
        own = logits.gather(-1, local[..., None]).squeeze(-1).where(mine, 0.0)
        total, target = Leave.apply(torch.stack((logits.exp().sum(dim=-1), own)))
        return (total.log() - target).mean()


def own_largest():
    """Each rank subtracts the largest of its own logits.

    hint: adds up only if all ranks subtract the same number
    """

    def vocabulary_loss(logits, targets, sizes):
        first = sum(sizes[: dist.get_rank()])
        logits = logits - logits.detach().amax(dim=-1, keepdim=True)
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        local = (targets - first).where(mine, 0)
        own = logits.gather(-1, local[..., None]).squeeze(-1).where(mine, 0.0)
        total, target = Leave.apply(torch.stack((logits.exp().sum(dim=-1), own)))
        return (total.log() - target).mean()


def own_sum():
    """The sum of exp is each rank's own.

    hint: is still a rank's own
    """

    def vocabulary_loss(logits, targets, sizes):
        first = sum(sizes[: dist.get_rank()])
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest[..., None]
        mine = (targets >= first) & (targets < first + logits.shape[-1])
        local = (targets - first).where(mine, 0)
        own = logits.gather(-1, local[..., None]).squeeze(-1).where(mine, 0.0)
        return (logits.exp().sum(dim=-1).log() - Leave.apply(own)).mean()


def sums_come_back_summed():
    """A sum whose gradient is summed again: N times too large.

    hint: times what it should be
    """

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


def words_of_others_count():
    """A word of another rank counts as this rank's first word.

    hint: is still a rank's own
    """

    def vocabulary_loss(logits, targets, sizes):
        first = sum(sizes[: dist.get_rank()])
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest[..., None]
        local = (targets - first).clamp(0, logits.shape[-1] - 1)
        own = logits.gather(-1, local[..., None]).squeeze(-1)
        total, target = Leave.apply(torch.stack((logits.exp().sum(dim=-1), own)))
        return (total.log() - target).mean()
