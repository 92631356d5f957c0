"""Lab 16: the answers that its checks must accept and reject."""

from types import SimpleNamespace

import pytest
import torch

from labs.support.inference_engine import measurements, streams
from labs.support.inference_engine.leader import Leader, Request, alone
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.patience import patience
from tests.serving.processes import until
from utils.paths import ROOT
from utils.workshop import labs

pytestmark = pytest.mark.timeout(patience(300))  # some wrong answers take all their time

LAB = Lab(
    "16_inference_engine",
    {
        "rank": ("contracts", "rank", "rank.py"),
        "batch": ("contracts", "batch", "scheduler.py"),
        "blocks": ("check_blocks", "blocks", "blocks.py"),
        "draft": ("check_drafts", "draft", "speculative.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── support code ──────────────────────────────────────────────────────────────────────────────


def test_the_prompts_leave_no_doubt():
    """The expected tokens do not depend on the last digits of a logit."""
    for number in range(3):
        before = len(streams.prompt(number))
        tokens = [*streams.prompt(number), *streams.right(number)]
        with torch.no_grad():
            logits = streams.model()(torch.tensor([tokens]))[0, before - 1 : -1]
        first, second = logits.topk(2).values.T
        assert (first - second)[: 16 if number == 2 else 48].min() > 0.003


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    for _, _, name in LAB.exercises.values():
        (tmp_path / name).write_text(labs.generated(LAB.solution / name, ROOT))
    rank, scheduler = (str(tmp_path / name) for name in ("rank.py", "scheduler.py"))
    assert measurements.batches(scheduler) is None
    assert measurements.together(rank, scheduler) is None
    assert measurements.paged(str(tmp_path / "blocks.py")) is None
    assert measurements.speculated(str(tmp_path / "speculative.py")) is None


def test_a_request_that_does_not_fit_harms_nobody_else():
    ended, sent = [], []
    answer = SimpleNamespace(send=sent.append, end=lambda *why: ended.append(why), cancelled=bool)
    model = SimpleNamespace(prefill=lambda slot, tokens: 7, decode=lambda slots, last: [8])
    leader = Leader(model, alone, slots=2, positions=10)
    try:
        leader.submit(Request([1] * 8, 3, answer))  # the model does not read the third new token
        with pytest.raises(ValueError, match=r"8 tokens and 4 new ones .* 10 positions"):
            leader.submit(Request([1] * 8, 4, answer))
        until(lambda: ended)
    finally:
        leader.close()
    assert sent == [7, 8, 8] and ended == [(None,)]
