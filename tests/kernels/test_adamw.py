"""AdamW as one kernel is torch's AdamW: equal within rounding, in place, in one launch."""

import copy
import math
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

from tests.patience import patience
from utils.kernels import AdamWTriton
from utils.kernels.adamw import adamw_many, adamw_one, numbers
from utils.paths import ROOT

SIZES = [1, 2, 1023, 1024, 1025, 0, 20003]  # a block has 1024 elements
FUSED = {"fused": True}
NONE = {}


def weights_of(sizes, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    return [torch.nn.Parameter(weight.to(device)) for weight in drawn]


def groups_of(weights):
    """Two parameter groups with their own settings."""
    return [
        {"params": weights[::2], "lr": 0.02, "weight_decay": 0.3},
        {"params": weights[1::2], "betas": (0.8, 0.95), "eps": 1e-5},
    ]


def train(weights, optimizer, steps, late=(), first=0):
    """Take steps with random gradients; the weights `late` have none before the third step."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for number, weight in enumerate(weights):
            gradient = torch.randn(weight.shape, generator=generator)
            gradient = gradient.bfloat16() if weight.dtype == torch.bfloat16 else gradient
            weight.grad = gradient.to(weight.device, weight.dtype)
            if number in late and step < 2:
                weight.grad = None
        optimizer.step()


def host(tensors):
    return [tensor.detach().cpu() for tensor in tensors]


def state_of(optimizer):
    """The state of all parameters in order: [{name: value}]."""
    return [
        {name: value.cpu() for name, value in optimizer.state[weight].items()}
        for group in optimizer.param_groups
        for weight in group["params"]
    ]


def trained(device, make, dtype, steps=4, sizes=SIZES, **options):
    weights = weights_of(sizes, dtype, device)
    optimizer = make(groups_of(weights), **options)
    train(weights, optimizer, steps, late=(1, 4))
    return host(weights), state_of(optimizer)


def error(values, truth):
    """The largest difference; 0 if all are empty."""
    pairs = [(value.double() - true.double()).abs() for value, true in zip(values, truth)]
    return max((apart.max().item() for apart in pairs if apart.numel()), default=0.0)


def test_the_numbers_are_torchs_within_rounding(on):
    ours, our_state = on(trained, AdamWTriton, torch.float32)
    truth, true_state = trained("cpu", torch.optim.AdamW, torch.float64)
    torchs, their_state = trained("cpu", torch.optim.AdamW, torch.float32, **FUSED)
    assert error(ours, truth) < 1.5 * error(torchs, truth) < 1e-5
    for mine, theirs, true in zip(our_state, their_state, true_state):
        assert mine.keys() == theirs.keys() and mine["step"] == theirs["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert error([mine[name]], [true[name]]) <= 1e-6 + 1.5 * error(
                [theirs[name]], [true[name]]
            )


def one_tensor(device, n):
    p, g = weights_of([n, n], torch.float32, device)
    m, v = torch.zeros(n, device=device), torch.zeros(n, device=device)
    for step in (1, 2):
        given = numbers(step, 0.01, (0.9, 0.99), 1e-8, 0.1)
        adamw_one[(math.ceil(n / 64),)](p.data, g.data, m, v, n, *given, BLOCK=64)
    return host([p])


def test_one_bare_tensor_in_small_blocks(on):
    for n in (1, 63, 64, 65, 1000):
        (ours,) = on(one_tensor, n)
        start, gradient = weights_of([n, n], torch.float32)
        weight = torch.nn.Parameter(start.detach().double())
        optimizer = torch.optim.AdamW([weight], 0.01, (0.9, 0.99), weight_decay=0.1)
        for _ in range(2):
            weight.grad = gradient.detach().double()
            optimizer.step()
        assert error([ours], [weight]) < 1e-6


# ---- 16 bits


def test_bf16_weights_are_their_rounded_fp32_master(on):
    ours, state = on(trained, AdamWTriton, torch.bfloat16)
    masters = [torch.nn.Parameter(w.detach().double()) for w in weights_of(SIZES, torch.bfloat16)]
    optimizer = torch.optim.AdamW(groups_of(masters))
    for step in range(4):
        generator = torch.Generator().manual_seed(100 + step)
        for number, master in enumerate(masters):
            gradient = torch.randn(master.shape, generator=generator).bfloat16().double()
            master.grad = None if number in (1, 4) and step < 2 else gradient
        optimizer.step()
    in_order = [weight for half in (ours[::2], ours[1::2]) for weight in half]
    true = [master for half in (masters[::2], masters[1::2]) for master in half]
    for weight, kept, truth in zip(in_order, state, true):
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, kept["master_param"].bfloat16())  # to nearest, ties to even
        assert {value.dtype for value in kept.values()} == {torch.float32}
        assert error([kept["master_param"]], [truth]) < 1e-5


def rounded(device, masters):
    """bf16 weights after a step that does not change these masters."""
    weight = torch.nn.Parameter(torch.zeros(masters.shape, dtype=torch.bfloat16, device=device))
    optimizer = AdamWTriton([weight], lr=0.0)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.state[weight]["master_param"].copy_(masters)
    optimizer.step()
    return weight.detach().cpu()


def test_every_kind_of_number_is_rounded_as_torch_rounds(on):
    bits = torch.randint(-(2**31), 2**31 - 1, (5000,), generator=torch.Generator().manual_seed(3))
    special = [0x7F800000, -0x00800000, 0x7F800001, 0x7FFFFFFF, 0x7F7FFFFF, 0x3F808000, 0x3F818000]
    special += [0, -(2**31), 0x3F808001, 1, 0x00008000]
    masters = torch.cat([bits, torch.tensor(special)]).int().view(torch.float32)
    ours, torchs = on(rounded, masters), masters.bfloat16()
    assert torch.equal(ours.isnan(), torchs.isnan())
    number = ~torchs.isnan()
    assert torch.equal(ours.view(torch.int16)[number], torchs.view(torch.int16)[number])


def stochastic(device, seed, steps=1, value=1.0, lr=2**-10, size=10000):
    """Equal bf16 weights after steps of size lr, in two tensors."""
    weights = [
        torch.nn.Parameter(torch.full((size,), value, device=device).bfloat16()) for _ in "ab"
    ]
    optimizer = AdamWTriton(weights, lr, weight_decay=0.0, stochastic_rounding=True, seed=seed)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.full_like(weight, -1.0)  # AdamW's first steps have size lr
        optimizer.step()
    return host(weights)


def test_stochastic_rounding_keeps_small_steps_on_average(on):
    first, second = on(stochastic, 0)
    below, above = 1.0, 1.0 + 2**-7  # neighbours in bf16; a step is an eighth of the distance
    for weights in (first, second):
        assert set(weights.tolist()) == {below, above}
        share = (weights == above).double().mean().item()
        assert abs(share - 1 / 8) < 5 * math.sqrt(1 / 8 * 7 / 8 / len(weights))
    assert not torch.equal(first, second)  # every tensor has its own random bits
    assert torch.equal(first, on(stochastic, 0)[0])
    assert not torch.equal(first, on(stochastic, 1)[0])


def test_stochastic_rounding_draws_anew_at_each_step(on):
    first, *_ = on(stochastic, 0, 8, 1.0, 2**-10, 3000)
    assert abs(first.double().mean().item() - (1 + 8 * 2**-10)) < 4e-4  # 5 standard deviations


# ---- NaN and infinity


def sick(device, make, **options):
    weights = weights_of([40, 16], torch.float32, device)
    optimizer = make(weights, lr=0.1, **options)
    for step in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        if step == 0:
            values = [math.nan, math.inf, -math.inf, 1e30, -0.0, 1e-40]
            weights[0].grad[: len(values)] = torch.tensor(values)
            weights[1].data[0] = math.inf
        optimizer.step()
    return host(weights), [kept["exp_avg_sq"] for kept in state_of(optimizer)]


def test_nan_and_infinity_spread_as_in_torch(on):
    for ours, torchs in zip(on(sick, AdamWTriton), sick("cpu", torch.optim.AdamW, **FUSED)):
        for mine, theirs in zip(ours, torchs):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
    assert ours[0].isnan().any() and ours[0].isinf().any()


# ---- many tensors, one launch


def launches(device, sizes, offset=0):
    """The number of launches for one step on tensors in one buffer, and the buffer afterwards."""
    buffer = torch.zeros(offset + sum(sizes), device=device)
    pieces = buffer[offset:].split(sizes)
    weights = [torch.nn.Parameter(piece) for piece in pieces]
    optimizer, seen = AdamWTriton(weights, lr=1.0, weight_decay=0.0), []
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    hooks = adamw_many.pre_run_hooks
    adamw_many.add_pre_run_hook(lambda *_, **__: seen.append(1))
    try:
        optimizer.step()
    finally:
        hooks.pop()
    return len(seen), buffer.cpu()


def test_many_tensors_are_one_launch(on):
    assert on(launches, [16, 32, 1024, 4096] * 14)[0] == 1
    count, buffer = on(launches, [16, 1024, 3, 16])  # two aligned tensors and two that are not
    assert count == 2 and torch.allclose(buffer, torch.tensor(-1.0))


def test_nothing_beside_a_tensor_is_written(on):
    count, buffer = on(launches, [7, 1030], 3)
    assert count == 1 and not buffer[:3].any() and torch.allclose(buffer[3:], torch.tensor(-1.0))


def no_gradient(device):
    weights = weights_of([5, 5], torch.float32, device)
    before, optimizer = host(copy.deepcopy(weights)), AdamWTriton(weights)
    optimizer.step()
    weights[0].grad = torch.ones_like(weights[0])
    loss = optimizer.step(lambda: torch.tensor(3.0))
    return before, host(weights), len(optimizer.state), loss.item()


def test_parameters_without_a_gradient_are_left_alone(on):
    before, after, states, loss = on(no_gradient)
    assert torch.equal(before[1], after[1]) and not torch.equal(before[0], after[0])
    assert states == 1 and loss == 3.0


def more_groups(device):
    """Add a group whose rate is a tensor and one that is refused; returns the effects."""
    first, second, third = weights_of([5, 5, 5], torch.float32, device)
    optimizer = AdamWTriton([first], lr=0.5, weight_decay=0.0)
    optimizer.add_param_group({"params": [second], "lr": torch.tensor(0.25)})
    try:
        optimizer.add_param_group({"params": [third.detach().half()]})
    except ValueError as refused:
        assert "float16" in str(refused)
    before = host(copy.deepcopy([first, second]))
    for weight in (first, second):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    way = [one - other for one, other in zip(before, host([first, second]))]
    return len(optimizer.param_groups), way


def test_a_group_that_is_refused_leaves_nothing_behind(on):
    groups, way = on(more_groups)
    assert groups == 2
    for moved, lr in zip(way, (0.5, 0.25)):
        torch.testing.assert_close(moved, torch.full((5,), lr))


def stale(device):
    (weight,) = weights_of([5], torch.float32, device)
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    AdamWTriton([weight]).step()
    try:
        loss.backward()
    except RuntimeError as raised:
        return str(raised)


def test_autograd_learns_that_the_weights_have_changed(on):
    assert "modified by an inplace operation" in on(stale)


# ---- checkpoints


def handed_over(device, first, then, dtype, options=NONE):
    """Three steps of one optimizer, then three of another with its state."""
    weights = weights_of([100, 7, 1024], dtype, device)
    make = {"ours": AdamWTriton, "torch": torch.optim.AdamW}
    optimizer = make[first](groups_of(weights), **(options if first == "ours" else {}))
    train(weights, optimizer, 3)
    if then:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = make[then](groups_of(weights), **(options if then == "ours" else {}))
        optimizer.load_state_dict(saved)
    train(weights, optimizer, 3, first=3)
    return host(weights), state_of(optimizer)


@pytest.mark.parametrize("first, then", [("ours", "torch"), ("torch", "ours")])
def test_a_state_goes_over_to_torch_and_back(on, first, then):
    weights, state = on(handed_over, first, then, torch.float32)
    alone, kept = handed_over("cpu", "torch", None, torch.float32)
    assert error(weights, alone) < 1e-6
    assert [one["step"] for one in state] == [one["step"] for one in kept] == [6.0] * 3


@pytest.mark.parametrize("options", [{}, {"stochastic_rounding": True, "seed": 5}], ids=str)
def test_a_bf16_run_goes_on_to_the_bit(on, options):
    (weights, state), (whole, kept) = (
        on(handed_over, "ours", then, torch.bfloat16, options) for then in ("ours", None)
    )
    assert all(torch.equal(mine, other) for mine, other in zip(weights, whole))
    for mine, other in zip(state, kept):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def from_bf16(device):
    _, state = handed_over(device, "torch", "ours", torch.bfloat16)
    return [{name: value.dtype for name, value in one.items()} for one in state]


def test_a_bf16_state_of_torch_becomes_fp32(on):
    names = ("step", "exp_avg", "exp_avg_sq", "master_param")
    assert on(from_bf16) == [dict.fromkeys(names, torch.float32)] * 3


# ---- what it refuses


def refusal(device, name):
    """The error message of one unsupported use."""
    weight, other = weights_of([6, 6], torch.float32, device)
    square, strided = torch.zeros(3, 4, device=device), torch.zeros(4, 3, device=device).t()

    def step(weight, gradient):
        weight.grad = gradient
        AdamWTriton([weight]).step()

    def load():
        state = torch.optim.AdamW([weight], amsgrad=True).state_dict()
        AdamWTriton([weight]).load_state_dict(state)

    cases = {
        "amsgrad": lambda: AdamWTriton([weight], amsgrad=True),
        "maximize": lambda: AdamWTriton([weight], maximize=True),
        "foreach": lambda: AdamWTriton([{"params": [weight], "foreach": True}]),
        "a state with amsgrad": load,
        "lr": lambda: AdamWTriton([weight], lr=-1.0),
        "betas": lambda: AdamWTriton([weight], betas=(0.9, 1.0)),
        "fp16": lambda: AdamWTriton([weight.detach().half()]),
        "complex": lambda: AdamWTriton([weight.detach().cfloat()]),
        "strided": lambda: AdamWTriton([square.t()]),
        "strided gradient": lambda: step(torch.nn.Parameter(square), strided),
        "sparse gradient": lambda: step(torch.nn.Parameter(square), square.to_sparse()),
        "two devices": lambda: AdamWTriton([weight, other.detach().to("meta")]),
    }
    try:
        cases[name]()
    except ValueError as raised:
        return str(raised)


REFUSED = {
    "amsgrad": "leaves amsgrad out: take torch.optim.AdamW",
    "maximize": "leaves maximize out",
    "foreach": "leaves foreach out",
    "a state with amsgrad": "leaves amsgrad out",
    "lr": "lr -1.0 must be 0 or more",
    "betas": "must be from 0 to below 1",
    "fp16": "is torch.float16: the kernel supports fp32 and bf16",
    "complex": "is torch.complex64",
    "strided": r"shape \(4, 3\) is not contiguous",
    "strided gradient": "is not contiguous",
    "sparse gradient": "is torch.sparse_coo",
    "two devices": "a launch uses one device",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_one_sentence(on, name):
    sentence = on(refusal, name)
    assert sentence and "\n" not in sentence
    with pytest.raises(ValueError, match=REFUSED[name]):
        raise ValueError(sentence)


def test_a_cpu_without_the_interpreter_is_refused():
    with pytest.raises(
        ValueError, match=r"need a GPU.*use torch\.optim\.AdamW, or set TRITON_INT"
    ):
        AdamWTriton(weights_of([4], torch.float32))


IMPORTS = """
import os, sys
sys.modules["triton"] = None
try:
    import utils.kernels
except ImportError as error:
    print(error)
del sys.modules["triton"]
import triton
os.environ["TRITON_INTERPRET"] = "1"
try:
    import utils.kernels
except ImportError as error:
    print(error)
"""


def test_a_missing_package_and_a_switch_that_comes_too_late_are_named():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=ROOT, capture_output=True, text=True, timeout=patience(200),
    )
    missing, late = done.stdout.splitlines()
    assert "on Linux `make setup TRITON=yes` installs it" in missing
    assert "changed after Triton was imported" in late
