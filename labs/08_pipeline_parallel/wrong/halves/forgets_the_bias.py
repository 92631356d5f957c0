"""Forgets the bias.

hint: no gradient of the bias
"""


class LaterLinear(LaterLinear):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors

        def add():
            accumulate(ctx.weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2))  # noqa: F821

        ctx.waiting.append(add)
        return gradient @ ctx.weight, None, None, None
