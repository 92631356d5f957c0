"""Lab 16: the answers that its checks must accept and reject, against a real server."""

import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

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
        "config": ("check_config", "config", "config.py"),
        "model": ("check_model", "model", "model.py"),
        "client": ("check_model", "client", "client.py"),
        "rank": ("check_rank", "rank", "rank.py"),
        "batch": ("check_batch", "batch", "scheduler.py"),
        "goal": ("check_goal", "goal", "settings.py"),
    },
    {
        "labs.support.deploy_to_triton.check_model.SECONDS": patience(2),
        "labs.support.deploy_to_triton.check_model.SILENCE": patience(4),
        "labs.support.deploy_to_triton.check_model.CLIENT": patience(20),
    },
)


class TestLab(LabTests):
    lab = LAB
    many = (25, 8, 4)
    each = {  # noqa: RUF012
        "config": many, "model": many, "client": (12, 8, 4), "rank": many, "batch": many,
        "goal": (13, 4, 2),
    }


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_prompts_leave_no_doubt():
    """What the answers are compared with does not hang on the last digits of a logit."""
    from labs.support.deploy_to_triton import lab_server

    for number, count in ((0, 48), (1, 48), (2, 16)):
        tokens = [*lab_server.prompt(number), *lab_server.right(number, count)]
        with torch.no_grad():
            logits = lab_server.model()(torch.tensor([tokens]))[
                0, len(lab_server.prompt(number)) - 1 : -1
            ]
        first, second = logits.topk(2).values.T
        assert (first - second).min() > 0.003


@pytest.mark.parametrize("seed", range(5))
def test_drawn_models_and_tables_have_everything_that_can_be_told(seed):
    from labs.support.deploy_to_triton import check_batch, check_config

    models = check_config._models(Trial("config.py", seed))
    for name, several in {
        "device": {"cpu", "gpu", "model"},
        "streams": {False, True},
        "delay": {None, 0},
        "max_batch": {0, 1},
        "instances": {1, 2},
    }.items():
        assert several <= {getattr(model, name) for model in models}
    tensors = [tensor for model in models for tensor in model.inputs]
    assert {tensor.dtype for tensor in tensors} == set(check_config.DTYPES)
    assert {tensor.optional for tensor in tensors} == {False, True}
    texts = "".join(str(value) for model in models for value in model.parameters.values())
    assert '"' in texts and "\\" in texts and max(len(model.inputs) for model in models) > 40
    tables = [t for several in check_batch._tables(Trial("x.py", seed).draw) for t in several]
    assert min(table.slots for table in tables) == 1 and max(table.slots for table in tables) >= 70
    visits = [visit for table in tables for visit in table.visits]
    assert max(len(table.visits) for table in tables) >= 250
    assert any(visit.gone is not None for visit in visits)
    assert any(visit.prompt[0] < 0 for visit in visits)
    assert any(visit.prompt[1] and visit.tokens > visit.prompt[1] for visit in visits)
    assert any(len(visit.prompt) > 400 for visit in visits)


def test_where_there_is_no_server_the_rest_is_checked(monkeypatch):
    from labs.support.deploy_to_triton import check_batch, check_config, lab_server

    for module, exercise in ((check_batch, "batch"), (check_config, "config")):
        monkeypatch.setattr(module, "server_available", lambda: "it is not installed")
        said = getattr(module, exercise)(Trial(LAB.solution / LAB.exercises[exercise][2]))
        assert "there is no Triton server on this machine" in said
    assert lab_server._here["server"] is None


def test_nothing_is_measured_where_nothing_is_written(tmp_path):
    from labs.support.deploy_to_triton import lab_server, measurements

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


def test_a_load_that_does_not_come_to_an_end_is_ended_and_the_lab_goes_on(monkeypatch):
    """Within its time limit, with one sentence; and nothing of it stays."""
    from labs.support.deploy_to_triton import check_config, lab_server

    hangs = "class TritonPythonModel:\n    def initialize(self, args):\n        while True: pass\n"
    config = 'backend: "python"\ninstance_group { kind: KIND_CPU count: 1 }'
    monkeypatch.setattr(lab_server, "LOAD", 3.0)
    before = set(psutil.Process().children(recursive=True))
    try:
        lab_server.server()
        with pytest.raises(ServerError, match=r"^the model is not loaded after 3 s\. .*an end\?$"):
            lab_server.put([], config, {"model.py": hangs})
        until(lambda: not set(psutil.Process().children(recursive=True)) - before)
        monkeypatch.undo()
        lab_server.put([], config, {"model.py": check_config.BLANK})
        assert lab_server.server().versions(lab_server.NAME) == [1]
    finally:
        lab_server.close()


def test_the_server_and_the_ranks_forkserver_end_with_their_process():
    code = """
import psutil
from labs.support.deploy_to_triton import lab_server
print(lab_server.server().pid)
lab_server.forkserver()
for process in psutil.Process().children(recursive=True):
    print(process.pid)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(set(pids)) >= 4, "each has a supervisor"
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
