"""Lab 07: the answers that its checks must accept and reject, and its support code."""

import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "07_context_parallel",
    {
        name: ("contracts", name, "context.py")
        for name in ("merge", "ring", "backward", "zigzag", "ulysses")
    },
)


class TestLab(LabTests):
    lab = LAB


def test_what_is_sent_in_the_open_task(tmp_path):
    from labs.support.context_parallel.measurements import LENGTH, WIDTH, drawn_heads, measured

    right = LAB.source("ring")
    thrifty = LAB.answer("ring", "only what is seen travels").source.removeprefix(right)
    (tmp_path / "context.py").write_text(right + thrifty.replace("def ", "def thrifty_"))
    heads, size = drawn_heads(4), 4
    assert heads == drawn_heads(4)
    found = measured(size, tmp_path / "context.py", heads)
    assert len(found) == 4 and all(way["right"] for way in found.values())
    ring = (size - 1) * 2 * heads.key_value * LENGTH * WIDTH * torch.float32.itemsize
    assert found["ring_attention"]["sent"] == 2 * found["thrifty_ring_attention"]["sent"] == ring
