"""Exercise 12a: a vector add that stays inside its vectors, whatever their layout.

A kernel gets the address of a vector's first element. The next one need not be adjacent in memory:
in a column of a matrix it is a row further on. `vector.stride(0)` says how far, in elements. For
Triton an integer that is 1 at launch is a constant, so one kernel serves both cases, and the
compiler knows when elements are contiguous.

Write the kernel and the function that launches it.
"""

import torch

from utils.kernels.language import tl, triton


### BEGIN SOLUTION: the kernel: a block of elements per program, and a mask
### STUB: @triton.jit
### STUB: def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr): ...
@triton.jit
def add_kernel(
    x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr
):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < n
    x = tl.load(x_ptr + places * x_stride, mask)
    y = tl.load(y_ptr + places * y_stride, mask)
    tl.store(out_ptr + places * out_stride, x + y, mask)


### END SOLUTION


def add(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """out[i] = x[i] + y[i] for vectors of n elements, n ≥ 1 (even above 2³¹), of one type: fp16,
    fp32, fp64, or integers of 8 to 64 bits, whose sums fit. (Not bf16: Triton's interpreter adds
    its bits as if they were integers.)

    Each vector may have any stride (a column, every third element, one element expanded to n), even
    one that puts its last element more than 2³¹ elements after its first. `out` may be x or y.

    One launch. Each element of x and y is loaded once, each of `out` stored once, and nothing else
    is touched; no copy is made. If all strides are 1 and 16 divides n and the addresses, each load
    and store of the machine code moves 128 bits per thread (fp32).
    """
    ### BEGIN SOLUTION: write the kernel, and launch it with enough programs
    n, block = x.numel(), 1024
    add_kernel[(triton.cdiv(n, block),)](
        x, y, out, n, x.stride(0), y.stride(0), out.stride(0), BLOCK=block
    )
    ### END SOLUTION
