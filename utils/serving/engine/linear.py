"""The engine's matrix products in PyTorch: a rank's input times its shard of a matrix.

    product = Linear(weight, bias, summed=False)
    y = product(x)                                   # (..., in) -> (..., out)

Linear        floating point
Int8Linear    8-bit integers on both sides: each row of x has its own scale
Int4Linear    4-bit weights, converted to floating point a little at a time

They are the reference for native.py, which has the same products compiled for the CPU, and the
fallback where that is not available.

A decode step multiplies few rows, so its time is dominated by reading the matrices. On the CPU they
are therefore kept in 16 bits if that is accurate enough (`in_half`): half the bytes, and FBGEMM's
kernel is also more efficient for few rows. All matrices of models/base take 0.4 ms instead of 1.6
with one row, and 2.5 instead of 4.8 with 16 (one thread of an AMD EPYC of 2022).

Integers and their scales take as much memory as in the files (stored.py). A row of a result depends
only on its row of x, so no token depends on the requests that it is batched with. On a GPU, few
rows go through kernels of utils/kernels/decode.py, which read the stored integers once; many rows
go through PyTorch's plain operators, in floating point.

Milliseconds for the 32 matrices of models/base's blocks, and for six of 1,024 to 4,096 elements;
one thread of a CPU with VNNI, weights that came from bfloat16:

    rows        1    16   256          1    16   256
    16 bits   0.3   2.1    35        1.7   8.8   132
    8 bits    0.9   1.9    17        1.7   5.1    37
    4 bits    3.6   6.3    39        9.0    20   153

So 8 bits save time when there are many rows, and 4 bits save only memory; compiled, both save more.
(PyTorch's own 4-bit kernel, `_weight_int4pack_mm_for_cpu`, takes as long as 16 bits; it rounds x,
scales and results to bfloat16, so that two ranks would not give the same tokens as one.)
"""

import functools
import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils.compression.scheme import INT8

FEW = 64  # rows of x
NUMBERS = 2**18  # elements of a 4-bit matrix converted at once: they stay in a CPU's cache

# when PyTorch removes these two functions, `in_half` uses its other path
warnings.filterwarnings("ignore", "fbgemm_.* is deprecated")
Product = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """y = x·Wᵀ + b; `summed`: partial results, which are summed over the ranks (all-reduce)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, summed: bool = False):
        self.product, self.summed = product_with(weight, bias), summed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        if self.summed:
            dist.all_reduce(y)
        return y


def product_with(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The fastest x -> x·Wᵀ + b for this matrix (out, in) on its device."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        if half_is_enough(weight) and "fbgemm" in torch.backends.quantized.supported_engines:
            return in_half(weight, bias)
        # on a CPU the product is faster with a matrix in column-major order
        weight = weight.t().contiguous().t()
    return partial(F.linear, weight=weight, bias=bias)


def half_is_enough(weight: torch.Tensor) -> bool:
    """Whether rounding to fp16 changes the matrix by less than a rounding to fp32 would. Of values
    that came from bfloat16 and are below 65504, it changes only those below 2⁻¹⁷."""
    away = torch.linalg.vector_norm(weight.half().float() - weight)
    return bool(away <= torch.finfo(weight.dtype).eps / 2 * torch.linalg.vector_norm(weight))


def in_half(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product with a matrix kept in fp16; x, the sums and y are fp32."""
    if torch.get_num_threads() == 1 and hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation"):
        # single-threaded, and 10 µs less per call
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        product = torch.fbgemm_linear_fp16_weight_fp32_activation
        return lambda x: product(x, packed, bias)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


# ---- integers


class QuantizedLinear:
    """y = x·Wᵀ + b with W in integers; subclasses define `product`."""

    def __init__(self, bias: torch.Tensor | None, summed: bool, kernels: ModuleType | None):
        self.bias, self.summed, self.kernels = bias, summed, kernels

    def few(self, x: torch.Tensor) -> bool:
        """Whether x has so few rows that our own kernel handles it."""
        return self.kernels is not None and x.numel() <= FEW * x.shape[-1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x if self.few(x) else x.float()).to(x.dtype)
        if self.bias is not None:
            y += self.bias
        if self.summed:
            dist.all_reduce(y)
        return y


class Int8Linear(QuantizedLinear):
    """W and x in 8 bits: the sums of products are integers, without rounding.

    If ranks have columns of W, and hence of x, the scale of a row of x covers its columns on all
    ranks. This takes one more message, of one value per row, and makes all integers equal to those
    of a single rank.

    values (N, K) int8;   scale (N, 1) fp32;   kernels   utils.kernels.decode, for few rows, or None
    """

    def __init__(
        self,
        values: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        summed: bool,
        kernels: ModuleType | None = None,
    ):
        super().__init__(bias, summed, kernels)
        self.values, self.scale = values.t(), scale[:, 0]
        self.multiply = torch._int_mm if exact(values.device.type) else _float_product

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N)"""
        if self.few(x) and not self.summed:
            return self._by_kernel(x, None)
        # (..., 1): the largest value; a norm is slower
        scale = x.abs().amax(dim=-1, keepdim=True).float()
        if self.summed:
            dist.all_reduce(scale, op=dist.ReduceOp.MAX)
        scale.div_(INT8.highest)
        if self.few(x):
            return self._by_kernel(x, scale.view(-1, 1))
        # in a row of zeros 0 · inf becomes some integer, but its scale is 0
        values = (x * scale.reciprocal()).round_().to(torch.int8)
        y = self.multiply(values.view(-1, x.shape[-1]), self.values)
        return (y.view(*x.shape[:-1], -1) * scale).mul_(self.scale)


    def _by_kernel(self, x, scale):
        rows = x.reshape(-1, x.shape[-1])
        y = self.kernels.int8_product(rows, self.values.t(), self.scale, row_scale=scale)
        return y.view(*x.shape[:-1], -1)


class Int4Linear(QuantizedLinear):
    """W in 4 bits, x unchanged.

    packed   uint8 (N, G · 16), two columns per byte;   scale fp32 (N, G), one per 32 columns
    offset   columns of the first group that are on another rank
    kernels  utils.kernels.decode, for few rows, or None
    """

    def __init__(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        summed: bool,
        offset: int,
        kernels: ModuleType | None = None,
    ):
        super().__init__(bias, summed, kernels)
        G = scale.shape[1]
        self.offset, self.stored = offset, (packed, scale)
        self.packed = packed.t().unflatten(0, (G, -1))  # (G, 16, N)
        if kernels is None:
            self.packed, self.stored = self.packed.contiguous(), None
        # four bits in the upper half of a byte, read as int8, are 16 times their signed value
        self.scale = (scale.t() / 16).contiguous()[:, None]  # (G, 1, N)
        self.step = max(1, NUMBERS // self.packed[0].numel())

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) -> (..., N)"""
        if self.few(x):
            rows = x.reshape(-1, x.shape[-1])
            y = self.kernels.int4_product(rows, *self.stored, self.offset)
            return y.view(*x.shape[:-1], -1)
        G, pairs, N = self.packed.shape
        after = 2 * G * pairs - self.offset - x.shape[-1]
        y = x.new_zeros(*x.shape[:-1], N)
        x, rows = F.pad(x, (self.offset, after)).view(-1, G, pairs, 2), y.view(-1, N)
        for start in range(0, G, self.step):
            groups = slice(start, start + self.step)
            for place, half in enumerate((self.packed[groups] << 4, self.packed[groups] & 0xF0)):
                weight = half.view(torch.int8).float().mul_(self.scale[groups])  # (groups, 16, N)
                rows.addmm_(x[:, groups, :, place].flatten(1), weight.flatten(0, 1))
        return y


@functools.cache
def exact(device: str) -> bool:
    """Whether PyTorch's integer product is exact on this device. A CPU without VNNI adds pairs of
    products in 16 bits, which overflow; a GPU refuses products of few rows."""
    if device != "cpu":
        return False
    largest = torch.full((64, 64), INT8.highest, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest) == 64 * INT8.highest**2).all())


def _float_product(x, w):
    """The integer product in fp32, exact for sums up to 2^24: those of at least 1,040 products."""
    return x.float() @ w.float()
