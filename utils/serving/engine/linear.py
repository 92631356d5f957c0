"""The engine's matrix products: what a rank multiplies with its part of a matrix.

Linear        floating point
Int8Linear    8-bit whole numbers on both sides: each row of x gets a scale of its own
Int4Linear    4-bit weights, which become floating point in each product

A row of a result follows from its row of x alone, so no token depends on the requests that it is
served with. Whole numbers and scales stay in memory as they are stored (stored.py).
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils.compression.scheme import INT4, INT8


class Linear:
    """y = x·Wᵀ + b; `summed`: these are partial results, of which every rank gets the sum."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, summed: bool):
        self.weight, self.bias, self.summed = weight, bias, summed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias)
        if self.summed:
            dist.all_reduce(y)
        return y


class Int8Linear:
    """The same with W in whole numbers of 8 bits, and x, too: y = (xq·Wqᵀ) · (scales of the rows of
    both) + b, where products are added up exactly.

    Where ranks have columns of W, and so of x, the scale of a row of x is that of its columns on
    all ranks: one small message more, and the whole numbers are those of one rank.

    values (N, K) int8;   scale (N, 1) fp32
    """

    def __init__(
        self, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, summed: bool
    ):
        self.values, self.scale, self.bias, self.summed = values.t(), scale[:, 0], bias, summed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).float()
        highest = rows.abs().amax(dim=1, keepdim=True)
        if self.summed:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        scale = highest.clamp_(min=1e-30) / INT8.highest  # (rows, 1)
        values = (rows / scale).round_().to(torch.int8)
        y = torch._int_mm(values, self.values).float().mul_(scale).mul_(self.scale)
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        if self.bias is not None:
            y += self.bias
        if self.summed:
            dist.all_reduce(y)
        return y


class Int4Linear:
    """The same with W in 4 bits, and x as it is: W becomes floating point, which is there for this
    product only.

    packed (N, G · 16) uint8;   scale (N, G) fp32, one for 32 columns
    offset   columns of the first group that other ranks have
    """

    def __init__(
        self,
        packed: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        summed: bool,
        offset: int,
    ):
        self.packed, self.scale, self.bias, self.summed = packed, scale, bias, summed
        self.offset = offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.dequantized()[:, self.offset : self.offset + x.shape[-1]]
        y = F.linear(x, weight.to(x.dtype), self.bias)
        if self.summed:
            dist.all_reduce(y)
        return y

    def dequantized(self) -> torch.Tensor:
        """W with the columns of whole groups, fp32 (N, G · 32)."""
        N, G = self.scale.shape
        numbers = torch.empty(N, G * 16, 2, device=self.packed.device)
        numbers[..., 0] = (self.packed << 4).view(torch.int8) >> 4  # with the sign of four bits
        numbers[..., 1] = self.packed.view(torch.int8) >> 4
        return numbers.view(N, G, INT4.group_size).mul_(self.scale[:, :, None]).view(N, -1)
