"""Matrices in whole numbers: w ≈ scale · (q − zero_point).

    q = quantize(w, INT8)                   # one scale for each row: an output channel of a layer
    q = quantize(w, INT4)                   # one for each group of 32 columns of a row
    q = quantize(w, Scheme(8, symmetric=False, per="tensor"))
    q.dequantize()                          # what a layer computes with, in fp32
    q.nbytes, q.columns(0, 344)             # bytes as stored; what one rank has of it

    values, scale = quantize_rows(x)        # activations: one scale for each token

Shapes: a matrix is (N, K), N outputs and K inputs, as in nn.Linear; G groups of columns. Symmetric:
the zero point is 0 and the largest size is 2^(bits-1) − 1, so that a number and its negative are
equally far from 0 (Wu et al., arXiv:2004.09602, section 3). A scale follows from the whole row of
the whole matrix; so ranks that cut it after that hold just the numbers of one rank.

This file and scheme.py need nothing but torch: the export copies them into every version that it
writes.
"""

from dataclasses import dataclass, replace

import torch

from utils.compression.scheme import INT8, Scheme


@dataclass(frozen=True)
class Quantized:
    """A matrix in whole numbers.

    values      int8 (N, K), each between scheme.lowest and scheme.highest
    scale       fp32 (N, G); (1, 1) where the whole tensor has one
    zero_point  fp32 of the same shape, whole numbers; None: symmetric
    offset      columns of the first group that stand before this part, in a part of a whole
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme
    offset: int = 0

    def dequantize(self) -> torch.Tensor:
        """The numbers that the whole ones stand for, fp32 (N, K)."""
        values = self.values.float()
        if self.zero_point is not None:
            values -= self._wide(self.zero_point)
        return values.mul_(self._wide(self.scale))

    def columns(self, start: int, stop: int) -> "Quantized":
        """The part of these columns, with the scales of the whole."""
        if self.scheme.per != "group":
            return replace(self, values=self.values[:, start:stop])
        size = self.scheme.group_size
        groups = slice((self.offset + start) // size, -(-(self.offset + stop) // size))
        return replace(
            self,
            values=self.values[:, start:stop],
            scale=self.scale[:, groups],
            zero_point=None if self.zero_point is None else self.zero_point[:, groups],
            offset=(self.offset + start) % size,
        )

    @property
    def nbytes(self) -> int:
        """As stored: the bits of the numbers, and 4 bytes for each scale and each zero point."""
        parameters = self.scale.numel() * (1 if self.zero_point is None else 2)
        return -(-self.values.numel() * self.scheme.bits // 8) + 4 * parameters

    def steps(self) -> torch.Tensor:
        """The scale of each number, (N, K)."""
        return self._wide(self.scale).expand(self.values.shape)

    def _wide(self, numbers):
        """One number for each column, or one that fits all."""
        if self.scheme.per != "group":
            return numbers
        columns = torch.arange(self.values.shape[1], device=numbers.device) + self.offset
        return numbers[:, columns // self.scheme.group_size]


def quantize(w: torch.Tensor, scheme: Scheme) -> Quantized:
    """w (N, K) to the nearest whole numbers of the scheme.

    Raises ValueError where w is no matrix of finite numbers.
    """
    if w.ndim != 2 or not w.isfinite().all():
        raise ValueError(f"a tensor of shape {tuple(w.shape)} is no matrix of finite numbers")
    scale, zero_point = ranges(w, scheme)
    whole = Quantized(w, scale, zero_point, scheme)
    values = (w.float() * whole._wide(scale.reciprocal())).round_()
    if zero_point is not None:
        values += whole._wide(zero_point)
    return replace(whole, values=values.clamp_(scheme.lowest, scheme.highest).to(torch.int8))


def ranges(w: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale, zero point or None) of w (N, K), each (N, G): the range of its numbers, and 0 in it,
    becomes that of the scheme."""
    size = scheme.columns_of_a_scale(w.shape[1])
    parts = w.float().split(size, dim=1)  # G times (N, size)
    if scheme.per == "tensor":
        parts = [w.float().reshape(1, -1)]
    high = torch.stack([part.amax(dim=1) for part in parts], dim=1).clamp(min=0)
    low = torch.stack([part.amin(dim=1) for part in parts], dim=1).clamp(max=0)
    if scheme.symmetric:
        scale = torch.maximum(high, -low) / scheme.highest
        return _not_zero(scale), None
    scale = _not_zero((high - low) / (scheme.highest - scheme.lowest))
    return scale, (scheme.lowest - low / scale).round()


def _not_zero(scale):
    """A range of zeros alone has any scale."""
    return scale.where(scale > 0, 1.0)


# ---- activations


def quantize_rows(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., K) in 8 bits, symmetric: (int8 values, scale).

    scale   one that was calibrated before, any shape that fits; None: of each row its own (...,
            1), so that no token depends on the company that it comes in
    """
    if scale is None:
        scale = _not_zero(x.float().abs().amax(dim=-1, keepdim=True) / INT8.highest)
    values = (x.float() * (1 / scale)).round_().clamp_(INT8.lowest, INT8.highest)
    return values.to(torch.int8), scale


# ---- four bits in a byte


def pack(values: torch.Tensor) -> torch.Tensor:
    """int8 (N, K) between -8 and 7 -> uint8 (N, ceil(K / 2)): even columns in the low four bits."""
    if values.shape[1] % 2:
        values = torch.nn.functional.pad(values, (0, 1))
    nibbles = (values & 15).to(torch.uint8)
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """The inverse: int8 (N, columns)."""
    nibbles = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, :columns]
    return (nibbles.to(torch.int8) ^ 8) - 8  # the sign of the fourth bit
