"""TritonServer against the real tritonserver: it runs, or says why it does not."""

import os
import socket
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.serving.processes import in_thread, until
from tests.serving.triton_models import write_code, write_models
from utils.serving.client import Client, ServeError
from utils.serving.install import SETTLE
from utils.serving.server import ServerError, TritonServer, server_available
from utils.serving.server import __main__ as command

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(server_available() is not None, reason=str(server_available())),
]


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("repo"), "echo", "slow", "gpt")


@pytest.fixture(scope="module")
def server(repo):
    with TritonServer(repo, quiet=True) as running:
        yield running


# --- a server that runs ---------------------------------------------------------------------------


def test_it_listens_on_this_machine_only_below_the_ports_of_the_kernel(server):
    listening = [
        (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port)
        for connection in psutil.Process(server.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {f"{ip}:{port}" for ip, port in listening} == {server.http, server.grpc, server.metrics}
    assert all(ip == "127.0.0.1" and port < 32768 for ip, port in listening)


def test_a_ctrl_c_of_this_terminal_does_not_reach_it(server):
    assert os.getsid(server.pid) != os.getsid(0)
    assert os.getpgid(server.pid) != os.getpgid(0)


def test_models_are_unloaded_and_loaded_by_request(server):
    assert server.ready() and server.ready("echo") and server.versions("echo") == [1]
    server.unload("echo")
    assert not server.ready("echo") and server.versions("echo") == []
    with pytest.raises(ServeError):
        Client(server, model="echo").generate("a")
    server.load("echo")
    assert server.ready("echo") and server.versions("echo") == [1]
    assert Client(server, model="echo").generate("a") == "a"


def test_a_model_is_loaded_with_another_configuration(server):
    changed = server.config("echo") | {"parameters": {"slots": {"string_value": "4"}}}
    server.load("echo", changed)
    assert server.config("echo")["parameters"] == {"slots": {"string_value": "4"}}
    server.unload("echo")
    server.load("echo")  # its config.pbtxt applies again
    assert server.config("echo")["parameters"] == {}


def test_what_was_loaded_stays_for_a_moment(server, monkeypatch):
    """Unloaded at once, it may take the server down with it."""
    called, ask = [], server.ask

    def noted(*call, **options):
        called.append(time.monotonic())
        return ask(*call, **options)

    monkeypatch.setattr(server, "ask", noted)
    for change in (server.load, server.load, server.unload, server.load):
        change("echo")
    first, second, unload, *_, last = called
    assert second - first >= SETTLE and unload - second >= SETTLE and last > unload


def test_a_broken_version_is_refused_and_the_old_one_goes_on(server, repo):
    write_code(repo, "echo", version=2, like="hopeless")
    with pytest.raises(ServerError) as caught:
        server.load("echo")
    reason = "rank-1-of-2.safetensors is cut short: export it again"
    assert str(caught.value) == f"echo version 2: ValueError: {reason}"
    assert server.versions("echo") == [1] and server.ready("echo")
    write_code(repo, "echo", version=2)
    server.load("echo")
    assert server.versions("echo") == [2]


def test_what_is_not_there_is_said_so(server):
    with pytest.raises(ServerError, match="nothing"):
        server.load("nothing")
    assert not server.ready("nothing") and server.versions("nothing") == []


# --- a server that does not start -----------------------------------------------------------------


def test_a_broken_model_is_named_first_then_the_log(tmp_path, capsys):
    repo = write_models(tmp_path / "repo", "echo", "hopeless")
    earlier = 'E1122 07:45:42.3 1 main.cc:257] "failed to start HTTP service: already in use"\n'
    (tmp_path / "log").write_text(earlier)  # of an earlier start: kept, but not quoted
    with pytest.raises(ServerError) as caught:
        TritonServer(repo, log=tmp_path / "log")
    assert (tmp_path / "log").read_text().startswith(earlier)
    assert "already in use" not in str(caught.value)
    first, _, rest = str(caught.value).partition("\n")
    reason = "rank-1-of-2.safetensors is cut short: export it again"
    assert first == f"hopeless version 1: ValueError: {reason}"
    assert f"The end of its log ({tmp_path / 'log'})" in rest
    assert capsys.readouterr().out == "tritonserver starts: echo, hopeless … failed\n"
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(repo) in str(p.info["cmdline"])]


def test_a_configuration_that_cannot_be_read_is_named(tmp_path):
    repo = write_models(tmp_path / "repo", "echo")
    file = repo / "echo" / "config.pbtxt"
    file.write_text('name: "echo"\nmax_batch_sise: 0\n')
    with pytest.raises(ServerError) as caught:
        TritonServer(repo, quiet=True)
    said = str(caught.value)
    assert said.startswith(f"{file}:2:1 : ") and '"max_batch_sise"' in said and "\n" not in said


def test_a_model_that_takes_too_long_is_given_up(tmp_path):
    repo = write_models(tmp_path / "repo", "sleeper")
    with pytest.raises(ServerError, match=r"^tritonserver was not ready after 1 s\. The end of"):
        TritonServer(repo, start_seconds=1.0, quiet=True)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(repo) in str(p.info["cmdline"])]


def test_a_taken_port_is_named(repo):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is taken: give grpc another,"):
            TritonServer(repo, grpc=port, quiet=True)


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_the_command_names_the_option_of_a_taken_port(name):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        free = [f"--{other}=0" for other in ("http", "grpc", "metrics") if other != name]
        fix = rf"port {port} is taken: use another --{name} \(make serve {name.upper()}=…\)"
        with pytest.raises(ServerError, match=fix):
            command.triton(command.parse([f"--{name}={port}", *free]))


def test_a_port_that_is_taken_while_it_starts_is_noticed(repo, tmp_path):
    """Another server then answers there; without a metrics port tritonserver itself runs on."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        log = tmp_path / "log"
        listen = in_thread(lambda: until(log.exists) and other.listen())
        with pytest.raises(ServerError, match=rf"port {port} is taken"):
            TritonServer(repo, metrics=port, log=log, quiet=True)
        listen()


def test_a_repository_without_the_model_is_refused(repo, tmp_path):
    with pytest.raises(ServerError, match=r"has no model 'gtp': it has echo, gpt, slow"):
        TritonServer(repo, ["gtp"])
    with pytest.raises(ServerError, match=r"has no model \(NAME/config\.pbtxt\)"):
        TritonServer(tmp_path)


# --- what the command says ------------------------------------------------------------------------


def test_the_lines_to_try_say_how_it_is_reached(monkeypatch):
    """Over HTTPS if there is a certificate, and with the keys that are required."""
    server = SimpleNamespace(models=["gpt"], metrics="127.0.0.1:8002", left_out={}, log="log")
    front = SimpleNamespace(http="10.1.1.1:8000", grpc="g", host="10.1.1.1", control_key="drawn")
    for name in ("KINTSUGI_API_KEY", "KINTSUGI_CONTROL_KEY"):
        monkeypatch.delenv(name, raising=False)
    said = command.to_try(server, front, tls=False)
    assert "curl -sN http://10.1.1.1:8000/v2/models/gpt/generate " in said
    assert "load and unload models is drawn" in said
    assert "Anyone who reaches 10.1.1.1 is served" in said
    monkeypatch.setenv("KINTSUGI_API_KEY", "secret")
    monkeypatch.setenv("KINTSUGI_CONTROL_KEY", "secret")
    said = command.to_try(server, front, tls=True)
    assert "http://" not in said and 'base_url="https://10.1.1.1:8000/v1"' in said
    assert 'curl -sN -k -H "Authorization: Bearer $KINTSUGI_API_KEY" https://' in said
    assert "drawn" not in said and "is served" not in said and "secret" not in said


@pytest.mark.parametrize(
    "option, words",
    [
        ("--http=99999", "99999 is not a port"),
        ("--grpc=-1", "-1 is not a port"),
        ("--repo={}", "loop"),
    ],
)
def test_places_that_are_none_are_refused(tmp_path, capsys, option, words):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(SystemExit) as stopped:
        command.main([option.format(tmp_path / "loop")])
    assert stopped.value.code == 2 and words in capsys.readouterr().err
