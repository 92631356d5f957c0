"""Integers for floating-point values: errors, shards, bytes, and torchao as the reference."""

import pytest
import torch
from torchao.quantization.quant_primitives import (
    MappingType,
    choose_qparams_affine,
    quantize_affine,
)

from utils.compression import INT4, INT8, Scheme, quantize
from utils.compression.quantize import pack, quantize_rows, unpack

SCHEMES = [
    INT8,
    INT4,
    Scheme(8, "tensor"),
    Scheme(8, "tensor", symmetric=False),
    Scheme(2),
    Scheme(5, symmetric=False),
    Scheme(3, "group", 7, symmetric=False),
]


def matrix(rows=9, columns=43, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + 0.3


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_number_is_within_half_a_step(scheme):
    w = matrix()
    q = quantize(w, scheme)
    assert q.values.dtype == torch.int8 and q.values.shape == w.shape
    assert scheme.lowest <= q.values.min() and q.values.max() <= scheme.highest
    steps = q.steps()
    whole = 1.0 if scheme.symmetric else 2.0  # a zero point is rounded as well
    assert ((q.dequantize() - w).abs() <= whole * 0.5001 * steps).all()


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.per != "group" or s == INT4], ids=str)
def test_numbers_and_scales_are_torchaos(scheme):
    w = matrix(columns=64)
    mapping = MappingType.SYMMETRIC if scheme.symmetric else MappingType.ASYMMETRIC
    block = (len(w) if scheme.per == "tensor" else 1, scheme.columns_of_a_scale(64))
    found = choose_qparams_affine(w, mapping, block, torch.int8, scheme.lowest, scheme.highest)
    theirs = quantize_affine(w, block, *found, torch.int8, scheme.lowest, scheme.highest)
    ours = quantize(w, scheme)
    assert torch.equal(ours.values, theirs)
    assert torch.equal(ours.scale.flatten(), found[0].flatten())
    if not scheme.symmetric:
        assert torch.equal(ours.zero_point.flatten(), found[1].flatten().float())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_parts_are_those_of_the_whole(scheme):
    q = quantize(matrix(), scheme)
    whole = q.dequantize()
    assert torch.equal(q.columns(5, 40).dequantize(), whole[:, 5:40])
    assert torch.equal(q.columns(5, 40).columns(11, 20).dequantize(), whole[:, 16:25])


def test_bytes():
    q = quantize(matrix(8, 64), INT8)
    assert q.nbytes == 8 * 64 + 8 * 4
    assert quantize(matrix(8, 64), INT4).nbytes == 8 * 64 // 2 + 8 * 2 * 4
    assert quantize(matrix(3, 33), INT4).nbytes == 50 + 3 * 2 * 4  # 99 values of half a byte
    asymmetric = Scheme(8, "tensor", symmetric=False)
    assert quantize(matrix(8, 64), asymmetric).nbytes == 8 * 64 + 8


def test_rows_of_zeros_stay_zeros():
    w = matrix()
    w[3] = 0.0
    for scheme in SCHEMES:
        assert not quantize(w, scheme).dequantize()[3].any() or scheme.per == "tensor"
    values, scale = quantize_rows(torch.zeros(2, 5))
    assert not values.any() and scale.isfinite().all()


@pytest.mark.parametrize("columns", [1, 2, 31, 64])
def test_two_numbers_in_a_byte(columns):
    values = torch.randint(-8, 8, (5, columns), dtype=torch.int8)
    packed = pack(values)
    assert packed.shape == (5, -(-columns // 2)) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, columns), values)


def test_a_token_does_not_depend_on_its_company():
    x = torch.randn(4, 7, 16)
    values, scale = quantize_rows(x)
    alone, alone_scale = quantize_rows(x[2, 3])
    assert torch.equal(values[2, 3], alone) and torch.equal(scale[2, 3], alone_scale)
    clipped, _ = quantize_rows(x, torch.tensor(0.001))
    assert clipped.abs().max() == 127 and torch.equal(clipped.sign(), x.sign().to(torch.int8))


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match="bits 9 is not in 2 to 8"):
        Scheme(9)
    with pytest.raises(ValueError, match="per 'row' is not one of"):
        Scheme(8, "row")
    with pytest.raises(ValueError, match="per channel and group_size 32 cannot be combined"):
        Scheme(4, "channel", 32)
    for wrong in (torch.ones(3), torch.full((2, 2), torch.nan)):
        with pytest.raises(ValueError, match="not a matrix of finite values"):
            quantize(wrong, INT8)
