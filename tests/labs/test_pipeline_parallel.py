"""Lab 08: the answers that its checks must accept and reject, and its pieces."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "08_pipeline_parallel",
    {
        "memory": ("check_schedules", "less_memory", "less_memory.py"),
        "halves": ("check_halves", "halves", "halves.py"),
        "bubble": ("check_schedules", "less_bubble", "less_bubble.py"),
        "executor": ("check_executor", "executor", "executor.py"),
    },
)


class TestLab(LabTests):
    lab = LAB
