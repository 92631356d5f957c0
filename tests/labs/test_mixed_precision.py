"""Lab 03: the answers that its checks must accept and reject, and its support code."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "03_mixed_precision",
    {
        "loss_scaler": ("contracts", "scaler", "loss_scaler.py"),
        "master_weights": ("contracts", "master_weights", "master_weights.py"),
        "stochastic": ("contracts", "stochastic", "stochastic.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


def test_the_figures_of_the_lab_come_from_the_answer():
    from labs.support.mixed_precision.measurements import fp16_run, walk

    scales, skipped = fp16_run(LAB.solution / "loss_scaler.py", steps=12)
    assert len(scales) == len(skipped) == 12 and skipped[0] and not all(skipped)
    for step in range(11):
        assert scales[step + 1] == scales[step] * (0.5 if skipped[step] else 1) or (
            not skipped[step] and scales[step + 1] == 2 * scales[step]
        )
    means = walk(LAB.solution / "stochastic.py", steps=100)
    assert means[0] == 1.0 and abs(means[-1] - 1.1) < 0.02
