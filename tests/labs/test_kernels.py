"""Lab 12: the answers that its checks must accept and reject, and its pieces."""

import sys

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.checks import check

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

LAB = Lab(
    "12_kernels",
    {
        "vector_add": ("check_add", "add", "vector_add.py"),
        "clipped_adamw": ("check_clipped", "clipped_adamw", "clipped_adamw.py"),
        "softmax": ("check_softmax", "softmax", "softmax.py"),
        "fused_norm": ("check_norm", "fused_norm", "fused_norm.py"),
    },
)

OTHERS = {
    "vector_add: a few programs, each of which walks": """
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        places = first + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(x_ptr + places * x_stride, places < n)
        y = tl.load(y_ptr + places * y_stride, places < n)
        tl.store(out_ptr + places * out_stride, x + y, places < n)

def add(x, y, out):
    n = x.numel()
    strides = x.stride(0), y.stride(0), out.stride(0)
    add_kernel[(min(7, triton.cdiv(n, 512)),)](x, y, out, n, *strides, BLOCK=512)
""",
    "vector_add: its own imports, the other order, pointers that move": """
import triton
import triton.language as tl

@triton.jit
def sums(o, a, b, sa, sb, so, count, SIZE: tl.constexpr):
    begin = tl.cast(tl.program_id(axis=0), tl.int64) * SIZE
    inside = tl.arange(0, SIZE) < count - begin
    lane = tl.arange(0, SIZE).to(tl.int64)
    a += begin * sa
    b += begin * sb
    o += begin * so
    total = tl.load(b + lane * sb, mask=inside, other=0) + tl.load(a + lane * sa, mask=inside)
    tl.store(o + lane * so, total, mask=inside)

def add(x, y, out):
    grid = lambda meta: (triton.cdiv(x.shape[0], meta["SIZE"]),)
    sums[grid](out, x, y, *x.stride(), *y.stride(), *out.stride(), len(x), SIZE=2048, num_warps=8)
""",
    "vector_add: large blocks of sixteen warps": """
def add(x, y, out):
    n, block = x.numel(), 4096
    add_kernel[(-(-n // block), 1, 1)](
        x, y, out, n, x.stride(0), y.stride(0), out.stride(0), BLOCK=block, num_warps=16
    )
""",
    "vector_add: the size of a block by a heuristic": """
@triton.heuristics({"BLOCK": lambda given: 2048 if given["n"] > 2048 else 512})
@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, x_stride, y_stride, out_stride, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = places < n
    x = tl.load(x_ptr + places * x_stride, mask)
    y = tl.load(y_ptr + places * y_stride, mask)
    tl.store(out_ptr + places * out_stride, x + y, mask)

def add(x, y, out):
    grid = lambda given: (triton.cdiv(x.numel(), given["BLOCK"]),)
    add_kernel[grid](x, y, out, x.numel(), x.stride(0), y.stride(0), out.stride(0))
""",
    "clipped_adamw: few programs for the norm, its root taken apart": """
@triton.jit
def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        places = first + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + places, places < n, other=0.0)
        total += g * g
    tl.store(parts_ptr + tl.program_id(0), tl.sqrt(tl.sum(total, 0)))

def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    n, few = p.numel(), 5
    roots = g.new_empty(few)
    squares_kernel[(few,)](g, roots, n, BLOCK=512)
    norm = torch.linalg.vector_norm(roots)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    factor = torch.where(torch.isfinite(norm), factor, torch.full_like(norm, -1.0))
    step_kernel[(triton.cdiv(n, 2048),)](
        p, g, m, v, factor, n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
        math.sqrt(1 - betas[1] ** t), eps, BLOCK=2048, num_warps=8,
    )
    return norm
""",
    "clipped_adamw: the kernel makes the factor itself, and masks with it": """
@triton.jit
def step_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, norm_ptr, n, max_norm, lr, beta1, beta2, rest1, rest2, eps, decay,
    BLOCK: tl.constexpr,
):
    norm = tl.load(norm_ptr)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = (places < n) & (norm < float("inf"))
    g = tl.load(g_ptr + places, mask, other=0.0) * tl.minimum(max_norm / (norm + 1e-6), 1.0)
    m = tl.load(m_ptr + places, mask, other=0.0)
    v = tl.load(v_ptr + places, mask, other=0.0)
    p = tl.load(p_ptr + places, mask, other=0.0)
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p -= lr * decay * p
    p -= lr * (m / rest1) / (tl.sqrt(v / rest2) + eps)
    tl.store(v_ptr + places, v, mask)
    tl.store(m_ptr + places, m, mask)
    tl.store(p_ptr + places, p, mask)

def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    n, grid = p.numel(), (triton.cdiv(p.numel(), 1024),)
    parts = torch.zeros(grid[0], device=g.device)
    squares_kernel[grid](g, parts, n, BLOCK=1024)
    norm = parts.double().sum().sqrt().float()
    step_kernel[grid](
        p, g, m, v, norm, n, max_norm, lr, *betas, 1 - betas[0] ** t, 1 - betas[1] ** t, eps,
        weight_decay, BLOCK=1024,
    )
    return norm
""",
    "clipped_adamw: the factor beside the norm, in one tensor": """
def clipped_step(p, g, m, v, t, max_norm, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01):
    n, block = p.numel(), 1024
    programs = triton.cdiv(n, block)
    parts = torch.empty(programs, device=p.device, dtype=torch.float32)
    squares_kernel[(programs,)](g, parts, n, block)
    both = torch.empty(2, device=p.device)
    both[0] = parts.sum().sqrt()
    both[1] = (max_norm / (both[0] + 1e-6)).clamp_(max=1.0)
    both[1].masked_fill_(~both[0].isfinite(), -1.0)
    step_kernel[(programs,)](
        p, g, m, v, both[1:], n, 1 - lr * weight_decay, *betas, lr / (1 - betas[0] ** t),
        math.sqrt(1 - betas[1] ** t), eps, block,
    )
    return both[0].clone()
""",
    "clipped_adamw: sums in two directions, undefined numbers set to zero": """
@triton.jit
def squares_kernel(g_ptr, parts_ptr, n, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + places, places < n)
    g = tl.where(places < n, g, 0.0)
    columns = tl.sum(tl.reshape(g * g, (32, BLOCK // 32)), 0)
    tl.store(parts_ptr + tl.program_id(0), tl.sum(columns, 0))
""",
    "softmax: powers of two": """
@triton.jit
def forward_kernel(x_ptr, y_ptr, d, scale, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    offsets = tl.program_id(0).to(tl.int64) * d + columns
    x = tl.load(x_ptr + offsets, columns < d, other=-float("inf")).to(tl.float32)
    e = tl.exp2((x - tl.max(x, 0)) * (scale * 1.4426950408889634))
    tl.store(y_ptr + offsets, e * (1 / tl.sum(e, 0)), columns < d)
""",
    "softmax: several rows for each program": """
@triton.jit
def forward_kernel(x_ptr, y_ptr, rows, d, scale, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = tl.cast(row, tl.int64) * d + columns
        x = tl.load(x_ptr + offsets, mask, other=-float("inf")).to(tl.float32) * scale
        e = tl.exp(x - tl.max(x, 0))
        tl.store(y_ptr + offsets, (e / tl.sum(e, 0)).to(y_ptr.dtype.element_ty), mask)

def forward(ctx, x, scale):
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    y, (rows, d) = torch.empty_like(flat), flat.shape
    forward_kernel[(min(rows, 3),)](flat, y, rows, d, scale, **sizes(d))
    ctx.save_for_backward(y)
    ctx.scale = scale
    return y.view(x.shape)

def backward(ctx, dy):
    (y,) = ctx.saved_tensors
    dx, (rows, d) = torch.empty_like(y), y.shape
    dy, shape = dy.reshape(-1, d).contiguous(), dy.shape
    backward_kernel[(rows,)](y, dy, dx, d, ctx.scale, **sizes(d))
    return dx.view(shape), None

Softmax.forward, Softmax.backward = staticmethod(forward), staticmethod(backward)
""",
    "softmax: the logarithm of the sum is kept too": """
@triton.jit
def forward_kernel(x_ptr, y_ptr, lse_ptr, d, scale, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    offsets = tl.program_id(0).to(tl.int64) * d + columns
    x = tl.load(x_ptr + offsets, mask, other=-float("inf")).to(tl.float32) * scale
    top = tl.max(x, 0)
    e = tl.exp(x - top)
    total = tl.sum(e, 0)
    tl.store(lse_ptr + tl.program_id(0), tl.log(total) + top)
    tl.store(y_ptr + offsets, e / total, mask)

def forward(ctx, x, scale):
    y, d = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    lse = torch.empty(x.shape[:-1], device=x.device)
    forward_kernel[(lse.numel(),)](x.contiguous(), y, lse, d, scale, **sizes(d))
    ctx.save_for_backward(y, lse)
    ctx.scale = scale
    return y

def backward(ctx, dy):
    y, lse = ctx.saved_tensors
    dx, d = torch.empty_like(y), y.shape[-1]
    backward_kernel[(lse.numel(),)](y, dy.contiguous(), dx, d, ctx.scale, **sizes(d))
    return dx, None

Softmax.forward, Softmax.backward = staticmethod(forward), staticmethod(backward)
""",
    "softmax: differentiated once, and with more warps": """
class Softmax(Softmax):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        dx, d = torch.empty_like(y), y.shape[-1]
        block = max(16, triton.next_power_of_2(d))
        dy = dy if dy.is_contiguous() else dy.clone(memory_format=torch.contiguous_format)
        warps = min(32, max(1, block // 128))
        backward_kernel[(y.numel() // d, 1)](y, dy, dx, d, ctx.scale, block, num_warps=warps)
        return dx, None
""",
    "softmax: a matrix is made of x outside": """
def softmax(x, scale=1.0):
    return Softmax.apply(x.reshape(-1, x.shape[-1]).contiguous(), scale).view(x.shape)
""",
    "fused_norm: rows that follow one another": """
@triton.jit
def norm_kernel(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask, other=0.0)
    programs = tl.num_programs(0)
    begin = tl.program_id(0) * rows // programs
    for row in range(begin, (tl.program_id(0) + 1) * rows // programs):
        offsets = tl.cast(row, tl.int64) * d + columns
        h = tl.load(x_ptr + offsets, mask, other=0.0)
        h += tl.load(residual_ptr + offsets, mask, other=0.0)
        y = h * tl.rsqrt(tl.sum(h * h, 0) / d + eps) * w
        tl.store(y_ptr + offsets, y, mask)
        tl.store(h_ptr + offsets, h, mask)
""",
    "fused_norm: a loop that begins with 64 bits": """
@triton.jit
def norm_kernel(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask, other=0.0)
    for row in range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0)):
        offsets = row * d + columns
        h = tl.load(x_ptr + offsets, mask, other=0.0)
        h += tl.load(residual_ptr + offsets, mask, other=0.0)
        tl.store(h_ptr + offsets, h, mask)
        tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w, mask)
""",
    "fused_norm: the row made wide, as the compiler knows it": """
@triton.jit
def norm_kernel(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask, other=0.0)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        offsets = row.to(tl.int64) * d + columns
        h = tl.load(x_ptr + offsets, mask, other=0.0)
        h += tl.load(residual_ptr + offsets, mask, other=0.0)
        tl.store(h_ptr + offsets, h, mask)
        tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w, mask)
""",
    "fused_norm: a loop of the language's own": """
@triton.jit
def norm_kernel(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask, other=0.0)
    for row in tl.range(tl.program_id(0).to(tl.int64), rows, tl.num_programs(0), num_stages=1):
        offsets = row * d + columns
        h = tl.load(x_ptr + offsets, mask, other=0.0)
        h += tl.load(residual_ptr + offsets, mask, other=0.0)
        tl.store(h_ptr + offsets, h, mask)
        tl.store(y_ptr + offsets, h / tl.sqrt(tl.sum(h * h, 0) / d + eps) * w, mask)
""",
    "fused_norm: one tensor for both results, more warps": """
def add_norm(x, residual, weight, eps):
    rows, d = x.shape
    y, h = x.new_empty(2, rows, d).unbind()
    block = triton.next_power_of_2(d)
    norm_kernel[(min(rows, 140),)](
        x, residual, weight, y, h, rows, d, eps, BLOCK=block,
        num_warps=16 if d > 2000 else 4 if d > 500 else 1,
    )
    return [y, h]
""",
    "fused_norm: a loop that counts, nothing beyond the mask": """
@triton.jit
def norm_kernel(x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        places = row * d + columns
        h = tl.load(residual_ptr + places, mask) + tl.load(x_ptr + places, mask)
        mean = tl.sum(tl.where(mask, h * h, 0.0), 0) / d
        tl.store(h_ptr + places, h, mask)
        tl.store(y_ptr + places, w * (h / tl.sqrt(mean + eps)), mask)
        row += tl.num_programs(0)
""",
    "fused_norm: the number of programs is a constant of the kernel": """
@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, rows, d, eps, STEP: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    w = tl.load(w_ptr + columns, mask, other=0.0)
    for row in range(tl.program_id(0), rows, STEP):
        begin = tl.cast(row, tl.int64) * d
        h = tl.load(x_ptr + begin + columns, mask, other=0.0)
        h += tl.load(residual_ptr + begin + columns, mask, other=0.0)
        tl.store(h_ptr + begin + columns, h, mask)
        y = h / tl.sqrt_rn(tl.sum(h * h, 0) / d + eps) * w
        tl.store(y_ptr + begin + columns, y, mask)

def add_norm(x, residual, weight, eps):
    (rows, d), programs = x.shape, min(132, x.shape[0])
    y, h = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(d)
    warps = min(16, max(1, block // 128))
    norm_kernel[(programs,)](
        x, residual, weight, y, h, rows, d, eps, programs, block, num_warps=warps
    )
    return y, h
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 105, (12, 6, 4)

    def task(self, exercise, tasks):
        return tasks[1]  # the kernel's stub can be called; the function that launches it says so


def test_without_the_triton_language_a_check_says_what_to_do(monkeypatch, tmp_path, capsys):
    from labs.support.kernels import check_add

    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "utils.kernels.language", None)
    check("12a", check_add.add, LAB.solution / "vector_add.py")
    assert capsys.readouterr().out.startswith("[ ] 12a: ")
