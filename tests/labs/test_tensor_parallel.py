"""Lab 06: the answers that its checks must accept and reject."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "06_tensor_parallel",
    {
        name: ("contracts", name, "megatron.py")
        for name in ("pair", "mlp", "attention", "loss", "sequence")
    },
)


class TestLab(LabTests):
    lab = LAB
