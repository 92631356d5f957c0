"""The formats, computed by arithmetic, against torch's types, bit by bit."""

import math

import pytest
import torch

from utils.memory.number_formats import FORMATS, fate, from_bits, round_to, spacing, split_bits

TORCH = [form for form in FORMATS.values() if form.dtype is not None]


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def form(request):
    return request.param


def numbers(form, count=20_000):
    """Random values of all magnitudes of the format, zero, and midpoints between neighbours."""
    generator = torch.Generator().manual_seed(0)
    low, high = math.log2(form.smallest) - 3, math.log2(form.largest)
    powers = torch.rand(count, generator=generator, dtype=torch.float64) * (high - low) + low
    signs = torch.randint(0, 2, (count,), generator=generator) * 2 - 1
    x = (signs * 2.0**powers).float()
    x = x[x.abs() <= form.largest]
    kept = round_to(x, form)
    halves = (kept.double() + 0.5 * spacing(kept, form)).float()
    halves = halves[halves.abs() <= form.largest]
    return torch.cat([x, halves, torch.zeros(1), torch.tensor([form.largest, -form.smallest])])


@pytest.mark.parametrize("form", TORCH, ids=lambda form: form.name)
def test_the_limits_are_those_of_torch(form):
    info = torch.finfo(form.dtype)
    assert form.largest == info.max and form.smallest_normal == info.tiny
    assert form.epsilon == info.eps and form.bits == info.bits == 8 * form.bytes
    assert torch.tensor(form.smallest).to(form.dtype).double() > 0
    assert torch.tensor(form.smallest / 2).to(form.dtype).double() == 0


@pytest.mark.parametrize("form", TORCH, ids=lambda form: form.name)
def test_rounding_equals_torchs_casts(form):
    x = numbers(form)
    assert torch.equal(round_to(x, form), x.to(form.dtype).float())


def test_rounding_twice_changes_nothing(form):
    once = round_to(numbers(form), form)
    assert torch.equal(round_to(once, form), once)


@pytest.mark.parametrize("bits", [16, 8])
def test_every_number_of_the_small_formats_is_kept_and_written_as_its_bits(bits):
    integer = {16: torch.int16, 8: torch.uint8}[bits]
    codes = torch.arange(2**bits).to(integer)
    for form in TORCH:
        if form.bits == bits:
            values = codes.view(form.dtype).float()
            finite = values.isfinite()
            assert torch.equal(round_to(values, form)[finite], values[finite])
            for code in range(0, 2**bits, 97 if bits == 16 else 1):
                text = format(code, f"0{bits}b")
                parts = text[0], text[1 : 1 + form.exponent], text[1 + form.exponent :]
                value = values[code].item()
                meant = from_bits(*parts, form)
                assert meant == value or (math.isnan(meant) and math.isnan(value))
                if math.isfinite(value):
                    assert split_bits(value, form) == parts


def test_tf32_has_the_range_of_fp32_and_the_digits_of_fp16():
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert tf32.smallest_normal == fp32.smallest_normal and tf32.epsilon == fp16.epsilon
    assert (tf32.bits, tf32.bytes) == (19, 4)
    assert split_bits(0.1, tf32)[2] == split_bits(0.1, fp16)[2]
    x = numbers(fp16)[:1000]
    x = x[x.abs() > fp16.smallest_normal]
    assert torch.equal(round_to(x, tf32), round_to(x, fp16))


def test_what_is_too_large():
    assert round_to(torch.tensor([7e4, -7e4]), FORMATS["fp16"]).tolist() == [math.inf, -math.inf]
    assert round_to(torch.tensor([500.0]), FORMATS["fp8 e4m3"]).tolist() == [448.0]
    kept = round_to(torch.tensor([math.inf, -math.inf, math.nan]), FORMATS["bf16"])
    assert kept[:2].tolist() == [math.inf, -math.inf] and kept[2].isnan()


def test_stochastic_rounding_is_right_on_average():
    bf16, generator = FORMATS["bf16"], torch.Generator().manual_seed(0)
    x = torch.tensor([1.001, -3.3, 1e-5, 0.0, 1.0]).repeat(20_000, 1)
    rounded = round_to(x, bf16, stochastic=generator)
    assert torch.equal(round_to(rounded, bf16), rounded)
    gap = spacing(x[0], bf16)
    assert ((rounded - x).abs() <= gap).all()
    assert ((rounded.double().mean(0) - x[0].double()).abs() <= 0.02 * gap).all()
    assert (rounded[:, 3] == 0).all() and (rounded[:, 4] == 1).all()


def test_fate():
    x = torch.tensor([0.0, 1e-9, 1e-6, 1.0, 1e5])  # 0 is not counted
    assert fate(x, FORMATS["fp16"]) == {
        "zero": 0.25, "subnormal": 0.25, "kept": 0.25, "overflow": 0.25
    }
    assert fate(x, FORMATS["bf16"])["kept"] == 1.0
    assert fate(torch.zeros(3), FORMATS["fp16"])["zero"] == 0
