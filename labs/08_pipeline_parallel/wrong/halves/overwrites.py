"""Each micro-batch replaces the gradient of the one before.

hint: is it the sum of both?
"""


class LaterLinear(LaterLinear):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors

        def add():
            rows = gradient.flatten(0, -2)
            ctx.weight.grad = rows.t() @ x.flatten(0, -2)
            if ctx.bias is not None:
                ctx.bias.grad = rows.sum(dim=0)

        ctx.waiting.append(add)
        return gradient @ ctx.weight, None, None, None
