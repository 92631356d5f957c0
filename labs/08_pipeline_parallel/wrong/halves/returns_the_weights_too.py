"""Returns the weight's gradient to autograd, which adds it in B.

hint: has a gradient already
"""


class LaterLinear(LaterLinear):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        ctx.waiting.append(lambda: None)
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        return gradient @ ctx.weight, of_weight, None, None
