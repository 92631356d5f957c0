"""Lab 16: the answers that its checks must accept and reject, against a real server."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from labs.support.deploy_to_triton import contracts, lab_server, measurements, served
from labs.support.deploy_to_triton.triton_model.leader import Leader, Request, alone
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.patience import patience
from tests.serving.processes import until
from utils.course.runner import Trial
from utils.paths import ROOT
from utils.serving.server import ServerError, server_available
from utils.workshop import labs

pytestmark = [
    pytest.mark.timeout(patience(600)),  # of the wrong answers some take all their time
    pytest.mark.skipif(server_available() is not None, reason=str(server_available())),
]

LAB = Lab(
    "16_deploy_to_triton",
    {
        "config": ("contracts", "config", "config.py"),
        "model": ("served", "model", "model.py"),
        "client": ("served", "client", "client.py"),
        "rank": ("contracts", "rank", "rank.py"),
        "batch": ("contracts", "batch", "scheduler.py"),
        "goal": ("served", "goal", "settings.py"),
    },
)


class TestLab(LabTests):
    lab = LAB


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_prompts_leave_no_doubt():
    """What the answers are compared with does not hang on the last digits of a logit."""
    for number in range(3):
        before = len(lab_server.prompt(number))
        tokens = [*lab_server.prompt(number), *lab_server.right(number)]
        with torch.no_grad():
            logits = lab_server.model()(torch.tensor([tokens]))[0, before - 1 : -1]
        first, second = logits.topk(2).values.T
        assert (first - second)[: 16 if number == 2 else 48].min() > 0.003


def test_where_there_is_no_server_the_rest_is_checked(monkeypatch):
    monkeypatch.setattr(served, "server_available", lambda: "it is not installed")
    for exercise in ("batch", "rank"):
        said = getattr(contracts, exercise)(Trial(LAB.solution / LAB.exercises[exercise][2]))
        assert served.NO_SERVER in said
    assert lab_server._here["server"] is None


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    for name in ("config.py", "rank.py", "scheduler.py", "settings.py"):
        (tmp_path / name).write_text(labs.generated(LAB.solution / name, ROOT))
    config, rank, scheduler, settings = (str(path) for path in sorted(tmp_path.glob("*.py")))
    assert measurements.batches(scheduler) is None and measurements.loads(settings) is None
    assert measurements.together(config, rank, scheduler) is None
    assert lab_server._here["server"] is None, "a server was started for nothing"


def test_a_request_that_does_not_fit_harms_nobody_else():
    ended, sent = [], []
    answer = SimpleNamespace(send=sent.append, end=lambda *why: ended.append(why), cancelled=bool)
    model = SimpleNamespace(prefill=lambda slot, tokens: 7, decode=lambda slots, last: [8])
    leader = Leader(model, alone, slots=2, positions=10)
    try:
        leader.submit(Request([1] * 8, 3, answer))  # the third new token is not read any more
        with pytest.raises(ValueError, match=r"8 tokens and 4 new ones .* 10 positions"):
            leader.submit(Request([1] * 8, 4, answer))
        until(lambda: ended)
    finally:
        leader.close()
    assert sent == [7, 8, 8] and ended == [(None,)]


def test_a_load_that_does_not_come_to_an_end_is_ended_and_the_lab_goes_on(
    monkeypatch, tmp_path
):
    """Within its time limit, with one sentence; and nothing of it stays."""
    blank, hangs, head = tmp_path / "blank.py", tmp_path / "hangs.py", "class TritonPythonModel:\n"
    blank.write_text(f"{head}    def execute(self, requests):\n        return []\n")
    hangs.write_text(f"{head}    def initialize(self, args):\n        while True: pass\n")
    config = 'backend: "python"\ninstance_group { kind: KIND_CPU count: 1 }'
    monkeypatch.setattr(lab_server, "LOAD", 3.0)
    before = set(psutil.Process().children(recursive=True))
    try:
        lab_server.server()
        with pytest.raises(ServerError, match=r"^the model is not loaded after 3 s\. .*an end\?$"):
            lab_server.put([], config, model=hangs)
        until(lambda: not set(psutil.Process().children(recursive=True)) - before)
        monkeypatch.undo()
        lab_server.put([], config, model=blank)
        assert lab_server.server().versions(lab_server.NAME) == [1]
    finally:
        lab_server.close()
