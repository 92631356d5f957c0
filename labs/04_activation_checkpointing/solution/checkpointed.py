"""Exercise 04a: checkpointing as an autograd function.

    y = checkpoint(layer, x)        # the same as layer(x), but only x is kept
    y.sum().backward()              # runs layer(x) once more, and goes backward through it

Write the two halves below. `torch.utils.checkpoint` is what you are building: do not call it.
"""

import torch


class Checkpoint(torch.autograd.Function):
    """Forward: the function without history. Backward: the function again, with history."""

    @staticmethod
    def forward(ctx, function, *inputs):
        """Returns function(*inputs), one tensor; keeps what `backward` needs, and nothing else.

        inputs are tensors of any shapes and types. PyTorch calls this with gradients off. `ctx` is
        handed on to `backward`: tensors go into ctx.save_for_backward(…), anything else into
        attributes of your own, such as ctx.function.
        """
        ### BEGIN SOLUTION: keep function, inputs, random state, autocast; return the result
        ctx.function = function
        ctx.random_state = torch.get_rng_state()
        ctx.autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(*inputs)
        return function(*inputs)
        ### END SOLUTION

    @staticmethod
    def backward(ctx, gradient):
        """`gradient` is that of the output. Returns None for `function`, then one per input.

        The function must compute what it has computed in `forward`: from the same random numbers,
        and under the autocast of then, which is over by now. Nothing is kept after this.

        An input without a gradient (it does not ask for one) gets None. The gradients of the
        parameters inside the function are added to their .grad, as in any backward pass.
        """
        ### BEGIN SOLUTION: run the function again on detached inputs, then backward through it
        inputs = [
            tensor.detach().requires_grad_(tensor.requires_grad) for tensor in ctx.saved_tensors
        ]
        today = torch.get_rng_state()
        torch.set_rng_state(ctx.random_state)
        dtype, enabled = ctx.autocast
        with torch.enable_grad(), torch.autocast("cpu", dtype, enabled):
            output = ctx.function(*inputs)
        torch.set_rng_state(today)
        torch.autograd.backward(output, gradient)
        return None, *[tensor.grad for tensor in inputs]
        ### END SOLUTION


def checkpoint(function, *inputs):
    """function(*inputs), of which only the inputs are kept until the backward pass."""
    return Checkpoint.apply(function, *inputs)
