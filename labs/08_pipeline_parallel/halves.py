"""Lab 08b: the backward pass of a linear layer in two halves.

y = LaterLinear.apply(x, weight, bias, waiting)     # x·Wᵀ + b
y.sum().backward()                                  # B: x.grad is ready, weight.grad is not
for function in waiting: function()                 # W: now it is
"""

import torch


class LaterLinear(torch.autograd.Function):
    """A linear layer whose weight gradients wait in a list."""

    @staticmethod
    def forward(ctx, x, weight, bias, waiting):
        """x (…, in), weight (out, in), bias (out,) or None -> (…, out). Given.

        x has at least two dimensions and any number of rows; all have the same floating type.
        """
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.waiting = weight, bias, waiting
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        """Return a gradient for each argument of forward, None for all except x. gradient (…, out):
        that of y.

        Append to ctx.waiting one function without arguments that *adds* to weight.grad and
        bias.grad, which are None at first, and leaves no graph on them. It is called once, after
        any other B's, and keeps nothing. forward has left `(x,)` in ctx.saved_tensors (available
        only during B), and the weights in ctx.weight and ctx.bias. Write it yourself: `utils` has
        one.
        """
        raise NotImplementedError(
            "append a function to ctx.waiting; return the gradient of x and Nones"
        )


def accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Given: parameter.grad += gradient, even the first time."""
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
