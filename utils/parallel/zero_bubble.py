"""The backward pass in two halves: weight gradients of linear layers are deferred.

    with WeightGradientsLater() as later:
        y = stage(x)
        y.backward(gradient)      # B: the gradients of x and of all other parameters
    later.add()                   # W: the weights' gradients

No rank waits for a weight's gradient before the optimizer's step, but the previous stage waits for
the gradient of x. A zero-bubble schedule (Qi et al., arXiv:2401.10241) computes that one first and
fills its bubbles with the others.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from utils.memory.precision import master_of

_open = []  # the objects whose `with` is active, innermost last
_plain = F.linear


class WeightGradientsLater:
    """Inside `with`, `F.linear` on a parameter, or on its copy from `utils.memory.precision`,
    defers the parameter's gradient to `add`.

    The backward pass does not reach these parameters or their hooks, so DDP and FSDP do not see
    their gradients. It may run inside another `with` of the same object; if layers are recomputed,
    it must, since they call `F.linear` again.

    `F.linear` is replaced in the whole process while an object is open: a `TorchFunctionMode` would
    not apply to layers that are recomputed in a backward pass.
    """

    def __init__(self):
        self.waiting = []  # functions that add one layer's gradients

    def __enter__(self):
        _open.append(self)
        F.linear = _linear
        return self

    def __exit__(self, *exception):
        _open.pop()
        if not _open:
            F.linear = _plain

    @torch.no_grad()
    def add(self) -> None:
        """Add every deferred gradient to its parameter's `.grad`, and free its inputs."""
        while self.waiting:
            self.waiting.pop()()


def defer(function: Callable[[], None]) -> None:
    """Call `function()` when the innermost open `WeightGradientsLater` adds its gradients, or at
    once if none is open. For the backward passes of your own autograd functions."""
    if _open:
        _open[-1].waiting.append(function)
    else:
        function()


class _LaterLinear(torch.autograd.Function):
    """y = x·Wᵀ + b. Backward: the gradient of x is gradient·W; W and b wait in a list."""

    @staticmethod
    def forward(ctx, x, weight, bias, waiting):
        kind = x.device.type
        ctx.parameters, ctx.waiting = (master_of(weight), master_of(bias)), waiting
        if torch.is_autocast_enabled(kind):
            x, weight = (t.to(torch.get_autocast_dtype(kind)) for t in (x, weight))
        ctx.save_for_backward(x, weight)
        return _plain(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        ctx.waiting.append(partial(_add, *ctx.parameters, x, gradient))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None


def _add(weight, bias, x, gradient):
    """The gradients of y = x·Wᵀ + b: (tokens, out)ᵀ · (tokens, in) for W, the sum for b."""
    gradient = gradient.flatten(0, -2)  # (tokens, out)
    _accumulate(weight, gradient.t() @ x.flatten(0, -2))
    if bias is not None and bias.requires_grad:
        _accumulate(bias, gradient.sum(dim=0))


def _accumulate(parameter, gradient):
    gradient = gradient.to(parameter.dtype)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _linear(input, weight, bias=None):
    """The replacement for `F.linear`."""
    is_parameter = isinstance(master_of(weight), nn.Parameter)
    if torch.is_grad_enabled() and is_parameter and weight.requires_grad:
        return _LaterLinear.apply(input, weight, bias, _open[-1].waiting)
    return _plain(input, weight, bias)
