"""SIGTERM under load: accepted requests are answered, then no process of the server is left."""

import os
import shutil
import signal
import socket
import threading

import pytest

from tests.serving.probe import (
    MODELS,
    Asked,
    astream,
    frozen,
    generate,
    gone,
    processes,
    served_now,
    stream,
    tokens,
)
from tests.serving.processes import PATIENCE, until
from tests.serving.world import configure, ranks, repo_of, serving
from utils.serving.client import Client, ServeError

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]

DOORS = [generate, stream, astream, tokens]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = repo_of("tiny", 1, tmp_path_factory.mktemp("sigterm") / "repo")
    return configure(repo, max_num_seqs=4, queue=16, step_seconds=60) or repo


def ask(client, number):
    """Request `number`: through the doors in turn, each with its own answer."""
    door = DOORS[number % len(DOORS)]
    subject = [40 + number] if door is tokens else f"def {number}"
    return Asked(door, client, subject, max_tokens=6)


def refuses(address):
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return True
    return False


def check_ended(server, everyone):
    """The server has exited with status 0, and all of its processes have ended."""
    until(lambda: not server.alive())
    assert server.returncode == 0, server.tail(30)
    until(lambda: gone(everyone))


def test_sigterm_with_requests_in_the_batch_and_in_the_queue(repo):
    """The ranks are stopped when the signal comes: no request can have ended before it."""
    with serving(repo, models=MODELS, exit_seconds=60) as server:
        client, everyone = Client(server, timeout=PATIENCE), processes(server)
        right = [ask(client, number).outcome() for number in range(12)]
        assert len(set(right)) > 4
        with frozen(*ranks(server)):
            asked = [ask(client, number) for number in range(12)]
            until(lambda: served_now(server) == 12)
            os.kill(server.pid, signal.SIGTERM)
            until(lambda: "Signal (15) received" in server.tail(200))
        assert [request.outcome() for request in asked] == right
        check_ended(server, everyone)


def test_sigterm_with_requests_that_were_just_accepted(repo, tmp_path):
    """They have reached `gpt`, which waits, and call the other models only after the signal."""
    here, go = tmp_path / "here", tmp_path / "go"
    here.mkdir()
    slow = shutil.copytree(repo, tmp_path / "repo")
    wait_in_answer(slow / "gpt" / "1" / "model.py", here, go)
    with serving(slow, models=MODELS, exit_seconds=60) as server:
        client, everyone = Client(server, timeout=PATIENCE), processes(server)
        go.touch()
        right = [ask(client, number).outcome() for number in range(3)]
        go.unlink()
        begun = len(list(here.iterdir()))
        asked = [ask(client, number) for number in range(3)]  # all three through `gpt`
        until(lambda: len(list(here.iterdir())) == begun + 3)
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: "Signal (15) received" in server.tail(200))
        go.touch()
        assert [request.outcome() for request in asked] == right
        check_ended(server, everyone)


def wait_in_answer(file, here, go):
    """Make a request create a file in `here` and wait for the file `go` before it calls a model."""
    code = file.read_text()
    place = "            ids = self.tokens_of(text)\n"
    assert code.count(place) == 1
    wait = (
        f"            Path({str(here)!r}, str(id(call)) + str(time.monotonic_ns())).touch()\n"
        f"            while not Path({str(go)!r}).exists():\n"
        "                time.sleep(0.01)\n"
    )
    file.write_text(code.replace(place, wait + place))


def test_sigterm_between_answers(repo):
    """Clients ask repeatedly: each request is answered correctly or refused with a reason.

    Triton keeps gRPC open while it unloads its models, so late requests there are told so.
    """
    with serving(repo, models=MODELS, exit_seconds=60) as server:
        client, everyone = Client(server, timeout=PATIENCE), processes(server)
        right = [ask(client, number).outcome() for number in range(8)]
        wrong, refused, answered = [], [], [0] * 8

        def on_and_on(number):
            while True:
                outcome = ask(client, number).outcome()
                if isinstance(outcome, ServeError):
                    refused.append(outcome)
                    return
                answered[number] += 1
                if outcome != right[number]:
                    wrong.append(outcome)

        threads = [threading.Thread(target=on_and_on, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: min(answered) >= 3)
        os.kill(server.pid, signal.SIGTERM)
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert not wrong
        for error in refused:
            late = "has no available versions" in str(error)
            assert late or error.status in ("NO_ANSWER", "UNAVAILABLE"), error
        check_ended(server, everyone)
        assert refuses(server.http)
        assert refuses(server.grpc)
