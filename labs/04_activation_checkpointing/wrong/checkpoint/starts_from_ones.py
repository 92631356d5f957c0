"""Ignores the gradient that arrives.

hint: Does `backward` start from the gradient that it is given?
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        return super(Checkpoint, Checkpoint).backward(ctx, torch.ones_like(gradient))  # noqa: F821
