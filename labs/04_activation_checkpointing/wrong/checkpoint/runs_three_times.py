"""Recomputes once for each thing that it needs.

hint: in the backward pass the layers ran [2, 2, 2, 2, 2] times, and once is enough
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        ctx.function(*ctx.saved_tensors)
        return super(Checkpoint, Checkpoint).backward(ctx, gradient)
