"""Lab 12: the answers that its checks must accept and reject, and its support code."""

import sys

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.checks import check

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

LAB = Lab(
    "12_kernels",
    {
        "vector_add": ("contracts", "add", "vector_add.py"),
        "clipped_adamw": ("contracts", "clipped_adamw", "clipped_adamw.py"),
        "softmax": ("contracts", "softmax", "softmax.py"),
        "fused_norm": ("contracts", "fused_norm", "fused_norm.py"),
        "reshape": ("contracts", "reshape", "reshape.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


def test_without_the_triton_language_a_check_says_what_to_do(monkeypatch, tmp_path, capsys):
    from labs.support.kernels import contracts

    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "utils.kernels.language", None)
    check("12a", contracts.add, LAB.solution / "vector_add.py")
    assert capsys.readouterr().out.startswith("[ ] 12a: ")
