"""Offloading changes where bytes are, but no value."""

import copy

import pytest
import torch
from torch import nn

from utils.measure import timing
from utils.measure.memory import Memory
from utils.memory.checkpointing import recompute
from utils.memory.offload import OffloadedOptimizer, offloaded_activations
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.training.optimizer import Optimizers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device"))]


def small_gpt(device="cpu"):
    torch.manual_seed(0)
    model = GPT(GPTConfig(hidden_size=32, layers=3, heads=4, kv_heads=2)).to(device)
    tokens = torch.randint(0, 256, (3, 17)).to(device)
    return model, lambda model=model: cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def gradients(model, loss):
    result = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return result


# ---- activations


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_gradients_are_equal_to_the_bit(mode, device):
    model, loss = small_gpt(device)
    loss().backward()
    plain = gradients(model, loss)
    recompute(model, mode)
    with offloaded_activations(min_bytes=0) as moved:
        result = loss()
    result.backward()
    assert moved.tensors > 3
    assert all(a.equal(b) for a, b in zip(gradients(model, loss), plain, strict=True))


def test_each_storage_goes_out_once_and_leaves_memory():
    model, loss = small_gpt()
    saved = timing.saved_bytes(loss, list(model.parameters()))
    with Memory(model) as memory:
        with offloaded_activations(min_bytes=0) as moved:
            result = loss()
        assert moved.bytes == saved
        # the test holds the tokens; of the model's activations only the loss is left
        assert memory.now()["activations"] == result.nbytes + 3 * 17 * 8
        result.backward()
        del result
    assert memory.peak["activations"] < saved / 2


def test_small_tensors_and_parameters_stay():
    linear = nn.Linear(100, 100)
    x = torch.ones(2, 100)  # 800 bytes
    with offloaded_activations(min_bytes=801) as moved:
        linear(linear(x)).sum().backward()
    assert (moved.tensors, moved.bytes) == (0, 0)
    with offloaded_activations(min_bytes=800) as moved:
        linear(linear(x)).sum().backward()
    assert (moved.tensors, moved.bytes) == (2, 1600)


def test_with_recomputation_only_the_layers_inputs_go_out():
    model, loss = small_gpt()
    rows = 3 * 16 * 32 * 4
    recompute(model)
    inside = timing.saved_bytes(loss, list(model.parameters()))
    with offloaded_activations(min_bytes=0) as moved:
        loss()
    assert moved.bytes == inside and 3 * rows < moved.bytes < 14 * rows


def test_views_of_any_layout_come_back():
    x = torch.randn(6, 8, requires_grad=True)

    def function():
        y = x * 2
        return (y[1::2].t().expand(2, 8, 3) * y[:3].t() * y.double().float()[0, 0]).exp().sum()

    (plain,) = torch.autograd.grad(function(), x)
    with offloaded_activations(min_bytes=0):
        result = function()
    assert torch.autograd.grad(result, x)[0].equal(plain)


def test_a_change_in_place_after_saving_does_no_harm_or_is_named():
    x = torch.randn(50, requires_grad=True)

    def function(change):
        y = x * 1
        z = y.square()  # saves y
        if change:
            with torch.no_grad():
                y.zero_()
        return z.sum()

    (plain,) = torch.autograd.grad(function(False), x)
    with offloaded_activations(min_bytes=0):  # copied out before the change
        result = function(True)
    assert torch.autograd.grad(result, x)[0].equal(plain)
    with offloaded_activations():  # 200 bytes stay
        result = function(True)
    with pytest.raises(RuntimeError, match=r"shape \(50,\) was changed in place"):
        torch.autograd.grad(result, x)


def test_two_graphs_and_a_second_backward_pass():
    x = torch.randn(2000, requires_grad=True)
    with offloaded_activations(min_bytes=0):
        first, second = (x * 1).exp().sum(), (x * 1).sin().sum()
    for _ in range(2):
        assert torch.autograd.grad(first, x, retain_graph=True)[0].equal(x.exp())
        assert torch.autograd.grad(second, x, retain_graph=True)[0].equal(x.cos())


# ---- the optimizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("together", [1, 20_000, 2**25])
def test_the_same_steps_as_on_the_device(together, device):
    model, loss = small_gpt(device)
    other = copy.deepcopy(model)
    # not fused, so that host and device run the same operations in the same order
    options = {"lr": 0.01, "weight_decay": 0.1, "foreach": False}
    plain = torch.optim.AdamW(model.parameters(), **options)
    offloaded = OffloadedOptimizer(
        lambda masters: torch.optim.AdamW(masters, **options),
        other.parameters(),
        together=together,
    )
    for _ in range(3):
        for net, optimizer in ((model, plain), (other, offloaded)):
            loss(net).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(
        torch.allclose(a, b, rtol=1e-5, atol=1e-7) if device == "cuda" else a.equal(b)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert all(master.dtype == torch.float32 for master in offloaded.masters)


def test_memory_holds_nothing_of_it_but_the_step_counters():
    model, loss = small_gpt()
    optimizer = OffloadedOptimizer(torch.optim.AdamW, model.parameters(), together=1)
    with Memory(model, optimizer) as memory:
        for _ in range(2):
            with memory.phase("backward"):
                loss().backward()
            with memory.phase("optimizer"):
                optimizer.step()
            optimizer.zero_grad()
        assert memory.now()["optimizer"] == 4 * len(optimizer.masters)
    largest = max(master.nbytes for master in optimizer.masters)
    # even in the first step, which makes the state: one parameter at a time
    beside = [h["optimizer"] + h["temporary"] for p, h in memory.timeline if p == "optimizer"]
    assert max(beside) <= 6 * largest + 4 * len(optimizer.masters)


def test_bf16_parameters_have_fp32_masters():
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer(lambda masters: torch.optim.SGD(masters, lr=1e-3), [weight])
    for _ in range(8):  # one step is too small for bf16, eight are not
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert optimizer.masters[0].item() == pytest.approx(1 - 8e-3)
    assert weight.item() == torch.tensor(1 - 8e-3).bfloat16().item() < 1


def test_several_optimizers_and_parameters_without_a_gradient():
    model, loss = small_gpt()
    other = copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]

    def make(masters):
        matrices = [m for m in masters if m.ndim == 2]
        rest = [m for m in masters if m.ndim != 2]
        parts = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(rest, lr=0.01)]
        return Optimizers("muon", parts, dict(zip(masters, names, strict=True)))

    plain, offloaded = make(list(model.parameters())), OffloadedOptimizer(make, other.parameters())
    for _ in range(2):
        for net, optimizer in ((model, plain), (other, offloaded)):
            loss(net).backward()
            net.lm_head.weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert other.lm_head.weight.equal(small_gpt()[0].lm_head.weight)
    assert set(offloaded.inner.named_state()) == set(plain.named_state())


def test_refresh_takes_loaded_parameters():
    model, loss = small_gpt()
    optimizer = OffloadedOptimizer(lambda m: torch.optim.SGD(m, lr=0.0), model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    optimizer.refresh()
    loss().backward()
    optimizer.step()
    assert all(bool((parameter == 0.5).all()) for parameter in model.parameters())


def test_nothing_to_optimize_is_said():
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        OffloadedOptimizer(torch.optim.SGD, [torch.ones(3)])
