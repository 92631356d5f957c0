"""Lab 06: the answers that its checks must accept and reject, and its pieces."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

EXERCISES = dict.fromkeys(("pair", "mlp", "attention"), "check_layers") | {
    "loss": "check_loss",
    "sequence": "check_sequence",
}
LAB = Lab(
    "06_tensor_parallel",
    {name: (module, name, "megatron.py") for name, module in EXERCISES.items()},
    {"utils.course.runner.HANG": 12.0},  # next to none hangs; a busy machine must not look so
)


class TestLab(LabTests):
    lab = LAB


def test_the_lesson_of_the_last_cells():
    from labs.support.tensor_parallel.measurements import CONFIG, measured

    runs = {size: measured(size, LAB.solution / "megatron.py") for size in (1, 2, 3)}
    for run in runs.values():
        assert run["losses"] == pytest.approx(runs[1]["losses"], abs=1e-4)
        assert run["others"] == 0 and run["calls"] == 4 * CONFIG.layers
    assert runs[3]["matrices"] * 3 == runs[1]["matrices"]  # 6 heads, 3 key-value heads, 132 columns
