"""Leaves the gradient of x for later too.

hint: there is no gradient of x
"""


class LaterLinear(LaterLinear):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        ctx.waiting.append(lambda: None)
        return None, None, None, None
