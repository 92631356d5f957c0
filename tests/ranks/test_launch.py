"""launch(): real torchrun runs, their metrics and failures; nothing is left behind."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.patience import patience
from utils.ranks.launch import LaunchError, launch

SCRIPT = """
import os, sys, time

rank = int(os.environ["RANK"])
print("ready", rank, os.environ["OMP_NUM_THREADS"])
if "fail" in sys.argv and rank == 1:
    raise ValueError("rank one is unhappy")
if "kill" in sys.argv and rank == 1:
    os.kill(os.getpid(), 9)
if "sleep" in sys.argv:
    time.sleep(300)

import datetime, json
import torch, torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
for step in range(3):
    x = torch.ones(1) * rank
    dist.all_reduce(x)
    if rank == 0:
        print(json.dumps({"step": step, "sum": x.item()}))
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    yield str(path)
    deadline = time.monotonic() + patience(30)
    while (left := running(path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


def running(path):
    """Command lines of the processes that run this script, torchrun and its supervisor included."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(path) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(shlex.join(words))
    return found


@pytest.mark.thorough
def test_metrics_come_back_as_a_table_and_the_printed_command_runs_in_a_shell(script, capsys):
    table = launch(script, ranks=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"$ OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 {script}"
    assert lines[1:] == ["ready 0 1"]
    assert table.to_dict("list") == {"step": [0, 1, 2], "sum": [1.0, 1.0, 1.0]}

    command = lines[0].removeprefix("$ ")
    path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
    options = {"capture_output": True, "text": True, "timeout": 200}
    result = subprocess.run(command, shell=True, env={**os.environ, "PATH": path}, **options)
    assert result.returncode == 0 and '{"step": 2, "sum": 1.0}' in result.stdout


def test_the_failing_ranks_traceback_comes_first(script, capsys):
    with pytest.raises(LaunchError) as error:
        launch(script, ranks=2, args=["fail", "sleep"])  # or else rank 0 would fail too
    lines = str(error.value).splitlines()
    assert lines[0] == "rank 1 failed first:"
    assert lines[1] == "Traceback (most recent call last):"
    assert "ValueError: rank one is unhappy" in lines
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.thorough
def test_a_killed_rank_is_named(script):
    with pytest.raises(LaunchError, match="Rank 1 was killed by signal 9"):
        launch(script, ranks=2, args=["kill", "sleep"])


def test_a_time_limit_ends_the_run(script):
    start = time.monotonic()
    with pytest.raises(LaunchError, match="did not end within 3 s"):
        launch(script, ranks=2, args=["sleep"], timeout=3)
    assert time.monotonic() - start < 100  # the script sleeps for 300


@pytest.mark.thorough
def test_an_interrupt_ends_the_run(script):
    def interrupt_when_it_runs():
        while len(running(script)) < 4:  # supervisor, torchrun, two ranks
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt_when_it_runs, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        launch(script, ranks=2, args=["sleep"])


@pytest.mark.thorough
def test_a_killed_notebook_takes_the_run_with_it(script):
    source = f"from utils.ranks.launch import launch\nlaunch({script!r}, args=['sleep'])"
    kernel = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert kernel.stdout.readline().startswith("$ ")
    assert kernel.stdout.readline() == "ready 0 1\n"
    assert len(running(script)) >= 4  # supervisor, torchrun, two ranks
    kernel.kill()
    kernel.wait()
    deadline = time.monotonic() + patience(60)
    while running(script) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert running(script) == []


@pytest.mark.parametrize("target", ["no/such/script.py", "not a module", "-m"])
def test_a_wrong_target_is_named(target):
    with pytest.raises(ValueError, match=target):
        launch(target)


@pytest.mark.thorough
def test_a_missing_module_is_named():
    with pytest.raises(LaunchError, match=r"utils\.no_such_module"):
        launch("utils.no_such_module", ranks=1)


@pytest.mark.parametrize("ranks", [0, True, "2"])
def test_a_wrong_number_of_ranks_is_named(ranks):
    with pytest.raises(ValueError, match=f"ranks={ranks!r}"):
        launch("utils.train", ranks=ranks)
