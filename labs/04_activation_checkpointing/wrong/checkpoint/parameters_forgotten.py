"""Asks for the gradients of the inputs only.

hint: torch.autograd.grad only what you name
"""


class Checkpoint(Checkpoint):  # noqa: F821
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        with torch.enable_grad():  # noqa: F821
            output = ctx.function(*inputs)
        wanted = [t for t in inputs if t.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient))  # noqa: F821
        return None, *[next(found) if t.requires_grad else None for t in inputs]
