"""Sends the gradient the same way as the rows.

hint: Split sizes
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        returned = gradient.new_empty(sum(ctx.receive), gradient.shape[1])
        dist.all_to_all_single(returned, gradient.contiguous(), ctx.receive, ctx.send)  # noqa: F821
        return returned, None, None
