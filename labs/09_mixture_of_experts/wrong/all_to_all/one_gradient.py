"""Returns one gradient for three inputs.

hint: incorrect number of gradients
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        returned = gradient.new_empty(sum(ctx.send), gradient.shape[1])
        dist.all_to_all_single(  # noqa: F821
            returned, gradient.contiguous(), ctx.send, ctx.receive
        )
        return returned
