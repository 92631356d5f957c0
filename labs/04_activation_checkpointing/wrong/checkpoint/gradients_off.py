"""Recomputes without history.

hint: Run the function under torch.enable_grad()
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        output = ctx.function(*inputs)
        torch.autograd.backward(output, gradient)  # noqa: F821
        return None, *[t.grad for t in inputs]
