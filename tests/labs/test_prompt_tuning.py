"""Lab 14: the answers that its checks must accept and reject, and its support code."""

import pytest

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.paths import ROOT
from utils.workshop import labs

LAB = Lab(
    "14_prompt_tuning",
    {
        "forward": ("contracts", "forward", "prompting.py"),
        "tune": ("contracts", "tuning", "prompting.py"),
        "together": ("contracts", "together", "prompting.py"),
        "ranks": ("contracts", "ranks", "prompting.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── support code ──────────────────────────────────────────────────────────────────────────────


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    from labs.support.prompt_tuning.measurements import cost, two_tasks

    path = tmp_path / "prompting.py"
    path.write_text(labs.generated(LAB.solution / "prompting.py", ROOT))
    assert cost(str(path)) is None and two_tasks(str(path)) is None


def test_the_lesson_of_the_last_cells():
    from labs.support.prompt_tuning import tasks
    from labs.support.prompt_tuning.measurements import cost, two_tasks

    file = str(LAB.solution / "prompting.py")
    found = cost(file)
    assert found["state"] == 2 * 4 * found["tuned"] < found["whole state"] / 200
    for part in two_tasks(file).values():
        assert part["in one batch"] == pytest.approx(part["alone"], abs=1.5 / tasks.TO_MEASURE)
        assert part["alone"] > 0.8 and part["other prompt"] < 0.2 and part["without"] < 0.2
