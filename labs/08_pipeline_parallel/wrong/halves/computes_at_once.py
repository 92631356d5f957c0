"""Adds the weight's gradient in B.

hint: has a gradient already
"""

import torch


class LaterLinear(LaterLinear):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            rows = gradient.flatten(0, -2)
            accumulate(ctx.weight, rows.t() @ x.flatten(0, -2))  # noqa: F821
        return gradient @ ctx.weight, None, None, None
