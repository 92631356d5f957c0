"""Lab 09: the answers that its checks must accept and reject."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "09_mixture_of_experts",
    {
        "all_to_all": ("contracts", "all_to_all", "dispatch.py"),
        "dispatch": ("contracts", "dispatching", "dispatch.py"),
        "combine": ("contracts", "combining", "dispatch.py"),
    },
)


class TestLab(LabTests):
    lab = LAB
