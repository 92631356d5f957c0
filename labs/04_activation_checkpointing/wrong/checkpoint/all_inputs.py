"""Asks every input for a gradient, the mask as well.

hint: only Tensors of floating point
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        today = torch.get_rng_state()  # noqa: F821
        torch.set_rng_state(ctx.random_state)  # noqa: F821
        with torch.enable_grad():  # noqa: F821
            output = ctx.function(*inputs)
        torch.set_rng_state(today)  # noqa: F821
        torch.autograd.backward(output, gradient)  # noqa: F821
        return None, *[t.grad for t in inputs]
