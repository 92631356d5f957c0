"""Keeps the whole graph of the forward pass and goes backward through that.

hint: in the backward pass the layers ran [0, 0, 0, 0, 0] times
"""


class Checkpoint(torch.autograd.Function):  # noqa: F821
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        with torch.enable_grad():  # noqa: F821
            ctx.output = function(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        torch.autograd.backward(ctx.output, gradient)  # noqa: F821
        return None, *[t.grad for t in ctx.inputs]
