"""Lab 13: the answers that its checks must accept and reject, and its pieces."""

import os
import random
import socket

import psutil
import pytest
import torch

from labs.support.fault_tolerance.checkpointing import best_stretch, stretch_of
from labs.support.fault_tolerance.killed_runs import Disk, KillAt, apart
from labs.support.fault_tolerance.worker_group import Settings, alone, store_server
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.assertions import Wrong

LAB = Lab(
    "13_fault_tolerance",
    {
        "checkpoint": ("checkpointing", "checkpoint", "checkpoint.py"),
        "elastic": ("elastic_training", "elastic", "elastic.py"),
        "interval": ("checkpointing", "interval", "interval.py"),
        "plan": ("checkpointing", "plan", "interval.py"),
    },
    limits={"labs.support.fault_tolerance.checkpointing.PLAN_SECONDS": 6.0},
)

# Ranks that are killed, late or cut off: on a busy machine another case is the first that is wrong.
SYMPTOMS = (
    "an endless loop?", "did not complete within", "Whose state is the furthest",
    "weights and the velocity of the furthest", "the same bits", "two crews",
    "until they close the list", "failures.", "and train ends with it",
)


class TestLab(LabTests):
    lab, symptoms = LAB, SYMPTOMS


# ── a: killed processes, power cuts ───────────────────────────────────────────────────────────


def dies(path, kill):
    kill.arm()
    path.write_bytes(bytes(100))
    return path.rename(path.with_name("renamed")) is None


def test_a_process_dies_at_a_byte_and_before_a_call(tmp_path):
    file = tmp_path / "file"
    assert apart(dies, file, KillAt(byte=37)) is None
    assert file.stat().st_size == 37
    assert apart(dies, file, KillAt(call=2)) is None
    assert file.stat().st_size == 100
    assert apart(dies, file, KillAt(call=3)) is False
    with pytest.raises(Wrong, match=r"ZeroDivisionError: division by zero"):
        apart(lambda: 1 / 0)


def written_with_and_without_sync(place):
    """In a fork."""
    (folder := place / "run").mkdir()
    disk = Disk(folder)
    for name in ("synced", "not"):
        with (folder / name).open("wb") as file:
            file.write(b"right")
            file.flush()
            if name == "synced":
                os.fsync(file.fileno())
    disk.after_a_power_cut(place / "no names")
    opened = os.open(folder, os.O_RDONLY)
    os.fsync(opened)
    (folder / "synced").rename(folder / "renamed")
    disk.after_a_power_cut(place / "old names")
    os.fsync(opened)
    disk.after_a_power_cut(place / "new names")


def test_a_power_cut_leaves_what_was_synced(tmp_path):
    apart(written_with_and_without_sync, tmp_path)
    left = {
        folder.name: {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in tmp_path.glob("* names")
    }
    assert left == {
        "no names": {}, "old names": {"synced": b"right", "not": bytes(5)},
        "new names": {"renamed": b"right", "not": bytes(5)},
    }


# ── b: what the ranks are compared with ───────────────────────────────────────────────────────


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


def test_the_stores_socket_is_one_whose_clients_nobody_looks_up():
    """torch asks the DNS who comes to an IPv6 socket from ::ffff:127.0.0.1, and ranks are late."""
    store = store_server()
    open_sockets = psutil.Process().net_connections("tcp")
    assert {c.family for c in open_sockets if c.laddr.port == store.port} == {socket.AF_INET}


# ── d: the expected time against failures that are simulated one by one ───────────────────────


def simulated(interval, every, memory, disk, restart, between, light, rounds):
    """Time over computing, failure by failure."""
    draw, total = random.Random(7), 0.0
    for _ in range(rounds):
        done = 0
        while done < every:
            length = interval + (disk if done == every - 1 else memory)
            uptime = draw.expovariate(1 / between)
            if uptime >= length:
                total, done = total + length, done + 1
                continue
            total += uptime
            done = done if draw.random() < light else 0
            while (uptime := draw.expovariate(1 / between)) < restart:
                total += uptime
                done = done if draw.random() < light else 0
            total += restart
    return total / (rounds * every * interval)


@pytest.mark.parametrize(
    "plan, given",
    [
        ((100, 3), (5, 60, 120, 3600, 0.7)),
        ((60, 12), (2, 300, 60, 900, 0.9)),
        ((150, 2), (10, 20, 0, 500, 0.2)),
        ((80, 1), (10, 20, 300, 500, 0.5)),
    ],
)
def test_the_expected_time_is_that_of_simulated_failures(plan, given):
    assert simulated(*plan, *given, 20_000) == pytest.approx(stretch_of(*plan, *given), rel=0.02)


def test_the_best_plan_beats_others():
    given = {"memory": 5, "disk": 60, "restart": 120, "between": 3600, "light": 0.7}
    least = best_stretch(**given)
    others = [
        stretch_of(interval, every, **given)
        for interval in (20, 60, 200, 600)
        for every in (1, 2, 5, 20)
    ]
    assert least <= min(others) < 1.02 * least < max(others)
