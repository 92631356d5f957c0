"""Hands an expanded gradient over as it is.

hint: contiguous
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        returned = gradient.new_empty(sum(ctx.send), gradient.shape[1])
        dist.all_to_all_single(returned, gradient, ctx.send, ctx.receive)  # noqa: F821
        return returned, None, None
