"""Operations of the model with handwritten gradients, for less memory or fewer passes over it.

The first two compute little; their time goes into reading and writing activations. In the form
below, each takes about half the time of autograd's own chain of operations on a CPU. The third one
never holds the logits of all tokens, which may exceed all other activations.

    rms_norm   forward  y = x r w, r = 1 / sqrt(mean(x²) + eps)    (arXiv:1910.07467)
               backward dx = r (w dy - x r mean(w dy · x r)), dw = sum(dy · x r)
    rotate     forward  rotates pairs of values by an angle        (arXiv:2104.09864)
               backward rotates the gradient back by the same angle
    linear_cross_entropy
               forward  loss and gradients (softmax, minus 1 at the target), a few rows at a time
                        (Liger Kernel, arXiv:2410.10989, section 3.2)
               backward multiplies them by the gradient of the loss
"""

import torch
from torch.nn import functional as F


def needs_no_gradient_by_hand() -> bool:
    """Whether code is compiled, which fuses it anyway, or runs in a server, without gradients.

    The order matters: asking for the inference mode would break the compiler's graph.
    """
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x (..., C) divided by the root of its mean square over C, times weight (C,)."""
    # other devices have a fused kernel; below fp32, PyTorch's handles the precision
    by_hand = x.device.type == "cpu" and x.dtype == weight.dtype and x.dtype.itemsize >= 4
    if by_hand and not needs_no_gradient_by_hand():
        return RMSNormFunction.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNormFunction(torch.autograd.Function):
    """A handwritten norm, which saves its input and one scale per row, like a GPU's kernel."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (..., 1)
        r = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        # LayerNorm's gradient, with mean 0, is this one minus the mean of r w dy over C
        x, weight, r = ctx.saved_tensors
        size = x.shape[-1:]
        dx, dweight, _ = torch.ops.aten.native_layer_norm_backward(
            dy, x, size, torch.zeros_like(r), r, weight, None, [True, True, False]
        )
        mean = (dy @ weight).unsqueeze(-1).mul_(r).div_(x.shape[-1])  # (..., 1)
        return dx.add_(mean), dweight, None


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + D/2]) of every head by its position's angle.

    x (B, T, heads, D); cos and sin (T, 1, D), the first half of sin negated; (B, T, 1, D) if a
    server's rows are at different positions.
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


# ---- the last matrix and the loss

LOGITS = 2**22  # logits computed at a time, at least


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The sum over all tokens of the cross entropy of `hidden @ weight.T`, in nats (fp32 or fp64).

    hidden (B, T, C), weight (V, C), targets (B, T) from 0 to V - 1. As many rows are computed at
    once as keep their logits no larger than the weight, or than `LOGITS`. Differentiable only once.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden, weight = (each.to(torch.get_autocast_dtype(kind)) for each in (hidden, weight))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), wanted)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, wanted):
        exact = torch.promote_types(hidden.dtype, torch.float32)  # no sum has fewer bits
        nats = hidden.new_zeros((), dtype=exact)
        dhidden = torch.empty_like(hidden) if wanted else None
        dweight = torch.zeros_like(weight, dtype=exact) if wanted else None
        rows = max(weight.shape[1], LOGITS // weight.shape[0])
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            gradients = (dhidden[part], dweight) if wanted else None
            nats += _loss_of_rows(hidden[part], weight, targets[part, None], exact, gradients)
        ctx.save_for_backward(dhidden, dweight)
        ctx.format = weight.dtype
        return nats

    @staticmethod
    def backward(ctx, dnats):
        dhidden, dweight = ctx.saved_tensors
        return dhidden * dnats.to(dhidden.dtype), (dweight * dnats).to(ctx.format), None, None


def _loss_of_rows(hidden, weight, targets, exact, gradients):
    """The sum of the rows' losses; fills the rows' gradient and adds to the weight's."""
    logits = F.linear(hidden, weight)  # (rows, V)
    logs = torch.log_softmax(logits, dim=-1, dtype=exact)
    nats = -logs.gather(1, targets).sum()
    if gradients:
        dhidden, dweight = gradients
        softmax = logs.exp_()
        softmax.scatter_add_(1, targets, softmax.new_full(targets.shape, -1.0))
        dlogits = softmax.to(hidden.dtype)
        torch.mm(dlogits, weight, out=dhidden)
        dweight += dlogits.t() @ hidden
    return nats
