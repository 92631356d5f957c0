"""Exercise 12b: AdamW with gradient clipping built in, in two launches.

Clipping by the norm (`torch.nn.utils.clip_grad_norm_`) reads all gradients to compute their norm,
then reads and writes them once more to scale them; only then does the optimizer read them again.
The scaling needs no pass of its own: the optimizer's kernel already has each gradient in a
register.

    first launch     reads g                  4 bytes per parameter
    second launch    reads p, g, m, v        16
                     writes p, m, v          12

Only the device knows the factor. A host that reads it (`.item()`, an `if`) waits for the first
launch, and the device then waits for the host: keep it in a tensor, and let the second kernel load
it.
"""

import math

import torch

from utils.kernels.language import tl, triton


# two kernels: sums of squares, one per program; and the step
@triton.jit
def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr): ...


def clipped_step(
    p: torch.Tensor,
    g: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    t: int,
    max_norm: float,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> torch.Tensor:
    """Step t = 1, 2, … of AdamW for n parameters, in place, as if g were clipped to `max_norm`.

    p, g, m, v   (n,) fp32, contiguous: weights, gradient, and AdamW's two averages
    returns      the norm of g, before clipping: fp32 of shape (), on the device

        c = min(1, max_norm / (norm + 1e-6))
        p = p · (1 - lr · weight_decay)
        m = β1 · m + (1 - β1) · c·g               v = β2 · v + (1 - β2) · (c·g)²
        p = p - lr / (1 - β1^t) · m / (√v / √(1 - β2^t) + eps)

    n may exceed 2³¹, and t may be 100,000. g is not changed. If the norm is not finite, p, m and v
    are not changed either: one bad gradient spoils no weight. Two launches: g is loaded once in
    each, p, m and v are loaded and stored once in the second; a program touches at most 8 other
    elements, and torch's operations between the launches work only on the programs' sums. No atomic
    operations: the same g must give the same bits every time, wherever it is in memory, or replicas
    diverge. The host never waits for a value: no kernel argument that it supplies may depend on
    g. If 16 divides n and the addresses, loads and stores of blocks move 128 bits per thread, in
    both launches.
    """
    raise NotImplementedError(
        "write both kernels; launch, compute the factor (on the device), launch"
    )
