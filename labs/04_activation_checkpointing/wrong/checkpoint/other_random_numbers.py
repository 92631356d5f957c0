"""Does not restore the random state.

hint: draws other random numbers
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        today = torch.get_rng_state()  # noqa: F821
        with torch.enable_grad():  # noqa: F821
            output = ctx.function(*inputs)
        torch.set_rng_state(today)  # noqa: F821
        torch.autograd.backward(output, gradient)  # noqa: F821
        return None, *[t.grad for t in inputs]
