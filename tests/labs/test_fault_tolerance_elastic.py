"""Lab 13, exercise b: the answers that its check must accept and reject, and its pieces."""

import socket
from functools import partial

import psutil
import pytest
import torch

from labs.support.fault_tolerance import elastic_run
from labs.support.fault_tolerance.crew import Settings, alone, store_server
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from tests.patience import patience

LAB = Lab(
    "13_fault_tolerance",
    {"elastic": ("check_elastic", "elastic", "elastic.py")},
    {"utils.course.runner.HANG": 10.0},  # two answers are judged at once
)


# Ranks that are killed, late or cut off: on a busy machine another case is the first that is wrong.
SYMPTOMS = (
    "an endless loop?",
    "did not complete within",
    "Whose state is the furthest",
    "weights and the velocity of the furthest",
    "Is g the gradient of the mean",
    "the same bits",
    "two crews",
    "makes a further step",
    "shares the rows",
    "to share",
    "is computed",
    "until they close the list",
    "failures.",
    "and train ends with it",
    "is made once, and the next one comes after it",
    "tell crew.after of step",
    "groups were made, and each has failed",
)


class TestLab(LabTests):
    lab, symptoms = LAB, SYMPTOMS


def test_a_disturbed_run_has_the_curve_of_an_undisturbed_one(monkeypatch):
    patient = partial(Settings, limit=patience(1), patience=patience(2))
    monkeypatch.setattr(elastic_run, "Settings", patient)
    file, steps = LAB.solution / "elastic.py", 8
    calm = elastic_run.run(file, size=3, steps=steps)
    wild = elastic_run.run(file, size=3, steps=steps, killed={0: 2, 1: 5})
    assert calm.ended == ["made all steps"] * 3 and calm.still == []
    assert wild.ended == ["killed in step 2", "killed in step 5", "made all steps"]
    assert len(wild.still) == 2 and all(seconds > 1.5 for seconds in wild.still)
    for run in (calm, wild):
        assert run.losses == pytest.approx(elastic_run.one_rank(steps), rel=1e-12)


def test_what_is_not_written_is_said(tmp_path, capsys):
    file = tmp_path / "elastic.py"
    file.write_text('def train(crew, model, steps):\n    raise NotImplementedError("meet")\n')
    assert elastic_run.run(file, size=2, steps=2) is None
    assert capsys.readouterr().out == "Come back when the check says [ok]. meet\n"


def test_one_rank_learns_as_torchs_optimizer_does():
    settings = Settings(size=1, steps=6, batch=5, seed=3)
    model = settings.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    weights, losses = alone(settings)
    for step in range(settings.steps):
        optimizer.zero_grad()
        loss = settings.losses(model, step, range(5)).mean()
        loss.backward()
        optimizer.step()
        assert losses[step] == pytest.approx(loss.item(), rel=1e-12)
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert torch.allclose(found, weights[step], rtol=0, atol=1e-14)
    assert losses[-1] < losses[0]


def test_rows_are_the_same_whoever_asks():
    settings = Settings(size=3, steps=2, batch=7, seed=5)
    model = settings.network()
    whole = settings.losses(model, 1, range(7))
    assert torch.allclose(
        torch.cat([settings.losses(model, 1, r) for r in ([2, 0], [], [6])]), whole[[2, 0, 6]]
    )
    assert not torch.allclose(settings.losses(model, 0, range(7)), whole)


def test_the_stores_socket_is_one_whose_clients_nobody_looks_up():
    """torch asks the DNS who comes to an IPv6 socket from ::ffff:127.0.0.1, and ranks are late."""
    store = store_server()
    open_sockets = psutil.Process().net_connections("tcp")
    assert {c.family for c in open_sockets if c.laddr.port == store.port} == {socket.AF_INET}
