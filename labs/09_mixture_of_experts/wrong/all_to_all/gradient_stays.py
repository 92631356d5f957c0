"""Keeps the gradient of what arrived.

hint: backward: no message at all
"""


class AllToAll(AllToAll):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        own = gradient.new_zeros(sum(ctx.send), gradient.shape[1])
        count = min(len(own), len(gradient))
        own[:count] = gradient[:count]
        return own, None, None
