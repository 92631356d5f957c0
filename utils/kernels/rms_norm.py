"""RMSNorm as two kernels: forward and backward read each value once and write each result once.

    y = rms_norm(x, weight, eps=1e-5)        # as torch.nn.functional.rms_norm(x, (d,), weight, eps)
    y.sum().backward()

y = x / rms · w with rms = √(mean(x²) + eps) over a row of d elements (Zhang & Sennrich 2019, arXiv
1910.07467). With x̂ = x / rms and h = w · dy the gradients are

    dx = (h - x̂ · mean(x̂ · h)) / rms        dw = sum over rows of dy · x̂

Eager code makes a pass over memory for each operation. Here a program holds a row in registers: the
forward kernel reads x and writes y, the backward kernel reads x and dy and writes dx. 1 / rms of
each row is kept, since one value per row costs almost nothing. For dw every program sums its own
rows, always the same ones in the same order, and torch does the last sum over programs: the bits
are the same each time, which atomic additions would not guarantee. A processor (SM) has registers
for so few of these programs that memory would idle while they sum a row; the next rows are
therefore loaded into shared memory meanwhile.
"""

import torch
from torch.autograd.function import once_differentiable

from utils.kernels.language import check_device, rounded, tl, triton

LONGEST = 2**14  # elements of a row, which a program holds whole
WARPS = 16  # per SM in the backward pass: registers do not suffice for more
SHARED = 2**16  # bytes per backward program for rows being loaded


@triton.jit
def forward_kernel(x_ptr, w_ptr, y_ptr, inverse_ptr, d, eps, BLOCK: tl.constexpr):
    """Program i: row i of (rows, d). Keeps 1 / rms of the row for the backward pass."""
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * d + columns, mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + columns, mask, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / d + eps)
    tl.store(inverse_ptr + row, inverse)
    tl.store(y_ptr + row * d + columns, rounded(x * inverse * w, y_ptr), mask)


@triton.jit
def backward_kernel(
    x_ptr, w_ptr, dy_ptr, inverse_ptr, dx_ptr, dw_ptr, rows, d,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    """Program i: rows i, i + programs, …, and row i of dw_ptr (programs, d), its partial dw. While
    one row is computed, STAGES - 1 others are loaded."""
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        offsets = tl.cast(row, tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offsets, mask, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_ptr + row)
        x_hat, h = x * inverse, w * dy
        dx = (h - x_hat * (tl.sum(x_hat * h, 0) / d)) * inverse
        tl.store(dx_ptr + offsets, rounded(dx, dx_ptr), mask)
        dw += dy * x_hat
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * d + columns, dw, mask)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        d = weight.numel()
        rows = x.reshape(-1, d).contiguous()  # (rows, d)
        weight = weight.contiguous()
        y = torch.empty_like(rows)
        inverse = torch.empty(len(rows), dtype=torch.float32, device=x.device)
        if rows.numel():
            forward_kernel[(len(rows),)](rows, weight, y, inverse, d, eps, **_sizes(d))
        ctx.save_for_backward(rows, weight, inverse)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        rows, weight, inverse = ctx.saved_tensors
        d = weight.numel()
        dx = torch.empty_like(rows)
        sizes = _sizes(d)
        programs = min(len(rows), _processors(rows.device) * max(1, WARPS // sizes["num_warps"]))
        on_their_way = 2 * sizes["BLOCK"] * rows.element_size()  # x and dy of a row
        parts = torch.empty(programs, d, dtype=torch.float32, device=rows.device)
        if programs:
            backward_kernel[(programs,)](
                rows, weight, dy.reshape(-1, d).contiguous(), inverse, dx, parts, len(rows), d,
                STAGES=1 + min(2, SHARED // on_their_way), **sizes,
            )
        return dx.view(dy.shape), parts.sum(0).to(weight.dtype), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """RMSNorm of the last dimension: x (…, d) and weight (d,), both fp32 or both bf16; (…, d).

    Sums are in fp32. Raises ValueError for other types and shapes, and if Triton cannot run.
    """
    if weight.ndim != 1 or not weight.numel() or x.shape[-1:] != weight.shape:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not end with the weight's {tuple(weight.shape)}"
        )
    if weight.numel() > LONGEST:
        raise ValueError(
            f"rows of {weight.numel()} elements exceed the kernel's limit of {LONGEST}: use "
            "torch.nn.functional.rms_norm"
        )
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"x is {x.dtype} and weight {weight.dtype}: make both fp32 or both bf16")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device}, but the weight is on {weight.device}")
    check_device(x.device, "torch.nn.functional.rms_norm")
    on = torch.cuda.device_of(x)  # Triton launches on the current GPU; on a CPU it does nothing
    with on:
        return _RMSNorm.apply(x, weight, eps)


def _sizes(d):
    block = 1 << (d - 1).bit_length()
    return {"BLOCK": block, "num_warps": max(1, block // 512)}  # 16 elements of a row per thread


def _processors(device):
    if device.type == "cpu":  # the interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
