"""Lab 10: the answers that its checks must accept and reject, and its pieces."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

SUBMITTED = ("one_node", "cluster", "frontier")
LAB = Lab(
    "10_five_dimensions",
    {
        "by_hand": ("check_strategies", "by_hand", "by_hand.py"),
        **{name: ("check_strategies", name, "submissions.py") for name in SUBMITTED},
        "search": ("check_strategies", "search", "find_best.py"),
    },
)

OTHERS = {
    "one_node: fewer stages, more pieces": """
def one_node():
    return Strategy(dp=4, pp=2, interleave=4, recompute="selective", zero=1)
""",
    "cluster: by position": """
def cluster():
    return Strategy(16, 8, 8, 1, 6, 2, recompute="selective", zero=1, sequence_parallel=True)
""",
    "frontier: all by position": """
def frontier():
    return Strategy(12, 16, 16, 1, 8, 2, None, "selective", 1, True)
""",
}


class TestLab(LabTests):
    lab, others, least = LAB, OTHERS, 35

    def task(self, exercise, tasks):
        return tasks[SUBMITTED.index(exercise) if exercise in SUBMITTED else 0]
