"""Returns no gradients for the inputs.

hint: return one gradient for each input
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        gradients = super(Checkpoint, Checkpoint).backward(ctx, gradient)
        return (None,) * len(gradients)
