"""Restores the old random state and leaves it there.

hint: Put today's state back
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        torch.set_rng_state(ctx.random_state)  # noqa: F821
        with torch.enable_grad():  # noqa: F821
            output = ctx.function(*inputs)
        torch.autograd.backward(output, gradient)  # noqa: F821
        return None, *[t.grad for t in inputs]
