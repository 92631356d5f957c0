"""Lab 06, loss: each body, written after the solution, is a wrong answer."""


def all_tokens_divide():
    """The sum is divided by all tokens, those that do not count included.

    kind: values
    hint: It is divided by all tokens
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        counted = (targets != IGNORED).sum()
        return whole(logits, targets, sizes, smoothing, z) * counted / targets.numel()


def asks_for_the_sizes_once():
    """The first word of a rank is remembered from the first batch.

    kind: constants
    hint: the loss
    """

    known = {}

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        shift = sum(sizes[: dist.get_rank()]) - known.setdefault(
            "first", sum(sizes[: dist.get_rank()])
        )
        moved = (targets + shift).where(targets != IGNORED, IGNORED)
        return whole(logits, moved, sizes, smoothing, z)


def copied_from_the_lesson():
    """The loss of lesson 06: every token counts, no smoothing, no z.

    kind: part
    hint: with 2 ranks
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        first = sum(sizes[: dist.get_rank()])
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        total = Leave.apply((logits - largest[..., None]).exp().sum(dim=-1))
        words = torch.arange(first, first + logits.shape[-1])
        target = Leave.apply((logits * (targets[..., None] == words)).sum(dim=-1))
        return (largest + total.log() - target).mean()


def divided_by_nothing():
    """0/0 where no token counts.

    kind: odd
    hint: The mean over no token
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        loss = whole(logits, targets, sizes, smoothing, z)
        return loss / (targets != IGNORED).any()


def does_not_wait():
    """The largest logit may be there in time, or not.

    kind: luck
    hint: the loss
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        counts = targets != IGNORED
        local = targets - sum(sizes[: dist.get_rank()])
        mine = (local >= 0) & (local < logits.shape[-1])
        own = logits.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True)
        logits = logits - largest[..., None]
        linear = (1 - smoothing) * (own.to(logits.dtype) - largest).where(mine, 0.0)
        if smoothing:
            linear = linear + smoothing / sum(sizes) * logits.sum(dim=-1)
        total, linear = Leave.apply(torch.stack((logits.exp().sum(dim=-1), linear)))
        losses = total.log() - linear + z * (largest + total.log()).square()
        return losses.where(counts, 0.0).sum() / counts.sum().clamp(min=1)


def equal_shares():
    """Takes it that every rank has as many words.

    kind: sizes
    hint: the loss
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        return whole(logits, targets, (logits.shape[-1],) * len(sizes), smoothing, z)


def four_numbers():
    """The sum for the smoothing travels by itself.

    kind: communication
    hint: Logits stay where they are
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        mean = Leave.apply(logits.sum(dim=-1, dtype=dtype)) / sum(sizes)
        plain = whole(logits, targets, sizes, 0.0, z)
        counts = targets != IGNORED
        if not smoothing:
            return plain
        local = targets - sum(sizes[: dist.get_rank()])
        mine = (local >= 0) & (local < logits.shape[-1])
        own = logits.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1).to(dtype)
        target = Leave.apply(own.where(mine, 0.0))
        return plain + smoothing * (target - mean)[counts].sum() / counts.sum().clamp(min=1)


def full_width():
    """The logits are put into a tensor of all words, zero elsewhere.

    kind: memory
    hint: makes a tensor of
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        first = sum(sizes[: dist.get_rank()])
        wide = F.pad(logits, (first, sum(sizes) - first - logits.shape[-1]))
        return whole(wide[..., first : first + logits.shape[-1]], targets, sizes, smoothing, z)


def gathers_the_logits():
    """Brings all logits together: right values, V numbers a token on the wire.

    kind: communication
    hint: Logits stay where they are
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        rank, longest = dist.get_rank(), max(sizes)
        padded = F.pad(logits.detach(), (0, longest - logits.shape[-1])).contiguous()
        rows = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(rows, padded)
        parts = [row[..., :size] for row, size in zip(rows, sizes)]
        parts[rank] = logits
        dtype = torch.promote_types(logits.dtype, torch.float32)
        whole = torch.cat(parts, dim=-1).to(dtype).flatten(0, 1)
        total = F.cross_entropy(
            whole, targets.flatten(), reduction="sum", label_smoothing=smoothing
        )
        counts = (targets != IGNORED).flatten()
        total = total + z * whole.logsumexp(-1).square()[counts].sum()
        return total / counts.sum().clamp(min=1)


def gradient_of_one():
    """A gradient by hand, which takes it that the loss is the last thing that is computed.

    kind: part
    hint: the gradient of the logits
    """

    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.view_as(loss)

        @staticmethod
        def backward(ctx, dloss):
            return torch.ones_like(dloss)

    def vocabulary_loss(*given, whole=vocabulary_loss, **terms):
        return One.apply(whole(*given, **terms))


def in_place():
    """Subtracts the largest logit in the caller's tensor.

    kind: inputs
    hint: logits is not what it was
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        largest = logits.detach().amax(dim=-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        loss = whole(logits, targets, sizes, smoothing, z)
        logits.data.sub_(largest)
        return loss


def in_the_type_of_the_logits():
    """bf16 logits, and a loss in bf16.

    kind: types
    hint: bfloat16
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        return whole(logits, targets, sizes, smoothing, z).to(logits.dtype)


def no_largest():
    """Leaves out the largest logit: exp overflows.

    kind: values
    hint: exp of thousands is infinite
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        local, counts = targets - sum(sizes[: dist.get_rank()]), targets != IGNORED
        mine = (local >= 0) & (local < logits.shape[-1])
        own = logits.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        linear = (1 - smoothing) * own.to(logits.dtype).where(mine, 0.0)
        if smoothing:
            linear = linear + smoothing / sum(sizes) * logits.sum(dim=-1)
        total, linear = Leave.apply(torch.stack((logits.exp().sum(dim=-1), linear)))
        losses = total.log() - linear + z * total.log().square()
        return losses.where(counts, 0.0).sum() / counts.sum().clamp(min=1)


def one_product_too_many():
    """The target's logit is found by a product with zeros and ones: −inf · 0 is no number.

    kind: odd
    hint: the loss
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        first = sum(sizes[: dist.get_rank()])
        words = torch.arange(first, first + logits.shape[-1])
        none = (logits.detach() * (targets[..., None] == words)).sum() * 0.0
        return whole(logits, targets, sizes, smoothing, z) + none.to(
            torch.promote_types(logits.dtype, torch.float32)
        )


def own_largest():
    """Each rank subtracts the largest of its own logits.

    kind: values
    hint: adds up only if all ranks subtract the same number
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        largest = logits.detach().amax(dim=-1, keepdim=True)
        return whole(logits - largest, targets, sizes, smoothing, z)


def own_sum():
    """The sum of exp is each rank's own.

    kind: values
    hint: is still a rank's own
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        local, counts = targets - sum(sizes[: dist.get_rank()]), targets != IGNORED
        mine = (local >= 0) & (local < logits.shape[-1])
        own = logits.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        target = Leave.apply(own.to(dtype).where(mine, 0.0))
        losses = logits.to(dtype).logsumexp(-1) - target
        return losses.where(counts, 0.0).sum() / counts.sum().clamp(min=1)


def smoothed_over_own_words():
    """The mean of the logits is divided by this rank's words.

    kind: values
    hint: is right
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        counts = targets != IGNORED
        local = targets - sum(sizes[: dist.get_rank()])
        mine = (local >= 0) & (local < logits.shape[-1])
        own = logits.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.detach().amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        logits = logits - largest[..., None]
        linear = (1 - smoothing) * (own.to(logits.dtype) - largest).where(mine, 0.0)
        if smoothing:
            linear = linear + smoothing / len(sizes) * logits.mean(dim=-1)
        total, linear = Leave.apply(torch.stack((logits.exp().sum(dim=-1), linear)))
        losses = total.log() - linear + z * (largest + total.log()).square()
        return losses.where(counts, 0.0).sum() / counts.sum().clamp(min=1)


def sums_come_back_summed():
    """A sum whose gradient is summed again: N times too large.

    kind: values
    hint: times that
    """

    class Leave(Leave):
        @staticmethod
        def backward(ctx, dy):
            return dy * dist.get_world_size()


def two_tensors_are_kept():
    """gather keeps its input for the backward pass: a second tensor of all logits.

    kind: memory
    hint: bytes are kept for the backward pass
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        local = targets - sum(sizes[: dist.get_rank()])
        mine = (local >= 0) & (local < logits.shape[-1])
        shifted = logits.to(torch.promote_types(logits.dtype, torch.float32)) * 1.0
        own = shifted.gather(-1, local.where(mine, 0)[..., None]).squeeze(-1)
        return whole(logits, targets, sizes, smoothing, z) + 0.0 * own.where(mine, 0.0).sum()


def without_z():
    """The term of z is forgotten.

    kind: part
    hint: It is the loss without z
    """

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0, whole=vocabulary_loss):
        return whole(logits, targets, sizes, smoothing)


def counts_in_the_type_of_the_logits():
    """Counts the tokens in bf16: 257 are 256.

    kind: types
    hint: many tokens
    """

    _loss = vocabulary_loss

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        count = (targets != IGNORED).sum().clamp(min=1)
        return _loss(logits, targets, sizes, smoothing, z) * count / count.to(logits.dtype)


def logits_in_place():
    """Where no gradient is asked for, the largest is taken off the logits themselves.

    kind: inputs
    hint: logits is not what it was before the call
    """

    _loss = vocabulary_loss

    def vocabulary_loss(logits, targets, sizes, smoothing=0.0, z=0.0):
        loss = _loss(logits, targets, sizes, smoothing, z)
        if not torch.is_grad_enabled():
            logits.sub_(logits.amax(dim=-1, keepdim=True))
        return loss


def many_tokens_in_pieces():
    """Above 4,096 tokens each piece of them is summed by itself.

    kind: sizes
    hint: messages, in which a rank sends
    """

    class Leave(Leave):
        @staticmethod
        def forward(ctx, x):
            y = x.clone(memory_format=torch.contiguous_format)
            for piece in y.flatten().split(8192):
                dist.all_reduce(piece)
            return y
