"""Copies of the weights for the passes of a step: autocast's gradients with one cast each."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from utils.memory import autocast, recompute, weights_in
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, cross_entropy
from utils.parallel.zero_bubble import WeightGradientsLater

SIZES = {"hidden_size": 24, "layers": 2, "heads": 4, "kv_heads": 2, "vocab_size": 37}


class Casts(TorchDispatchMode):
    """Records the shapes of tensors that are cast to bf16."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        to = (kwargs or {}).get("dtype")
        if function is torch.ops.aten._to_copy.default and to == torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def model_of(tied=False, mode="none"):
    torch.manual_seed(0)
    return recompute(GPT(GPTConfig(**SIZES, tie_embeddings=tied)), mode)


def micro_batches():
    tokens = torch.randint(SIZES["vocab_size"], (3, 2, 12), generator=torch.manual_seed(1))
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def gradients(model, inside):
    """{name: gradient} of all micro-batches, whose forward passes run in `inside`."""
    for x, y in micro_batches():
        with inside():
            logits = model(x)
        (cross_entropy(logits, y) / 3).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_autocast_to_rounding_and_add_up_in_fp32(tied):
    exact, rounded, copied = model_of(tied), model_of(tied), model_of(tied)
    expected = gradients(exact, lambda: autocast("fp32", "cpu"))
    by_autocast = gradients(rounded, lambda: autocast("bf16", "cpu"))
    with weights_in(torch.bfloat16, [copied]):
        assert copied(micro_batches()[0][0]).dtype == torch.bfloat16
        found = gradients(copied, lambda: autocast("fp32", "cpu"))
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        apart, usual = (
            (other[name] - expected[name]).norm() / expected[name].norm()
            for other in (found, by_autocast)
        )
        assert apart < 0.02 and (gradient - by_autocast[name]).norm() < 0.02 * gradient.norm()
        assert apart < 4 * usual or apart < 4e-3, name


def test_every_matrix_is_cast_once_whatever_is_recomputed():
    model = model_of(tied=True, mode="full")
    with Casts() as casts, weights_in(torch.bfloat16, [model]):
        gradients(model, lambda: autocast("fp32", "cpu"))
    matrices = sorted(tuple(p.shape) for p in model.parameters() if p.ndim == 2)
    assert sorted(shape for shape in casts.shapes if shape in matrices) == matrices
    assert all(module.__dict__.get("weight") is None for module in model.modules())


def test_the_parameters_are_back_after_an_error():
    model = model_of()
    with pytest.raises(ValueError), weights_in(torch.bfloat16, [model]):
        raise ValueError
    assert model.lm_head.weight is dict(model.named_parameters())["lm_head.weight"]


def test_gradients_that_wait_reach_the_parameters():
    layer = torch.nn.Linear(3, 4)
    x = torch.randn(2, 3, dtype=torch.bfloat16, requires_grad=True)
    with weights_in(torch.bfloat16, [layer]):
        layer(x).sum().backward()
        expected, x.grad = [p.grad for p in layer.parameters()], None
        layer.zero_grad()
        with WeightGradientsLater() as later:
            layer(x).sum().backward()
        assert layer._parameters["weight"].grad is None and x.grad is not None
        later.add()
    for parameter, gradient in zip(layer.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient)
