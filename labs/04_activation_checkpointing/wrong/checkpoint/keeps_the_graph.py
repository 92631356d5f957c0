"""Runs the function with gradients on, in the forward pass already.

hint: Is the function run with gradients on
"""


class Checkpoint(torch.autograd.Function):  # noqa: F821
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.inputs = [t.detach().requires_grad_(t.requires_grad) for t in inputs]
        ctx.function, ctx.state = function, torch.get_rng_state()  # noqa: F821
        with torch.enable_grad():  # noqa: F821
            ctx.output = function(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        today = torch.get_rng_state()  # noqa: F821
        torch.set_rng_state(ctx.state)  # noqa: F821
        ctx.function(*ctx.saved_tensors)
        torch.set_rng_state(today)  # noqa: F821
        torch.autograd.backward(ctx.output, gradient)  # noqa: F821
        return None, *[t.grad for t in ctx.inputs]
