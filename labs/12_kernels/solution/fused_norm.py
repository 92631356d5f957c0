"""Exercise 12d, open: residual and norm of every decoder layer, with the fewest bytes.

    h = x + residual
    y = h / √(mean(h²) + eps) · weight          over rows of d elements

As plain operations that is five passes. One kernel with one row per program moves 20 bytes per
element: x, residual and weight in, h and y out, 4 bytes each. Can it be fewer? Count what each
program loads. An H100 has 132 SMs, and each needs at least one program.
"""

import torch

from utils.kernels.language import tl, triton

SMS = 132


### BEGIN SOLUTION: a kernel
### STUB: @triton.jit
### STUB: def norm_kernel(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, eps, BLOCK: tl.constexpr): ...
@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr
):
    """Program i: rows i, i + programs, …, with one copy of the weight."""
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask, other=0.0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * d + columns
        h = tl.load(x_ptr + offsets, mask, other=0.0)
        h += tl.load(residual_ptr + offsets, mask, other=0.0)
        tl.store(h_ptr + offsets, h, mask)
        y = h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w
        tl.store(y_ptr + offsets, y, mask)


### END SOLUTION


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h), each (rows, d), of x and residual (rows, d) and weight (d,): fp32, contiguous.

    d from 1 to 16,384, any number of rows. One launch, in which at least min(rows, 132) programs
    have a row; inputs are not changed, and results are in memory of their own. A NaN spoils y of
    its row only. If d is at least 128 and 16 divides d and the addresses, all loads and stores of
    rows move 128 bits per thread; up to d = 8,192 no register spills. The measure is bytes per
    element: everything that the kernel and torch's operators load and store, for 396 rows.
    """
    ### BEGIN SOLUTION: write the kernel and launch it
    rows, d = x.shape
    y, h = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(d)
    norm_kernel[(min(rows, SMS),)](
        x,
        residual,
        weight,
        y,
        h,
        rows,
        d,
        eps,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return y, h
    ### END SOLUTION
