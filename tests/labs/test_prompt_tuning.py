"""Lab 14: the answers that its checks must accept and reject, and its pieces."""


import pytest
import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.assertions import close
from utils.course.runner import Trial
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
    {"utils.course.runner.HANG": 20.0},  # none hangs; a busy machine must not look so
)


class TestLab(LabTests):
    lab = LAB


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_reference_is_the_library():
    """What the checks hold for right is what utils/prompts/tuning.py computes."""
    from labs.support.prompt_tuning import reference
    from utils.prompts import prompted
    from utils.prompts.data import padded

    trial = Trial("prompting.py", 1)
    for dtype in reference.TYPES[:2]:
        case = reference.draw_case(trial, dtype)
        model, prompt, (tokens, targets) = case.model(), case.prompt(), case.rows()
        ended = padded([(question, [*answer, case.end]) for question, answer in case.pairs()])
        assert targets.equal(ended[1]) and tokens[targets >= 0].equal(ended[0][targets >= 0])
        right = reference.Spelled(model, prompt).logits(tokens)
        with prompted(model, prompt), torch.no_grad():
            logits = model(tokens)[:, len(prompt) :]
        close("here", "logits", logits, right, slack=reference.near(dtype))


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
