"""The environment check names each problem together with its fix."""

import importlib.metadata
import socket
import subprocess
import sys

import pytest

from utils.measure import environment, machine
from utils.measure.environment import Finding, check_environment


def test_every_check_runs_here_and_says_something():
    for check in environment.CHECKS:
        finding = check()
        assert finding.state in ("ok", "note", "fix") and finding.what
        assert (finding.fix == "") == (finding.state == "ok"), finding


def test_a_problem_is_printed_with_its_fix_and_the_answer_is_no(capsys):
    checks = (lambda: Finding("ok", "fine"), lambda: Finding("fix", "broken", "repair it"))
    assert check_environment(checks) is False
    assert capsys.readouterr().out.splitlines() == [
        "[ok]   fine", "[fix]  broken → repair it", "1 to fix before you go on."]


def test_a_note_alone_does_not_stop_anyone(capsys):
    assert check_environment((lambda: Finding("note", "slow disk", "wait"),)) is True
    assert "Ready" in capsys.readouterr().out


def test_another_python_is_named(monkeypatch):
    monkeypatch.setattr(environment.sys, "version_info", (3, 10, 1))
    assert check("python").state == "fix" and "make setup" in check("python").fix


def test_missing_and_different_packages_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    assert "requirements.txt is missing" in check("packages").what
    lock = tmp_path / "requirements.txt"
    elsewhere = "never-there==1 ; sys_platform == 'none'"
    lock.write_text(f"# a comment\nnumpy==0.0.1 \\\n    --hash=sha256:0\n{elsewhere}\n")
    assert check("packages").state == "note" and "tested with ==0.0.1" in check("packages").what
    lock.write_text("no-such-package-here==1\n")
    assert check("packages").state == "fix"
    assert check("packages").what == "missing: no-such-package-here"


def test_a_triton_language_that_was_left_out_stops_nobody(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\ntriton==3.7.1\n")

    def version(name):
        if name == "triton":
            raise importlib.metadata.PackageNotFoundError
        return "2.13.0"

    monkeypatch.setattr(environment.importlib.metadata, "version", version)
    assert check("packages").state == "note" and "make setup TRITON=yes" in check("packages").fix


def test_torch_from_another_index_counts_as_the_locked_version():
    assert environment.locked("torch==2.13.0")["torch"].specifier.contains("2.13.0+cpu")


@pytest.mark.parametrize("version, state", [("2.10.1", "fix"), ("2.11.0+cpu", "ok")])
def test_an_old_torch_is_named(monkeypatch, version, state):
    monkeypatch.setattr(environment.torch, "__version__", version)
    monkeypatch.setattr(environment.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(environment.Path, "exists", lambda path: False)
    assert check("torch").state == state


def test_torch_without_gloo_is_named(monkeypatch):
    monkeypatch.setattr(environment.dist, "is_gloo_available", lambda: False)
    assert check("torch").state == "fix" and "gloo" in check("torch").what


def test_little_memory_disk_and_shared_memory_are_named():
    for name in ("memory", "disk", "shared_memory"):
        finding = getattr(environment, f"check_{name}")(needed=2**60)
        assert finding.state in ("note", "fix") and finding.fix


def test_a_system_without_a_fork_server_is_named(monkeypatch):
    monkeypatch.setattr(environment.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert check("processes").state == "fix" and "WSL" in check("processes").fix


def test_a_closed_loopback_is_named(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(environment.socket, "create_connection", refuse)
    assert check("network") == Finding(
        "fix", "a connection to 127.0.0.1 failed (Connection refused)",
        "allow loopback connections in the firewall or sandbox")


def test_a_name_without_an_address_is_only_a_note(monkeypatch):
    look_up = socket.getaddrinfo

    def unknown(host, *others):
        if host == socket.gethostname():
            raise socket.gaierror("no such name")
        return look_up(host, *others)

    monkeypatch.setattr(environment.socket, "getaddrinfo", unknown)
    assert check("network").state == "note" and "GLOO_SOCKET_IFNAME" in check("network").fix


def test_too_many_threads_are_named(monkeypatch):
    monkeypatch.setattr(environment.torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(environment, "cores", lambda: 2.0)
    assert check("threads").state == "note" and "OMP_NUM_THREADS=2" in check("threads").fix


def test_no_compiler_is_a_note(monkeypatch):
    monkeypatch.setattr(environment.shutil, "which", lambda name: None)
    assert check("compiler").state == "note"


@pytest.mark.parametrize("content, expected", [("150000 100000", 1.5), ("max 100000", 3), ("", 3)])
def test_the_containers_share_of_the_cores_counts(monkeypatch, content, expected):
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(machine.Path, "read_text", lambda path: content)
    assert machine.cores() == expected


def test_the_machine_has_cores_and_memory():
    here = machine.machine()
    assert here.cores > 0 and 0 < here.free_memory <= here.memory
    assert f"{here.cores:g} cores" in str(here)


def check(name):
    return getattr(environment, f"check_{name}")()


def test_a_missing_package_is_named_before_anything_else_runs():
    code = "import sys; sys.modules['psutil'] = None; import utils.measure.environment"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("ImportError: the package psutil is missing in")
    assert "make setup" in run.stderr
