"""Lab 07: the answers that its checks must accept and reject, and its pieces."""

import itertools

import pytest
import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

EXERCISES = {
    "merge": "check_merge", "ring": "check_ring", "backward": "check_ring",
    "zigzag": "check_ring", "ulysses": "check_ulysses",
}
LAB = Lab(
    "07_context_parallel",
    {name: (module, name, "context.py") for name, module in EXERCISES.items()},
    {"utils.course.runner.HANG": 12.0},  # next to none hangs; a busy machine must not look so
)


class TestLab(LabTests):
    lab = LAB


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_reference_is_torch_s():
    from labs.support.context_parallel import scenarios

    case = {
        "length": 7, "batch": 2, "heads": 6, "kv_heads": 2, "width": 4, "dtype": torch.float32,
        "seed": 3, "scale": 1.0, "zigzag": False, "sliced": False,
    }
    right, made = scenarios.right(case), scenarios.whole(case)
    q, k, v = (made[name].double().transpose(1, 2).requires_grad_() for name in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(out, (q, k, v), made["dout"].double().transpose(1, 2))
    torch.testing.assert_close(right["out"], out.transpose(1, 2))
    for name, gradient in zip(("dq", "dk", "dv"), gradients):
        torch.testing.assert_close(right[name], gradient.transpose(1, 2))


@pytest.mark.parametrize("zigzag", [False, True])
def test_cases_are_as_uneven_as_they_say(zigzag):
    from labs.support.context_parallel import judging, scenarios
    from utils.course.runner import Trial

    for size, seed in itertools.product((1, 2, 3, 4, 5, 6), range(6)):
        parts = size * (1 + zigzag)
        uneven, even = judging.cases(Trial("context.py", seed), size, zigzag, least=size)
        assert (uneven["length"] % parts > 0) is (parts > 1) and even["length"] % parts == 0
        assert {uneven["dtype"], even["dtype"]} == {torch.float32, torch.float64}
        for case in (uneven, even):
            places = scenarios.places_of(case, size)
            held = sorted(itertools.chain.from_iterable(places))
            assert held == list(range(case["length"]))
            assert all(places) and case["heads"] % case["kv_heads"] == 0 and case["heads"] >= size


def test_what_is_sent_is_what_the_formulas_say(tmp_path):
    from labs.support.context_parallel.measurements import LENGTH, WIDTH, drawn_heads, measured

    right = LAB.source("ring")
    thrifty = LAB.answer("ring", "nothing travels that nobody sees").source.removeprefix(right)
    (tmp_path / "context.py").write_text(right + thrifty.replace("def ", "def thrifty_"))
    heads, size = drawn_heads(4), 4
    assert heads == drawn_heads(4) and heads.query % size == 0
    found = measured(size, tmp_path / "context.py", heads)
    assert len(found) == 4 and all(way["right"] for way in found.values())
    number = LENGTH * WIDTH * torch.float32.itemsize  # bytes of one head
    ring = (size - 1) * 2 * heads.key_value * number
    both = 2 * (heads.query + max(heads.key_value, size))
    assert found["ring_attention"]["sent"] == found["zigzag_attention"]["sent"] == ring
    assert found["thrifty_ring_attention"]["sent"] == ring / 2
    assert found["ulysses_attention"]["sent"] == (size - 1) * both * number / size
    assert found["ring_attention"]["work"] == [0.1, 0.2, 0.3, 0.4]
    assert found["zigzag_attention"]["work"] == found["ulysses_attention"]["work"] == [0.25] * size


def test_nothing_is_measured_before_it_is_written(tmp_path):
    from labs.support.context_parallel.measurements import drawn_heads, measured
    from utils.paths import ROOT
    from utils.workshop.labs import generated

    copy = generated(LAB.solution / "context.py", ROOT)
    (tmp_path / "context.py").write_text(copy)
    assert measured(2, tmp_path / "context.py", drawn_heads(0)) == {}
