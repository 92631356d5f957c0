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


### BEGIN SOLUTION: two kernels: sums of squares, one per program; and the step
### STUB: @triton.jit
### STUB: def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr): ...
@triton.jit
def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr):
    """Program i: the sum of squares of block i."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + places, places < n, other=0.0)
    tl.store(parts_ptr + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def step_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, factor_ptr, n, decay, beta1, beta2, step_size, root, eps,
    BLOCK: tl.constexpr,
):
    """Program i: AdamW for block i. A factor below 0 means that nothing may change."""
    factor = tl.load(factor_ptr)
    if factor >= 0:
        places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = places < n
        p = tl.load(p_ptr + places, mask)
        g = tl.load(g_ptr + places, mask) * factor
        m = tl.load(m_ptr + places, mask)
        v = tl.load(v_ptr + places, mask)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p * decay - step_size * m / (tl.sqrt(v) / root + eps)
        tl.store(p_ptr + places, p, mask)
        tl.store(m_ptr + places, m, mask)
        tl.store(v_ptr + places, v, mask)


### END SOLUTION


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
    ### BEGIN SOLUTION: write both kernels; launch, compute the factor (on the device), launch
    n, block = p.numel(), 1024
    grid = (triton.cdiv(n, block),)
    parts = torch.empty(grid, dtype=torch.float32, device=g.device)
    squares_kernel[grid](g, parts, n, BLOCK=block)
    norm = parts.sum().sqrt()
    factor = torch.where(norm.isfinite(), (max_norm / (norm + 1e-6)).clamp(max=1.0), -1.0)
    step_kernel[grid](
        p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
        math.sqrt(1 - betas[1] ** t), eps, BLOCK=block,
    )
    return norm
    ### END SOLUTION
