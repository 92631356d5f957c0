"""Replicas under torchft: one is killed, the others continue, and a new one takes its place."""

import os
import signal
import time

import psutil
import pytest

from tests.patience import patience
from utils.data import corpus
from utils.ranks import RankError, Ranks
from utils.ranks.pool import Dead
from utils.training import torchft_replica
from utils.training.torchft_replica import Run, alone, lighthouse, train

pytestmark = pytest.mark.skipif(
    not torchft_replica.AVAILABLE, reason="torchft has wheels only for Linux on x86-64"
)
LIGHTHOUSE = "torchft_lighthouse"


def lighthouses():
    """The lighthouses that this process has started and that still run."""
    below = psutil.Process().children(recursive=True)
    return [child for child in below if any(LIGHTHOUSE in word for word in child.cmdline())]


def committed(attempts):
    return [attempt for attempt in attempts if attempt.committed]


@pytest.mark.thorough
@pytest.mark.parametrize("follow", [False, True])
def test_a_killed_replica_is_replaced(tmp_path, follow):
    late = {"patience": patience(3), "limit": patience(60)}
    with lighthouse(patience(2)) as address, Ranks(4, may_die=True, device="cpu") as ranks:
        run = Run(address, str(tmp_path), follow=follow, dies=4, joins=8, steps=12, **late)
        first, second, killed, new = ranks.run(train, run)
    assert not lighthouses()
    assert killed == Dead(-signal.SIGKILL)
    for attempts, weights in (first, second):
        assert [(a.step, a.replicas) for a in committed(attempts)] == [
            (step, 2 if 4 <= step < 8 else 3) for step in range(12)
        ]
        tried = [a.step for a in attempts if not a.committed]
        assert tried and set(tried) == {4}
        assert weights == new[1]
    assert [(a.step, a.replicas) for a in new[0]] == [(step, 3) for step in range(8, 12)]

    apart = [abs(a.loss - b) for a, b in zip(committed(first[0]), alone(run), strict=True)]
    assert max(apart[:5]) < 1e-5  # loss 5 is the first after a step without the lost rows
    assert max(apart) < 1e-5 if follow else max(apart) > 1e-4
    # The library logs to the folder, not to the screen. One of the two survivors may already have
    # received everything it needed from the killed replica.
    words = [(tmp_path / f"replica{rank}.log").read_text() for rank in (0, 1)]
    assert any("got exception" in own for own in words), words


def test_rows_that_follow_the_quorum_are_all_there():
    """Two or three replicas split the whole batch evenly."""
    run = Run("", "")
    for size in (2, 3):
        shares = [corpus.share_of_batch(run.batch, place, size) for place in range(size)]
        assert len({last - first for first, last in shares}) == 1
        assert [row for share in shares for row in range(*share)] == list(range(run.batch))


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"dies": 14}, "dies 14, joins 14, steps 20 are not in order"),
        ({"joins": 20}, "joins 20, steps 20 are not in order"),
        ({"batch": 9}, "a batch of 9 rows cannot be split evenly among 3 replicas"),
        ({"size": 1}, "at least 2 replicas"),
    ],
)
def test_a_run_that_makes_no_sense_is_named(wrong, words):
    with pytest.raises(ValueError, match=words):
        Run("", "", **wrong)


def test_another_number_of_ranks_is_named():
    with Ranks(2, device="cpu") as ranks, pytest.raises(RankError, match="are not 2 ranks: use R"):
        ranks.run(train, Run("", ""))


def test_a_lighthouse_that_cannot_start_is_named(monkeypatch, tmp_path):
    program = tmp_path / LIGHTHOUSE
    program.write_text("#!/bin/sh\necho 'no room at the shore' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(torchft_replica, "PROGRAM", program)
    with pytest.raises(RuntimeError, match="no room at the shore"), lighthouse():
        raise AssertionError("it has an address")
    monkeypatch.setattr(torchft_replica, "PROGRAM", tmp_path / "absent")
    with pytest.raises(RuntimeError, match="absent is missing"), lighthouse():
        raise AssertionError("it has an address")
    monkeypatch.setattr(torchft_replica, "PROGRAM", program)
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(TimeoutError, match=r"does not listen after 0\.5 s"), lighthouse(limit=0.5):
        raise AssertionError("it has an address")
    assert not lighthouses()


def test_the_lighthouse_ends_with_a_failure():
    with pytest.raises(KeyError), lighthouse():
        assert lighthouses()
        raise KeyError
    assert not lighthouses()


@pytest.mark.thorough
def test_a_lighthouse_goes_when_its_parent_is_killed():
    """Its supervisor's input closes with the parent."""
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            with lighthouse():
                os.write(write, b"up")
                signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 2) == b"up"
    family = psutil.Process(parent).children(recursive=True)
    assert any(LIGHTHOUSE in word for child in family for word in child.cmdline())
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    os.close(read)
    until = time.monotonic() + patience(60)
    while any(child.is_running() and child.status() != "zombie" for child in family):
        assert time.monotonic() < until
        time.sleep(0.05)
