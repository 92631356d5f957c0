"""Lab 02: the answers that its checks must accept and reject, and its support code."""

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.paths import ROOT
from utils.workshop import labs

LAB = Lab(
    "02_gradient_accumulation",
    {
        "accumulate": ("contracts", "accumulation", "accumulate.py"),
        "ddp": ("contracts", "ddp", "ddp_step.py"),
        "noise": ("contracts", "norms", "noise.py"),
        "estimate": ("contracts", "estimate", "noise.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── support code ──────────────────────────────────────────────────────────────────────────────


def test_micro_batches_are_as_long_as_asked():
    from labs.support.gradient_accumulation import tiny_model

    (x, y), (_, padding) = tiny_model.micro_batches(0, [[3, 7], [0]])
    assert x.shape == y.shape == (2, tiny_model.LENGTH)
    assert [int((row != tiny_model.IGNORE).sum()) for row in y] == [3, 7]
    assert tiny_model.counted(y) == 10 and tiny_model.counted(padding) == 0
    again = tiny_model.micro_batches(0, [[3, 7], [0]])
    assert again[0][0].equal(x) and again[0][1].equal(y)


def test_the_measurement_says_when_there_is_nothing_to_measure(tmp_path, capsys):
    from labs.support.gradient_accumulation import measurement

    for given in LAB.solution.glob("*.py"):
        (tmp_path / given.name).write_text(labs.generated(given, ROOT))
    assert measurement.measure(tmp_path / "noise.py", steps=3, size=1) is None
    assert "does not run" in capsys.readouterr().out
