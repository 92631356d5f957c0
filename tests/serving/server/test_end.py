"""The end of a server, planned or not: requests in flight end, and no process is left."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.serving.processes import (
    PATIENCE,
    ROOT,
    callers,
    family,
    in_thread,
    is_there,
    started,
    until,
    wait_gone,
)
from tests.serving.triton_models import write_models
from utils.serving.client import Client, ServeError
from utils.serving.gateway.stubs import stop_at_rest
from utils.serving.server import TritonServer, server_available

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(server_available() is not None, reason=str(server_available())),
    pytest.mark.thorough,
]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("repo"), "echo", "slow", "gpt")


# --- the end --------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_cut_and_the_status_says_so(repo):
    server = TritonServer(repo, ["slow"], exit_seconds=1, quiet=True)
    processes = family(server.pid)
    answer = in_thread(lambda: Client(server, model="slow").generate("60"))
    until(lambda: len(callers(server)) == 1)
    assert server.close() != 0
    with pytest.raises(ServeError):
        answer()
    wait_gone(processes)


def test_a_killed_stub_is_an_error_for_its_clients_and_nothing_is_left(repo):
    (repo / "slow" / "began").unlink(missing_ok=True)
    with TritonServer(repo, ["echo", "slow"], exit_seconds=2, quiet=True) as server:
        processes = family(server.pid)
        stub = next(p for p in processes if "stub" in p.name() and "slow" in " ".join(p.cmdline()))
        answer = in_thread(lambda: Client(server, model="slow").generate("60"))
        until((repo / "slow" / "began").exists)
        stop_at_rest(stub.pid)
        stub.kill()
        with pytest.raises(ServeError):
            answer()
        assert Client(server, model="echo").generate("a") == "a"
    wait_gone(processes)


@pytest.mark.parametrize("victim", ["server", "supervisor"])
def test_a_killed_server_leaves_no_stub(repo, victim):
    server = TritonServer(repo, ["echo"], quiet=True)
    processes = family(server.pid)
    names = [process.name() for process in processes]
    assert any("stub" in name for name in names), names
    regions = [*Path("/dev/shm").glob(f"{server.log.parent.name}-*")]
    assert regions
    os.kill(server.pid if victim == "server" else processes[0].pid, signal.SIGKILL)
    wait_gone(processes)
    until(lambda: not server.alive())
    assert server.close() in (128 + signal.SIGKILL, -signal.SIGKILL)
    assert not any(region.exists() for region in regions)


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_what_a_model_has_started_and_forgotten_is_ended_too(tmp_path, how):
    server = TritonServer(write_models(tmp_path, "litter"), quiet=True)
    processes = family(server.pid)
    assert "sleep" in [process.name() for process in processes]
    if how == "killed":
        os.kill(server.pid, signal.SIGKILL)
    else:
        server.close()
    wait_gone(processes)


PARENT = """
import sys, time
from utils.serving.server import TritonServer
print("begins", flush=True)
server = TritonServer(sys.argv[1], quiet=True)
print(server.pid, server.http, server.log.parent, flush=True)
time.sleep(600)
"""


def test_a_killed_parent_leaves_nothing_and_its_clients_get_their_answers(repo):
    with started(sys.executable, "-c", PARENT, repo) as parent:
        assert parent.stdout.readline() == "begins\n"
        pid, http, folder = parent.stdout.readline().split()
        processes = family(int(pid))
        assert len(processes) >= 3 and Path(folder).is_dir()
        stream = Client(http=http).stream("a " * 60)  # 3 s
        assert next(stream) == "a "
        parent.kill()
        assert len(list(stream)) == 59
        wait_gone(processes)
        assert not Path(folder).exists()


def test_a_ctrl_c_while_it_starts_leaves_nothing(tmp_path):
    repo = write_models(tmp_path, "sleeper")
    with started(sys.executable, "-c", PARENT, repo) as parent:
        parent.stdout.readline()
        processes = until(lambda: stub_and_all(parent.pid))
        parent.send_signal(signal.SIGINT)
        wait_gone(processes)
        assert parent.wait(PATIENCE) != 0


def stub_and_all(pid):
    """All descendants of a process, once a stub is among them."""
    found = psutil.Process(pid).children(recursive=True)
    return found if any("stub" in process.name() for process in found) else None


# --- the command ----------------------------------------------------------------------------------


COMMAND = [sys.executable, "-m", "utils.serving.server", "--http", 0, "--grpc", 0, "--metrics", 0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(repo, number):
    with started(*COMMAND, "--repo", repo) as program:
        lines = [program.stdout.readline()]
        while lines[-1] and "Ctrl-C stops the server" not in lines[-1]:
            lines.append(program.stdout.readline())
        curl = next(shlex.split(line) for line in lines if "/v2/models/gpt/generate " in line)
        assert ask(curl) == '"text_output":"def "'
        processes = psutil.Process(program.pid).children(recursive=True)
        os.killpg(program.pid, number)
        rest = program.stdout.read()
        assert (program.wait(PATIENCE), rest.strip()) == (0, "stopped")
        wait_gone(processes)


def test_the_command_starts_a_killed_gateway_again(repo):
    with started(*COMMAND, "--repo", repo) as program:
        line = ""
        while "/v2/models/gpt/generate " not in line:
            line = program.stdout.readline()
            assert line
        curl = shlex.split(line)
        (gateway,) = gateways(program.pid)
        gateway.kill()
        until(lambda: [p for p in gateways(program.pid) if p.pid != gateway.pid])
        until(lambda: answers(curl))
        assert ask(curl) == '"text_output":"def "'
        os.killpg(program.pid, signal.SIGTERM)
        assert program.wait(PATIENCE) == 0


def test_the_command_ends_with_a_killed_server_and_says_so(repo):
    with started(*COMMAND, "--repo", repo) as program:
        while "Ctrl-C stops the server" not in program.stdout.readline():
            assert program.poll() is None
        below = psutil.Process(program.pid).children(recursive=True)
        next(process for process in below if process.name() == "tritonserver").kill()
        said = program.stdout.read()
        assert program.wait(PATIENCE) == 1
        assert "tritonserver exited by itself" in said
        assert "starting it again" not in said
        wait_gone(below)


def gateways(pid):
    found = []
    for process in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if is_there(process) and "utils.serving.gateway" in process.cmdline():
                found.append(process)
    return found


def answers(curl):
    try:
        return ask(curl)
    except OSError:
        return None


def ask(curl):
    """Send the request of the printed curl line with Python's own client."""
    from urllib.request import Request, urlopen

    assert curl[0] == "curl" and curl[3] == "-d"
    with urlopen(Request(curl[2], curl[4].encode()), timeout=PATIENCE) as answer:
        return re.search(r'"text_output":"[^"]*"', answer.read().decode())[0]


def test_the_command_says_why_it_does_not_serve(tmp_path):
    repo = write_models(tmp_path, "hopeless")
    done = subprocess.run(
        [*map(str, COMMAND), "--repo", str(repo)], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("hopeless version 1: ValueError: rank-1-of-2.safetensors is cut")
