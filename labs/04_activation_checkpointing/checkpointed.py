"""Exercise 04a: checkpointing as an autograd function.

    y = checkpoint(layer, x)        # the same as layer(x), but only x is kept
    y.sum().backward()              # runs layer(x) once more, then its backward pass

Write the two halves below. `torch.utils.checkpoint` is what you are building: do not call it.
"""

import torch


class Checkpoint(torch.autograd.Function):
    """Forward: the function without history. Backward: the function again, with history."""

    @staticmethod
    def forward(ctx, function, *inputs):
        """Return function(*inputs), one tensor; keep what `backward` needs, and nothing else.

        inputs are tensors of any shapes and types. PyTorch calls this with gradients off. `ctx` is
        passed on to `backward`: tensors go into ctx.save_for_backward(…), anything else into
        attributes of your own, such as ctx.function.
        """
        raise NotImplementedError(
            "keep function, inputs, random state, autocast; return the result"
        )

    @staticmethod
    def backward(ctx, gradient):
        """Return None for `function`, then a gradient per input. gradient: that of the output.

        The function must compute the same as in `forward`: with the same random numbers, and under
        the same autocast, which has ended by now. Nothing is kept afterwards.

        An input that does not require a gradient gets None. The gradients of the parameters inside
        the function are added to their .grad, as in any backward pass.
        """
        raise NotImplementedError(
            "run the function again on detached inputs, then backward through it"
        )


def checkpoint(function, *inputs):
    """Compute function(*inputs), keeping only the inputs until the backward pass."""
    return Checkpoint.apply(function, *inputs)
