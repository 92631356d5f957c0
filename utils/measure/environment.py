"""Can the workshop run on this machine? Each problem comes with its fix.

    python -m utils.measure.environment      # one line per check; exit status 1: something to fix

A check is a function that returns one `Finding`. To add one, write it and put it into CHECKS.
"""

import importlib.metadata
import math
import multiprocessing
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.cli import no_arguments
from utils.paths import ROOT

try:
    import psutil  # noqa: F401 (machine() imports it)
    import torch
    import torch.distributed as dist
    from IPython import get_ipython
    from packaging.requirements import Requirement

    from utils.measure.machine import GIB, cores, machine
except ImportError as error:
    raise ImportError(
        f"the package {error.name} is missing in {sys.executable}: run `make setup` "
        "in a terminal, then restart this kernel"
    ) from None

OLDEST_TORCH = (2, 11)


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    state    "ok"; "note": the lessons still run; "fix": something will fail
    fix      how to fix it
    """

    state: str
    what: str
    fix: str = ""


def ok(what: str) -> Finding:
    return Finding("ok", what)


def note(what: str, fix: str) -> Finding:
    return Finding("note", what, fix)


def broken(what: str, fix: str) -> Finding:
    return Finding("fix", what, fix)


def check_python() -> Finding:
    version = platform.python_version()
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        return broken(
            f"Python {version} is not 3.11 or 3.12",
            "install one of them, delete .venv, run `make setup`",
        )
    return ok(f"Python {version}")


def check_packages() -> Finding:
    """Every package in requirements.txt is installed, in the version locked there."""
    lock = ROOT / "requirements.txt"
    if not lock.exists():
        return note(
            "requirements.txt is missing, so versions were not compared",
            "restore it: `git checkout requirements.txt`",
        )
    wanted = locked(lock.read_text())
    missing, other = [], []
    for name, requirement in wanted.items():
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            other.append(f"{name} {installed} (tested with {requirement.specifier})")
    if missing == ["triton"]:  # `make setup TRITON=no`
        return note(
            "the Triton language is not installed",
            "for lesson 12, run `make setup TRITON=yes`; the other lessons do not need it",
        )
    if missing:
        return broken(f"missing: {_few(missing)}", "run `make setup`")
    if other:
        return note(
            f"versions other than those tested: {_few(other)}",
            "run `make setup` if a lesson behaves differently",
        )
    return ok(f"{len(wanted)} packages, all in the tested versions")


def locked(text: str) -> dict[str, Requirement]:
    """The packages of a pip lock file that apply to this machine, by name."""
    lines = (line.split("#")[0].split(" --hash")[0].strip(" \\") for line in text.splitlines())
    wanted = [Requirement(line) for line in lines if line and not line.startswith("-")]
    return {r.name: r for r in wanted if r.marker is None or r.marker.evaluate()}


def check_torch() -> Finding:
    version = torch.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_TORCH:
        return broken(f"torch {version} is older than 2.11", "run `make setup`")
    if not dist.is_available() or not dist.is_gloo_available():
        return broken(
            f"torch {version} was built without gloo, so ranks cannot communicate",
            "install the official torch wheel: `make setup`",
        )
    if torch.cuda.is_available() and not dist.is_nccl_available():
        return note(
            f"torch {version} sees a GPU but has no NCCL: ranks use the CPU",
            "install the official CUDA wheel of torch",
        )
    if not torch.cuda.is_available() and Path("/dev/nvidia0").exists():
        return note(
            f"this machine has an NVIDIA GPU that torch {version} cannot use",
            "install a CUDA wheel of torch that suits the driver (see README)",
        )
    gpus = torch.cuda.device_count()
    where = f"{gpus} GPU(s), NCCL" if gpus else "CPU, gloo"
    return ok(f"torch {version} on {where}")


def check_memory(needed: float = 4 * GIB) -> Finding:
    free = machine().free_memory
    if free < needed:
        return note(
            f"{free / GIB:.1f} GiB of memory free; four ranks and a kernel "
            f"need {needed / GIB:.0f}",
            "close other programs and other notebooks",
        )
    return ok(f"{free / GIB:.1f} GiB of memory free")


def check_disk(needed: float = 2 * GIB) -> Finding:
    free = shutil.disk_usage(ROOT).free
    if free < needed / 10:
        return broken(
            f"only {free / GIB:.2f} GiB of disk free under {ROOT}",
            "free some space, or move the repository to a larger disk",
        )
    if free < needed:
        return note(
            f"{free / GIB:.1f} GiB of disk free under {ROOT}",
            f"later lessons write checkpoints and need {needed / GIB:.0f} GiB",
        )
    return ok(f"{free / GIB:.0f} GiB of disk free")


def check_shared_memory(needed: float = 2**29) -> Finding:
    if not Path("/dev/shm").is_dir():
        return ok("this system has no /dev/shm and needs none")
    size = shutil.disk_usage("/dev/shm").total
    if size < needed:
        return note(
            f"/dev/shm holds {size / 2**20:.0f} MiB; NCCL and Triton need more",
            "in a container: `docker run --shm-size=2g …`",
        )
    return ok(f"{size / GIB:.1f} GiB in /dev/shm")


def check_processes() -> Finding:
    """A fork server starts the ranks, which talk to the notebook over pipes."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return broken(
            f"{platform.system()} has no fork server, so ranks cannot start",
            "on Windows, work inside WSL 2",
        )
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 512:
        return note(
            f"a process may open only {files} files; 8 ranks need more",
            "run `ulimit -n 4096` before starting JupyterLab",
        )
    return ok("ranks can start (fork server)")


def check_network() -> Finding:
    """Ranks meet on the loopback interface; torchrun looks up the machine's own name."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        return broken(
            f"a connection to 127.0.0.1 failed ({error.strerror or error})",
            "allow loopback connections in the firewall or sandbox",
        )
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return note(
            f"the machine's own name, {socket.gethostname()}, has no address",
            "if ranks cannot meet: `export GLOO_SOCKET_IFNAME=lo` before `make lab`",
        )
    return ok("ranks can meet on 127.0.0.1")


def check_threads() -> Finding:
    """More threads than cores slow every lesson down; the last section of lesson 00 shows it."""
    available, threads = max(1, math.floor(cores())), torch.get_num_threads()
    if threads > available:
        return note(
            f"torch uses {threads} threads on {available} core(s)",
            f"`export OMP_NUM_THREADS={available}` before `make lab`",
        )
    return ok(f"{threads} thread(s) on {available} core(s)")


def check_compiler() -> Finding:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return note(
            "no C++ compiler; torch.compile and DeepSpeed's extras need one",
            "`apt-get install g++`, or ask your administrator",
        )
    return ok("a C++ compiler, for torch.compile")


CHECKS = (
    check_python,
    check_packages,
    check_torch,
    check_memory,
    check_disk,
    check_shared_memory,
    check_processes,
    check_network,
    check_threads,
    check_compiler,
)


def check_environment(checks: Sequence[Callable[[], Finding]] = CHECKS) -> bool:
    """Run the checks, print a line for each, and return whether the workshop can run here.

    `[ok]` is fine, `[note]` slows something down or matters later, `[fix]` must be fixed.
    """
    findings = [check() for check in checks]
    for finding in findings:
        print(_paint(finding.state), finding.what + (finding.fix and f" → {finding.fix}"))
    wrong = sum(finding.state == "fix" for finding in findings)
    print("Ready: the lessons run here." if not wrong else f"{wrong} to fix before you go on.")
    return not wrong


def _paint(state):
    mark = f"[{state}]".ljust(6)
    if sys.stdout.isatty() or get_ipython() is not None:
        return {"ok": "\033[32m", "note": "\033[33m", "fix": "\033[31m"}[state] + mark + "\033[0m"
    return mark


def _few(names, limit=4):
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


if __name__ == "__main__":
    no_arguments("utils.measure.environment", __doc__)
    sys.exit(0 if check_environment() else 1)
