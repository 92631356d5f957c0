"""Matrices in integers: w ≈ scale · (q − zero_point).

    q = quantize(w, INT8)                   # one scale per row: an output channel of a layer
    q = quantize(w, INT4)                   # one per group of 32 columns of a row
    q = quantize(w, Scheme(8, symmetric=False, per="tensor"))
    q.dequantize()                          # the matrix that a layer computes with, in fp32
    q.nbytes, q.columns(0, 344)             # bytes as stored; one rank's columns

    values, scale = quantize_rows(x)        # activations: one scale per token

Shapes: a matrix is (N, K), N outputs and K inputs, as in nn.Linear; G groups of columns. Symmetric:
the zero point is 0 and the largest absolute value is 2^(bits-1) − 1, so that the range is symmetric
about 0 (Wu et al., arXiv:2004.09602, section 3). Scales are computed before a matrix is sharded, so
all ranks together hold the same integers as a single rank.

This file and scheme.py need only torch: the export copies them into every version that it writes.
"""

from dataclasses import dataclass, replace

import torch

from utils.compression.scheme import INT8, Scheme


@dataclass(frozen=True)
class Quantized:
    """A matrix in integers.

    values      int8 (N, K), each between scheme.lowest and scheme.highest
    scale       fp32 (N, G); (1, 1) if the whole tensor has one
    zero_point  fp32 of the same shape, integers; None: symmetric
    offset      in a slice of columns: columns of its first group that precede the slice
    """

    values: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme
    offset: int = 0

    def dequantize(self) -> torch.Tensor:
        """The values that the integers represent, fp32 (N, K)."""
        values = self.values.float()
        if self.zero_point is not None:
            values -= self._wide(self.zero_point)
        return values.mul_(self._wide(self.scale))

    def columns(self, start: int, stop: int) -> "Quantized":
        """The slice of these columns, with the scales of the whole matrix."""
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
        """Bytes as stored: the bits of the integers, and 4 bytes per scale and per zero point."""
        parameters = self.scale.numel() * (1 if self.zero_point is None else 2)
        return -(-self.values.numel() * self.scheme.bits // 8) + 4 * parameters

    def steps(self) -> torch.Tensor:
        """The scale of each element, (N, K)."""
        return self._wide(self.scale).expand(self.values.shape)

    def _wide(self, numbers):
        """Scales or zero points, one per column or broadcastable to all columns."""
        if self.scheme.per != "group":
            return numbers
        columns = torch.arange(self.values.shape[1], device=numbers.device) + self.offset
        return numbers[:, columns // self.scheme.group_size]


def quantize(w: torch.Tensor, scheme: Scheme) -> Quantized:
    """w (N, K) rounded to the nearest integers of the scheme.

    Raises ValueError if w is not a matrix of finite values.
    """
    if w.ndim != 2 or not w.isfinite().all():
        raise ValueError(f"a tensor of shape {tuple(w.shape)} is not a matrix of finite values")
    scale, zero_point = ranges(w, scheme)
    whole = Quantized(w, scale, zero_point, scheme)
    values = (w.float() * whole._wide(scale.reciprocal())).round_()
    if zero_point is not None:
        values += whole._wide(zero_point)
    return replace(whole, values=values.clamp_(scheme.lowest, scheme.highest).to(torch.int8))


def ranges(w: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(scale, zero point or None) of w (N, K), each (N, G): map the range of its values, extended
    to include 0, to that of the scheme."""
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
    """Replace scales of 0, from values that are all 0, by 1."""
    return scale.where(scale > 0, 1.0)


# ---- activations


def quantize_rows(
    x: torch.Tensor, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (..., K) in 8 bits, symmetric: (int8 values, scale).

    scale   a calibrated one, of any shape that broadcasts; None: one per row, (..., 1), so that no
            token depends on the others in its batch
    """
    if scale is None:
        scale = _not_zero(x.float().abs().amax(dim=-1, keepdim=True) / INT8.highest)
    values = (x.float() * (1 / scale)).round_().clamp_(INT8.lowest, INT8.highest)
    return values.to(torch.int8), scale


# ---- two values per byte


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
