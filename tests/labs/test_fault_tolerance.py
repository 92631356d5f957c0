"""Lab 13: the answers that its checks must accept and reject, and its support code."""

import os
import random
import socket

import numpy as np
import psutil
import pytest

from labs.support.fault_tolerance.checkpointing import PLANS, Disk, stretch_of
from labs.support.fault_tolerance.worker_group import store_server
from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "13_fault_tolerance",
    {
        "checkpoint": ("checkpointing", "checkpoint", "checkpoint.py"),
        "elastic": ("elastic_training", "elastic", "elastic.py"),
        "interval": ("checkpointing", "interval", "interval.py"),
        "plan": ("checkpointing", "plan", "interval.py"),
    },
)

# With ranks that are killed, late or cut off, a busy machine may fail another case first.
SYMPTOMS = (
    "caught each time?", "did not complete within", "Which rank is furthest ahead",
    "weights and velocity of the rank that is furthest ahead", "the same bits", "two crews",
    "before they close the list", "and train ends with it",
)


class TestLab(LabTests):
    lab, symptoms = LAB, SYMPTOMS


# ── a: killed processes, power cuts ───────────────────────────────────────────────────────────


def test_a_power_cut_leaves_what_was_synced(tmp_path, monkeypatch):
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, getattr(os, name))  # undoes the disk's patches
    (folder := tmp_path / "run").mkdir()
    disk = Disk(folder)
    for name in ("synced", "not"):
        with (folder / name).open("wb") as file:
            file.write(b"right")
            file.flush()
            if name == "synced":
                os.fsync(file.fileno())
    disk.after_a_power_cut(tmp_path / "no names")
    opened = os.open(folder, os.O_RDONLY)
    os.fsync(opened)
    (folder / "synced").rename(folder / "renamed")
    disk.after_a_power_cut(tmp_path / "old names")
    os.fsync(opened)
    disk.after_a_power_cut(tmp_path / "new names")
    left = {
        folder.name: {path.name: path.read_bytes() for path in folder.iterdir()}
        for folder in tmp_path.glob("* names")
    }
    assert left == {
        "no names": {}, "old names": {"synced": b"right", "not": b""},
        "new names": {"renamed": b"right", "not": b""},
    }


# ── b: the reference for the ranks ────────────────────────────────────────────────────────────


def test_the_stores_socket_is_one_whose_clients_nobody_looks_up():
    """For an IPv6 socket, torch looks up ::ffff:127.0.0.1 in the DNS, which delays ranks."""
    store = store_server()
    open_sockets = psutil.Process().net_connections("tcp")
    assert {c.family for c in open_sockets if c.laddr.port == store.port} == {socket.AF_INET}


# ── d: the expected time against simulated failures ───────────────────────────────────────────


def simulated(interval, every, memory, disk, restart, between, light, rounds):
    """Total time per unit of computing time, with each failure simulated."""
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
        ((80, 1), (10, 20, 300, 500, 0.5)),
    ],
)
def test_the_expected_time_is_that_of_simulated_failures(plan, given):
    assert simulated(*plan, *given, 20_000) == pytest.approx(stretch_of(*plan, *given), rel=0.02)


@pytest.mark.parametrize("light, disk, memory, restart, least", PLANS)
def test_the_best_plan_takes_so_long(light, disk, memory, restart, least):
    given = {"light": light, "disk": disk, "memory": memory, "restart": restart, "between": 1.0}
    found = [
        stretch_of(interval, every, **given)
        for every in range(1, 21)
        for interval in np.geomspace(0.05, 0.8, 25)
    ]
    assert min(found) == pytest.approx(least, rel=2e-3)
