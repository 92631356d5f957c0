"""Two small operations of the model with their gradients by hand: fewer passes over the memory.

Neither has much to compute; their time is that of reading and writing activations. Written out as
below, each takes about half the time of autograd's own chain of operations on a CPU.

    rms_norm   forward  y = x r w, r = 1 / sqrt(mean(x²) + eps)    (arXiv:1910.07467)
               backward dx = r (w dy - x r mean(w dy · x r)), dw = sum(dy · x r)
    rotate     forward  turns pairs of values by an angle          (arXiv:2104.09864)
               backward turns the gradient back by the same angle
"""

import torch
from torch.nn import functional as F


def needs_no_gradient_by_hand() -> bool:
    """Whether the compiler makes one kernel anyway, or a server computes, where none is wanted.

    In this order: the compiler would end its graph at the question for the inference mode.
    """
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., C) divided by the root of its mean square over C, times weight (C,)."""
    # other devices have a fused kernel; below fp32, PyTorch's takes care of the precision
    by_hand = x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype.itemsize >= 4
    if by_hand and not needs_no_gradient_by_hand():
        return RMSNormFunction.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNormFunction(torch.autograd.Function):
    """The norm by hand: what it keeps is its input and one scale a row, as a GPU's kernel does."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # LayerNorm's gradient, with 0 for the mean, is this one less the mean of r w dy over C
        x, weight, r = ctx.saved_tensors
        size = x.shape[-1:]
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, size, torch.zeros_like(r), r, weight, None, [True, True, False]
        )
        mean = (dy @ weight).unsqueeze(-1).mul_(r).div_(x.shape[-1])  # (..., 1)
        return dx.add_(mean), dweight, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns each pair (x[i], x[i + D/2]) of every head by its position's angle.

    x (B, T, heads, D); cos and sin (T, 1, D), the first half of sin negated; (B, T, 1, D) where a
    server's rows stand at different positions.
    """
    if needs_no_gradient_by_hand():
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((second, first), dim=-1) * sin
    # one row per head: long rows multiply twice as fast as rows of D
    return _Rotate.apply(
        x, cos.expand(x.shape[1:]).contiguous(), sin.expand(x.shape[1:]).contiguous()
    )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx, dy):
        cos, sin = ctx.saved_tensors
        return _turn(dy, cos, -sin), None, None


def _turn(x, cos, sin):
    swapped = x.roll(x.shape[-1] // 2, dims=-1)  # each value's partner
    return swapped.mul_(sin).addcmul_(x, cos)
