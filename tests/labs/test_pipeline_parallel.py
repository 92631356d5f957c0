"""Lab 08: the answers that its checks must accept and reject."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "08_pipeline_parallel",
    {
        "memory": ("contracts", "less_memory", "less_memory.py"),
        "halves": ("contracts", "halves", "halves.py"),
        "bubble": ("contracts", "less_bubble", "less_bubble.py"),
        "executor": ("contracts", "executor", "executor.py"),
    },
)


class TestLab(LabTests):
    lab = LAB
