"""The gradient of what comes in is left to each rank.

hint: All ranks used x
"""

# ruff: noqa: F821


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy
