"""Lab 07: the answers that its checks must accept and reject, and its pieces."""

import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "07_context_parallel",
    {
        name: ("contracts", name, "context.py")
        for name in ("merge", "ring", "backward", "zigzag", "ulysses")
    },
    {"utils.course.runner.HANG": 12.0},  # next to none hangs; a busy machine must not look so
)


class TestLab(LabTests):
    lab = LAB


def test_the_reference_is_torch_s():
    from labs.support.context_parallel.contracts import Case

    case = Case(3, 7, batch=2, heads=6, kv_heads=2, width=4, dtype=torch.float32, seed=3)
    right, made = case.right(), case.whole()
    q, k, v = (made[name].double().transpose(1, 2).requires_grad_() for name in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(out, (q, k, v), made["dout"].double().transpose(1, 2))
    torch.testing.assert_close(right["out"], out.transpose(1, 2))
    for name, gradient in zip(("dq", "dk", "dv"), gradients):
        torch.testing.assert_close(right[name], gradient.transpose(1, 2))


def test_what_is_sent_in_the_open_task(tmp_path):
    from labs.support.context_parallel.measurements import LENGTH, WIDTH, drawn_heads, measured

    right = LAB.source("ring")
    thrifty = LAB.answer("ring", "nothing travels that nobody sees").source.removeprefix(right)
    (tmp_path / "context.py").write_text(right + thrifty.replace("def ", "def thrifty_"))
    heads, size = drawn_heads(4), 4
    assert heads == drawn_heads(4)
    found = measured(size, tmp_path / "context.py", heads)
    assert len(found) == 4 and all(way["right"] for way in found.values())
    ring = (size - 1) * 2 * heads.key_value * LENGTH * WIDTH * torch.float32.itemsize
    assert found["ring_attention"]["sent"] == 2 * found["thrifty_ring_attention"]["sent"] == ring
