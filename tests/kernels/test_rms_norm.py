"""RMSNorm as two kernels equals the model's RMSNorm within rounding, forward and backward."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

from utils.kernels import rms_norm
from utils.models.gpt import RMSNorm

SHAPES = [(1, 1), (5, 100), (2, 3, 1025), (40, 8), (0, 8), (7,)]


def drawn(shape, dtype, device="cpu"):
    """x, weight and the gradient of the output."""
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = (shape, shape[-1:], shape)
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def ours(device, shape, dtype, needs_x=True):
    x, weight, dy = drawn(shape, dtype, device)
    x.requires_grad_(needs_x), weight.requires_grad_()
    y = rms_norm(x, weight, 1e-5)
    y.backward(dy)
    return [None if one is None else one.detach().cpu() for one in (y, x.grad, weight.grad)]


def models(shape, dtype, given):
    """The model's layer in `dtype`, on values drawn in type `given`."""
    x, weight, dy = (one.to(dtype) for one in drawn(shape, given))
    layer = RMSNorm(shape[-1], eps=1e-5, dtype=dtype)
    layer.weight.data.copy_(weight)
    y = layer(x.requires_grad_())
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numbers_are_the_models_within_rounding(on, shape, dtype):
    truth, theirs = models(shape, torch.float64, dtype), models(shape, dtype, dtype)
    spacing = torch.finfo(dtype).eps
    for mine, other, true in zip(on(ours, shape, dtype), theirs, truth):
        assert mine.dtype == dtype and mine.shape == true.shape
        if true.numel():
            size = true.abs().max().item()
            distance, others = ((one - true).abs().max().item() for one in (mine, other))
            assert distance <= 2 * others + 2 * spacing * (1 + size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_same_bits_each_time_on_cuda():
    first, second = (ours("cuda", (3000, 1000), torch.float32) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second))


def strided(device):
    x, weight, dy = drawn((6, 10), torch.float32, device)
    turned = x.t().contiguous().t().requires_grad_()
    y = rms_norm(turned, weight)
    y.backward(dy.t().contiguous().t())
    plain = x.clone().requires_grad_()
    rms_norm(plain, weight).backward(dy)
    return torch.equal(y, rms_norm(x, weight)), torch.equal(turned.grad, plain.grad)


def test_a_strided_input_is_read_where_it_lies(on):
    assert on(strided) == (True, True)


def test_a_weight_alone_has_a_gradient(on):
    _, none, of_the_weight = on(ours, (5, 100), torch.float32, False)
    truth = models((5, 100), torch.float64, torch.float32)
    assert none is None and torch.allclose(of_the_weight.double(), truth[2], atol=1e-5)


def refusal(device, name):
    x, weight, _ = drawn((3, 8), torch.float32, device)
    long = torch.zeros(2**14 + 1, device=device)
    cases = {
        "shape": lambda: rms_norm(x, weight[:7]),
        "types": lambda: rms_norm(x, weight.double()),
        "fp64": lambda: rms_norm(x.double(), weight.double()),
        "long": lambda: rms_norm(long, long),
        "devices": lambda: rms_norm(x, weight.to("meta")),
    }
    try:
        cases[name]()
    except ValueError as raised:
        return str(raised)


REFUSED = {
    "shape": r"\(3, 8\) does not end with the weight's \(7,\)",
    "types": "make both fp32 or both bf16",
    "fp64": "make both fp32 or both bf16",
    "long": "rows of 16385 elements exceed",
    "devices": "the weight is on meta",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_one_sentence(on, name):
    sentence = on(refusal, name)
    with pytest.raises(ValueError, match=REFUSED[name]):
        raise ValueError(sentence)
