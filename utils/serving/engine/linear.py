"""The engine's matrix product: what a rank multiplies with its part of a matrix.

    product = Linear(weight, bias, summed=False)
    y = product(x)                                   # (..., in) -> (..., out)

A decode step multiplies few rows, so its time is that of reading the matrices. On the CPU they are
therefore kept in 16 bits where that is enough (`in_half`): half the bytes, and FBGEMM's kernel for
few rows loses less time besides. All matrices of models/base take 0.4 ms in place of 1.6 with one
row, and 2.5 in place of 4.8 with 16 (one thread of an AMD EPYC of 2022).
"""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional as F

# when PyTorch takes these two functions out, `in_half` goes its other way
warnings.filterwarnings("ignore", "fbgemm_.* is deprecated")
Product = Callable[[torch.Tensor], torch.Tensor]


class Linear:
    """y = x·Wᵀ + b; `summed`: these are partial results, of which every rank gets the sum."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, summed: bool = False):
        self.product, self.summed = product_with(weight, bias), summed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(x)
        if self.summed:
            dist.all_reduce(y)
        return y


def product_with(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """x -> x·Wᵀ + b, the fastest for this matrix (out, in) on its device."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        if half_is_enough(weight) and "fbgemm" in torch.backends.quantized.supported_engines:
            return in_half(weight, bias)
        # a CPU multiplies a matrix faster that lies in memory column by column
        weight = weight.t().contiguous().t()
    return partial(F.linear, weight=weight, bias=bias)


def half_is_enough(weight: torch.Tensor) -> bool:
    """Whether 16 bits change the matrix by less than one rounding to fp32 does. Of numbers that
    came from bfloat16 they change only those below 2⁻¹⁷ (and none where all are below 65504)."""
    away = torch.linalg.vector_norm(weight.half().float() - weight)
    return bool(away <= torch.finfo(weight.dtype).eps / 2 * torch.linalg.vector_norm(weight))


def in_half(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The product with a matrix kept in fp16; x, the sums and y are fp32."""
    if torch.get_num_threads() == 1 and hasattr(torch, "fbgemm_linear_fp16_weight_fp32_activation"):
        # it knows one thread only, and a call costs 10 µs less
        packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        product = torch.fbgemm_linear_fp16_weight_fp32_activation
        return lambda x: product(x, packed, bias)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)
