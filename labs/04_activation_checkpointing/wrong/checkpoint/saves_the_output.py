"""Saves the inside as well: here everything that the layer's parts return.

hint: or is more saved than its inputs
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def forward(ctx, function, *inputs):
        output = super(Checkpoint, Checkpoint).forward(ctx, function, *inputs)
        ctx.output = output * 1
        return output

    @staticmethod
    def backward(ctx, gradient):
        return super(Checkpoint, Checkpoint).backward(ctx, gradient + 0 * ctx.output)
