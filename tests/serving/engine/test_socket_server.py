"""The socket through which `gpt` reaches the engine: lines in, lines out, no request lost."""

import json
import os
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from tests.serving.probe import frozen
from tests.serving.processes import PATIENCE, until
from tests.serving.world import repo_of
from utils.serving.engine.engine import Engine
from utils.serving.engine.socket_server import SocketServer, folder_of, own_folder

TOKENS = [7, 8, 9]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    repo = repo_of("tiny", 1, tmp_path_factory.mktemp("server") / "repo")
    with Engine(repo / "gpt_engine" / "1", max_num_seqs=4) as engine:
        yield engine


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "sockets"


@contextmanager
def a_socket(engine, folder, name="gpt_engine-1"):
    server = SocketServer(engine, folder, name)
    try:
        yield server
    finally:
        server.close()


def asked(server, stream=False, ids=TOKENS, **sampling):
    """A connection on which a request was sent."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE)
    connection.connect(str(server.file))
    wanted = {"ids": ids, "sampling": sampling, "prompt": None, "stream": stream}
    connection.sendall(json.dumps(wanted).encode() + b"\n")
    return connection


def answers(connection):
    """All answers until the connection ends."""
    with closing(connection), connection.makefile("rb") as lines:
        return [json.loads(line) for line in lines]


def test_a_newer_instance_of_the_same_version_is_seen(engine, folder):
    """It then publishes the gauges: the older one would overwrite them with zeros."""
    with a_socket(engine, folder) as server:
        for version, seconds, newer in ((1, -9, False), (1, 9, True), (2, 9, False)):
            other = folder / f"gpt_engine-{version}-{os.getppid()}.sock"
            other.touch()
            os.utime(other, ns=(server.made, server.made + 10**9 * seconds))
            assert server.superseded() == newer
            other.unlink()


def test_one_answer_or_many(engine, folder):
    expected = engine.complete(TOKENS).tokens
    with a_socket(engine, folder) as server:
        (whole,) = answers(asked(server, max_tokens=64))
        pieces = answers(asked(server, stream=True, max_tokens=64))
    assert (whole["ids"], whole["finish"]) == (expected, "length")
    assert len(pieces) > 1
    assert [token for piece in pieces for token in piece["ids"]] == expected
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert [piece["finish"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    for piece in (whole, *pieces):
        assert (piece["prompt_tokens"], piece["weights_version"]) == (len(TOKENS), "1")


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"", "INTERNAL"),
        (b"no json\n", "INTERNAL"),
        (b"[]\n", "INTERNAL"),
        (b'{"ids": [1]}\n', "INTERNAL: KeyError"),
        (b'{"ids": [], "sampling": {}, "prompt": null, "stream": false}\n', "INVALID_ARG: there"),
        (b'{"ids": [1], "sampling": {"top_p": NaN}, "prompt": null}\n', "INVALID_ARG: top_p nan"),
        (b'{"ids": [1], "sampling": {"best": 1}, "prompt": null}\n', "INTERNAL: TypeError"),
    ],
)
def test_what_makes_no_sense_is_an_error_of_its_own(engine, folder, line, error):
    with a_socket(engine, folder) as server:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(server.file))
        connection.sendall(line)
        connection.shutdown(socket.SHUT_WR)
        (answer,) = answers(connection)
        assert answer["error"].startswith(error)
        assert answers(asked(server, max_tokens=1))[0]["finish"] == "length"


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_slot(engine, folder, stream):
    before = engine.stats()["requests_cancelled"]
    with a_socket(engine, folder) as server:

        def freed():
            server.watch()
            return engine.stats()["running"] == 0

        with frozen(*engine.pids):  # only leaving can end the request
            connection = asked(server, stream=stream, max_tokens=9)
            until(lambda: engine.stats()["running"] == 1)
            connection.close()
            until(freed)
        assert engine.stats()["requests_cancelled"] == before + 1
        until(lambda: not server.open)


def test_closing_loses_nobody_who_came_before(engine, folder):
    server = SocketServer(engine, folder, "gpt_engine-1")
    with ThreadPoolExecutor(24) as pool:
        callers = [pool.submit(answers, asked(server, max_tokens=8)) for _ in range(24)]
        server.close()
        assert not server.file.exists()
        assert all(caller.result()[-1]["finish"] == "length" for caller in callers)
    with pytest.raises(FileNotFoundError):
        asked(server)


def test_an_instance_that_closes_leaves_the_others_alone(engine, folder):
    with a_socket(engine, folder, "gpt_engine-2") as new:
        with a_socket(engine, folder, "gpt_engine-1") as old:
            assert {old.file, new.file} == set(folder.iterdir())
        assert set(folder.iterdir()) == {new.file}
        assert answers(asked(new, max_tokens=1))[0]["finish"] == "length"
    assert not folder.exists()


def test_only_this_user_may_come(engine, folder, tmp_path):
    with a_socket(engine, folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.stat().st_uid == os.getuid()
    other = tmp_path / "other"
    other.mkdir()
    (other / f"mine-{2**22 + 1}.sock").touch()
    folder.symlink_to(other)
    with pytest.raises(PermissionError, match="belongs to another user"):
        SocketServer(engine, folder, "gpt_engine-1")
    assert len(list(other.iterdir())) == 1


def test_what_the_dead_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, here = folder_of(2**22 + 1), folder_of(os.getpid())  # no process has such an id
    for folder in (dead, here):
        folder.mkdir()
    for number in (2**22 + 1, os.getpid()):
        (here / f"gpt_engine-1-{number}.sock").touch()
    own_folder(here)
    assert sorted(tmp_path.iterdir()) == [here]
    assert [file.name for file in here.iterdir()] == [f"gpt_engine-1-{os.getpid()}.sock"]
