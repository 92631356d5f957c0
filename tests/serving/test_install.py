"""Where the server is, the container's command, and the reasons of a failure in a log."""

import re
import shlex
from pathlib import Path

import pytest

from tests.serving.triton_models import write_models
from utils.serving import install
from utils.serving.server import (
    TritonServer,
    container_command,
    server_available,
    triton_server,
)

# --- where the server is --------------------------------------------------------------------------


@pytest.mark.skipif(server_available() is not None, reason=str(server_available()))
def test_an_installed_server_is_used_with_its_own_backends(tmp_path):
    """The layout of NVIDIA's images, PREFIX/bin and PREFIX/backends, from the wheel's files."""
    wheel = install.find_server()
    if wheel.packages is None:
        pytest.skip("this machine has an installed server, which the other tests use")
    prefix = tmp_path / "prefix"
    backends = wheel.assemble(prefix)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "tritonserver").symlink_to(wheel.binary)
    installed = install.Installation(prefix / "bin" / "tritonserver")
    assert installed.assemble(tmp_path / "else") == backends
    assert installed.backends() == {"python"} and installed.caches() is None


def test_the_container_command_has_what_a_model_over_several_gpus_needs(tmp_path):
    folder = tmp_path / "my repo"
    words = shlex.split(container_command(folder))
    assert words[:3] == ["docker", "run", "--rm"]
    assert words[words.index("--gpus") + 1] == "all"
    assert words[words.index("-v") + 1] == f"{folder}:/models"
    for word in ("--shm-size=2g", "memlock=-1", install.IMAGE, "--load-model=*",
                 "--model-control-mode=explicit", "--model-repository=/models"):
        assert word in words
    # Docker reads the value as CSV: a list of devices must keep its double quotes
    some = shlex.split(container_command(folder, gpus="device=0,1"))
    assert some[some.index("--gpus") + 1] == '"device=0,1"'
    assert "--gpus" not in container_command(folder, gpus=None)


def test_the_reason_says_what_is_missing(monkeypatch):
    """The platform and its paths are replaced by those of a machine without a server."""
    monkeypatch.setattr(install.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(install.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(install, "SYSTEM", Path("/nowhere"))
    monkeypatch.setenv("PATH", "/nowhere")
    reason = server_available()
    assert "built for Linux on x86-64 and this is Darwin on arm64" in reason.splitlines()[0]
    assert reason.splitlines()[1].startswith("docker run")


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    cases = [
        ({"control": "poll"}, "control 'poll' is not known"),
        ({"control": "none", "models": ["echo"]}, "leave out models"),
        ({"start_seconds": 0}, "start_seconds 0 is not a time limit"),
        ({"exit_seconds": float("inf")}, "exit_seconds inf is not a time limit"),
    ]
    for options, words in cases:
        with pytest.raises(ValueError, match=re.escape(words)):
            TritonServer(tmp_path, **options)


# --- the log --------------------------------------------------------------------------------------


LOG = r"""
I1122 07:45:40.053603 22841 model_lifecycle.cc:472] "loading: gpt_engine:1"
E1122 07:45:42.252387 22841 model_lifecycle.cc:642] "failed to load 'gpt_engine' version 1: Internal: LoadError: a is cut short:\nexport it\n\nAt:\n  /models/gpt_engine/1/model.py(3): initialize\n"
I1122 07:45:42.252406 22841 model_lifecycle.cc:777] "failed to load 'gpt_engine'"
E1122 07:45:42.293253 22841 model_repository_manager.cc:724] "failed to load model 'gpt': at least one version must be available"
E1122 07:45:42.334785 22841 main.cc:257] "failed to start HTTP service: Unavailable - Socket '127.0.0.1:8000' already in use "
| exit_timeout | 8 |
+--------------+---+
"""  # noqa: E501


def test_a_log_is_reduced_to_its_reasons(tmp_path):
    assert triton_server.reasons(LOG) == [
        "gpt_engine version 1: LoadError: a is cut short:\nexport it",
        "gpt: at least one version must be available",
        "HTTP: Socket '127.0.0.1:8000' already in use",
    ]
    assert triton_server.port_was_taken(LOG)
    (tmp_path / "log").write_text(LOG)
    assert triton_server.tail(tmp_path / "log", 1).endswith('already in use "')
    assert triton_server.tail(tmp_path / "none") == ""
    (tmp_path / "log").write_text(LOG + "a later start\n")
    assert triton_server.tail(tmp_path / "log", begin=len(LOG.encode())) == "a later start"
    assert "a later start" in triton_server.tail(tmp_path / "log", begin=10**6)  # truncated since


# --- its models -----------------------------------------------------------------------------------


def test_a_model_whose_backend_is_missing_is_left_out(tmp_path):
    repo = write_models(tmp_path, "echo", "slow")
    config = repo / "slow" / "config.pbtxt"
    config.write_text(config.read_text().replace('"python"', '"vllm"'))
    found = install.models_of(repo, None, {"python"})
    assert found == (["echo"], {"slow": "this server has no backend 'vllm'"})
    assert install.models_of(repo, None, {"python", "vllm"}) == (["echo", "slow"], {})
