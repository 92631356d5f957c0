"""A rank waits for another for --time-limit seconds and then names it."""

import os
import re
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tests.patience import patience
from tests.training.test_train import command, small_flags, wait_for

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("stopped, shared", [(0, 1), (1, 1), (0, 0)])
def test_a_rank_that_stands_still_is_named(tmp_path, stopped, shared):
    """Its neighbour exits with a status that lets torchrun restart both.

    shared   whether torchrun hosts the ranks' store; otherwise rank 0 does
    """
    metrics, errors = tmp_path / "metrics.jsonl", tmp_path / "errors"
    limit = patience(4)
    flags = small_flags(steps=1_000_000, metrics=metrics, time_limit=limit)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(1 - shared)
    with errors.open("w") as file:
        process = subprocess.Popen(command(*flags, ranks=2), env=environment, stderr=file)
    ranks = []
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text(), process)
        ranks = psutil.Process(process.pid).children()
        still = next(r for r in ranks if r.environ()["RANK"] == str(stopped))
        still.suspend()
        wait_for(lambda: "Sending process" in errors.read_text(), process)  # torchrun has noticed
        still.kill()  # torchrun itself would wait another 30 s for it
        process.wait(timeout=patience(60))
    finally:
        for each in (process, *ranks):
            if psutil.pid_exists(each.pid):
                os.kill(each.pid, signal.SIGKILL)
    who = rf"rank {stopped} gives no sign of life, last in .+ \(utils/.+:\d+\)"
    if not shared and not stopped:
        who = "the store of the ranks does not answer: check rank 0 and its machine"
    assert re.search(rf"utils\.train.*: waited {limit} s in vain: {who}\n", errors.read_text())
    assert process.returncode == 1 and "failed (exitcode: 2)" in errors.read_text()
    assert "RuntimeError" not in errors.read_text()


def test_ranks_that_do_not_meet_say_so():
    """Rank 0 is alone; rank 1 connects to a program that is no rank."""
    with socket.create_server(("127.0.0.1", 0)) as foreign, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports = free.getsockname()[1], foreign.getsockname()[1]
        free.close()
        started = []
        for rank, port in enumerate(ports):
            here = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            line = [sys.executable, "-m", "utils.train", *map(str, small_flags(time_limit=1))]
            environment = {**os.environ, **{name: str(value) for name, value in here.items()}}
            started.append(subprocess.Popen(line, env=environment, stderr=subprocess.PIPE))
        said = [process.communicate(timeout=patience(60))[1].decode() for process in started]
    assert [process.returncode for process in started] == [2, 2]
    for text, port in zip(said, ports):
        assert f"the 2 ranks have not met at 127.0.0.1:{port} within 1 s (" in text
        assert "Traceback" not in text
