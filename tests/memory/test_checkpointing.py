"""Recomputation changes memory and work, but nothing else."""

import copy

import pytest
import torch
from torch import nn

from utils.measure import timing
from utils.memory.checkpointing import is_recomputed, recompute
from utils.models.gpt import GPT, GPTConfig, cross_entropy

MODES = [("full", 1), ("full", 2), ("full", 3), ("selective", 1), ("selective", 2)]


@pytest.fixture
def step():
    torch.manual_seed(0)
    model = GPT(GPTConfig(hidden_size=32, layers=4, heads=4, kv_heads=2))
    tokens = torch.randint(0, 256, (3, 17))
    return model, lambda: cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def gradients(model, loss):
    model.zero_grad()
    loss().backward()
    return [p.grad.clone() for p in model.parameters()]


def forwards(model, loss):
    """The number of times each layer's MLP runs in a forward and a backward pass."""
    calls = [0] * len(model.model.layers)

    def count(index):
        return lambda *_: calls.__setitem__(index, calls[index] + 1)

    hooks = [
        layer.mlp.register_forward_pre_hook(count(index))
        for index, layer in enumerate(model.model.layers)
    ]
    gradients(model, loss)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("mode, every", MODES)
def test_gradients_are_equal_to_the_bit(step, mode, every):
    model, loss = step
    plain = gradients(model, loss)
    assert recompute(model, mode, every) is model
    assert all(a.equal(b) for a, b in zip(gradients(model, loss), plain, strict=True))


@pytest.mark.parametrize("mode, every", MODES)
def test_every_kth_layer_runs_twice(step, mode, every):
    model, loss = step
    recompute(model, mode, every)
    assert forwards(model, loss) == [2 if i % every == 0 else 1 for i in range(4)]
    assert [is_recomputed(layer) for layer in model.model.layers] == [
        i % every == 0 for i in range(4)
    ]


def test_full_keeps_one_input_a_layer_to_the_byte(step):
    model, loss = step
    kept = list(model.parameters())
    saved = {}
    for every in (1, 2, 4):
        recompute(model, "full", every)
        saved[every] = timing.saved_bytes(loss, kept)
    recompute(model, "none")
    none = timing.saved_bytes(loss, kept)
    tables = 2 * 16 * 8 * 4  # cos and sin, inputs of every layer: saved once if recomputed
    layer = (none - saved[1] + tables) / 4  # what a layer saves in addition to its input
    assert layer > 0
    assert none - saved[2] == 2 * layer - tables and none - saved[4] == layer - tables


def test_selective_recomputes_no_matrix_product(step):
    model, loss = step

    def work():
        model.zero_grad()
        loss().backward()

    flops = {}
    for mode in ("none", "full", "selective"):
        recompute(model, mode)
        flops[mode] = timing.flops(work)
    assert flops["selective"] == flops["none"]
    # the backward pass is twice the forward pass; recomputation adds almost a third
    assert 1.2 < flops["full"] / flops["none"] < 1.34


def test_modes_replace_each_other_and_none_leaves_no_trace(step):
    model, loss = step
    names = list(model.state_dict())
    for mode in ("full", "selective", "none"):
        recompute(model, mode)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)
    assert list(model.state_dict()) == names
    assert forwards(model, loss) == [1] * 4


def test_a_copy_recomputes_its_own_layers(step):
    model, _ = step
    recompute(model, "full")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert twin(tokens).abs().sum() > 0
    recompute(twin, "none")
    assert all(is_recomputed(layer) for layer in model.model.layers)


def test_dropout_is_drawn_again_as_it_was():
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(3))
    x = torch.randn(4, 16)

    def loss():
        torch.manual_seed(1)
        y = x
        for layer in layers:
            y = layer(y)
        return y.square().sum()

    plain = gradients(layers, loss)
    recompute(layers, "full", layers=layers)
    assert all(a.equal(b) for a, b in zip(gradients(layers, loss), plain, strict=True))


def test_a_forward_that_was_replaced_before_comes_back():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x + 1
    own = layer.forward
    recompute(layer, "full", layers=[layer])
    assert is_recomputed(layer)
    recompute(layer, "none", layers=[layer])
    assert layer.forward is own


@pytest.mark.parametrize("arguments, word", [(("some",), "some"), (("full", 0), "every 0")])
def test_bad_options_are_named(step, arguments, word):
    with pytest.raises(ValueError, match=word):
        recompute(step[0], *arguments)
