"""The engine's matrix product: in 16 bits only where they suffice."""

import pytest
import torch
from torch.nn import functional as F

from utils.serving.engine.linear import Linear, half_is_enough

needs_fbgemm = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this CPU has no FBGEMM"
)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def matrix(*shape):
    """Weights as in a trained model that was stored in bfloat16."""
    return (0.05 * torch.randn(shape)).bfloat16().float()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 768), (7, 16), (33, 5)])
def test_products_are_those_of_fp32(threads, inputs, outputs, bias):
    torch.manual_seed(threads)
    weight, bias = matrix(outputs, inputs), torch.randn(outputs) if bias else None
    product = Linear(weight, bias)
    for shape in ((1, 1), (3, 1), (1, 17), (16, 1), (40,)):
        x = torch.randn(*shape, inputs)
        found, right = product(x), F.linear(x.double(), weight.double(), None)
        right = right if bias is None else right + bias
        assert found.dtype == torch.float32 and found.shape == right.shape
        assert (found - right).abs().max() < 4 * torch.finfo(torch.float32).eps * inputs**0.5
    apart = torch.randn(4, 2 * inputs)[:, :inputs]  # rows that are not adjacent
    assert torch.equal(product(apart), product(apart.clone()))


@needs_fbgemm
def test_a_row_is_independent_of_its_company(threads):
    product, x = Linear(matrix(96, 64), None), torch.randn(16, 64)
    together = product(x)
    for rows in (1, 2, 5, 11):
        assert torch.equal(product(x[3 : 3 + rows]), together[3 : 3 + rows])


def test_sixteen_bits_are_enough_for_what_came_from_them():
    assert half_is_enough(matrix(256, 256)) and half_is_enough(torch.zeros(3, 3))
    assert not half_is_enough(0.05 * torch.randn(256, 256))  # fp32 has 13 more bits
    assert not half_is_enough(2.0**17 * matrix(8, 8).sign())  # above 65504
    assert not half_is_enough(2.0**-20 * matrix(256, 256))  # too small for fp16's exponents


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_matrices_stay_as_they_are(dtype):
    weight, x = (torch.randn(16, 32).to(dtype) for _ in range(2))
    assert (Linear(weight, None)(x) - F.linear(x, weight)).abs().max() < 1e-5
