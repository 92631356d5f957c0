"""Returns the gradient of x and forgets the rest.

hint: nothing waits
"""


class LaterLinear(LaterLinear):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, None, None, None
