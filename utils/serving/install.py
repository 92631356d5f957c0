"""Finds the tritonserver of this machine, and says what to do if there is none.

    reason = server_available()            # None, or a sentence and the container's command
    found = find_server()                  # Installation(binary, version of its Python stub, …)
    print(container_command("triton_model_repo", gpus="all"))

It looks in this order: the server inside the `nvidia-pytriton` wheel (Linux on x86-64 with glibc
2.35 or newer), `/opt/tritonserver` as in NVIDIA's images, `tritonserver` on PATH. The wheel's
server has only the Python backend, and its files are scattered: `Installation.assemble` and
`Installation.environment` tell it where they are.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from utils.serving.model_config import ConfigError, model_config

IMAGE = "nvcr.io/nvidia/tritonserver:26.07-vllm-python-py3"  # from Triton's compatibility table
GLIBC = (2, 35)  # the wheel's tag is manylinux_2_35
EXPORT = "python -m utils.serving.export"
RESTRICTED = "model-repository,shared-memory,trace,logging"  # no client needs these
CLOSED = "Closed=never"  # no call can send a capitalized header: HTTP/2 resets the stream
CONTROL = "kintsugi-control"  # the header with the key for a server's model control
# Seconds from a load to the next load or unload. Triton reports a model as loaded a moment before
# the model's thread waits for requests. If it is unloaded in that moment, which is long on a busy
# machine, the server crashes: StopBackendThread() of backend_model_instance.cc takes the last
# element of an empty list.
SETTLE = 0.5
SYSTEM = Path("/opt/tritonserver")  # its place in NVIDIA's images and packages


class ServerError(RuntimeError):
    """The server is missing, did not start, or refused or failed a call."""


@dataclass(frozen=True)
class Installation:
    """A tritonserver: its binary and, if it is the wheel's, the site-packages folder."""

    binary: Path
    packages: Path | None = None  # site-packages with the wheel; None: a system installation

    def assemble(self, folder: Path) -> Path | None:
        """Create a folder of backends in `folder` and return it; for a system installation,
        returns the server's own, or None if it has none.

        In the wheel the stub (the process that runs a model.py) is in another folder than its
        backend, once per version of Python. Symbolic links suffice, and they never go stale.
        """
        if self.packages is None:
            return beside(self.binary, "backends")
        triton = self.packages / "pytriton" / "tritonserver"
        backend = folder / "backends" / "python"
        backend.mkdir(parents=True)
        files = [p for p in (triton / "backends" / "python").iterdir() if p.is_file()]
        for path in [*files, triton / "python_backend_stubs" / python_version() / STUB]:
            (backend / path.name).symlink_to(path)
        return backend.parent

    def caches(self) -> Path | None:
        """The folder of response caches, or None if the server has none."""
        if self.packages is None:
            return beside(self.binary, "caches")
        return self.packages / "pytriton" / "tritonserver" / "caches"

    def backends(self) -> set[str]:
        """Names of the backends that this server has."""
        if self.packages is not None:
            return {"python"}
        folder = beside(self.binary, "backends") or SYSTEM / "backends"
        return {path.name for path in folder.iterdir()} if folder.is_dir() else {"python"}

    def environment(self) -> dict[str, str]:
        """The environment of the server, and hence of every model.py."""
        environment = dict(os.environ)
        if self.packages is None:
            return environment
        # The stub uses the packages of the first python3 on PATH and the first libpython that the
        # loader finds: without these two changes it would silently use the system's.
        paths = [str(self.packages / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
        for name, first in (("LD_LIBRARY_PATH", paths), ("PATH", [Path(sys.executable).parent])):
            rest = [environment[name]] if environment.get(name) else []
            environment[name] = os.pathsep.join([*map(str, first), *rest])
        environment.pop("PYTHONHOME", None)
        return environment


STUB = "triton_python_backend_stub"


def find_server() -> Installation:
    """The tritonserver of this machine. Raises ServerError with the container's command."""
    reason = wheel_reason()
    if reason is None:
        packages = Path(importlib.util.find_spec("pytriton").origin).parent.parent
        return Installation(packages / "pytriton/tritonserver/bin/tritonserver", packages)
    for binary in (SYSTEM / "bin" / "tritonserver", shutil.which("tritonserver")):
        if binary and os.access(binary, os.X_OK):
            return Installation(Path(binary).resolve())
    raise ServerError(
        f"There is no tritonserver here: {reason}. With Docker and an NVIDIA GPU (or without "
        f"--gpus), this serves the same folder:\n{container_command('triton_model_repo')}"
    )


def server_available() -> str | None:
    """None if a server can be started, else the reason and the container's command."""
    try:
        find_server()
    except ServerError as error:
        return str(error)
    return None


def wheel_reason() -> str | None:
    """Why the wheel's server cannot run here; None: it can."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine != "x86_64":
        return f"its wheel is built for Linux on x86-64 and this is {system} on {machine}"
    if glibc() < GLIBC:
        needed, here = (".".join(map(str, v)) for v in (GLIBC, glibc()))
        return f"its wheel needs glibc {needed} or newer and this system has {here}"
    specification = importlib.util.find_spec("pytriton")
    if specification is None:
        return "nvidia-pytriton is not installed (make setup installs it)"
    triton = Path(specification.origin).parent / "tritonserver"
    if not (triton / "python_backend_stubs" / python_version() / STUB).is_file():
        return f"its wheel has no stub for Python {python_version()}: use Python 3.11 or 3.12"
    numpy = importlib.metadata.version("numpy")
    if int(numpy.split(".")[0]) >= 2:
        return f"its wheel needs numpy below 2 and this environment has {numpy} (make setup)"
    return None


def container_command(repo: str | Path, gpus: str | None = "all", image: str = IMAGE) -> str:
    """The command that serves the folder `repo` in NVIDIA's image, as a string of several lines.

    It follows Docker's and Triton's documentation; the workshop's tests do not run it. The server
    and its stubs need shared memory, as does NCCL; memlock is unlimited because NCCL pins memory.

    gpus: the value of Docker's --gpus ("all", "2", "device=0,1"); None: without a GPU.
    """
    folder = Path(repo).resolve()
    lines = [
        "docker run --rm --init --stop-timeout=45"
        + (f" --gpus {shlex.quote(gpus_argument(gpus))}" if gpus else ""),
        "--shm-size=2g --ulimit memlock=-1 --ulimit stack=67108864",
        "-p 127.0.0.1:8000:8000 -p 127.0.0.1:8001:8001 -p 127.0.0.1:8002:8002",
        f"-v {shlex.quote(f'{folder}:/models')} {image}",
        "tritonserver --model-repository=/models --model-control-mode=explicit '--load-model=*'",
        "--disable-auto-complete-config --exit-timeout-secs=30",
        f"--grpc-restricted-protocol={RESTRICTED}:{CLOSED}",
    ]
    return " \\\n  ".join(lines)


def gpus_argument(gpus: str) -> str:
    """Docker reads --gpus as CSV, so a list of devices needs quotes of its own."""
    text = str(gpus)
    return f'"{text}"' if "," in text else text


def models_of(
    repo: Path, wanted: list[str] | None, backends: set[str]
) -> tuple[list[str], dict[str, str]]:
    """(names of the models to load, {name: reason} for those left out) of a model repository.

    wanted: names, or None for every model whose backend the server has. Raises ServerError.
    """
    found = {path.parent.name: path for path in sorted(Path(repo).glob("*/config.pbtxt"))}
    if not found:
        raise ServerError(f"{repo} has no model (NAME/config.pbtxt): fill one with {EXPORT}")
    if wanted is not None:
        for name in wanted:
            if name not in found:
                raise ServerError(f"{repo} has no model {name!r}: it has {', '.join(found)}")
        found = {name: found[name] for name in wanted}
    left_out = {}
    for name, path in found.items():
        try:
            backend = model_config(path).backend
        except ConfigError as error:
            raise ServerError(str(error)) from None
        if backend == "python":
            check_version(path.parent)
        if wanted is None and backend and backend not in backends:
            left_out[name] = f"this server has no backend {backend!r}"
    return [name for name in found if name not in left_out], left_out


def check_version(model: Path) -> None:
    """Raise ServerError if a model has no version or its newest version has no code."""
    versions = [int(path.name) for path in model.iterdir() if path.name.isdigit()]
    if not versions:
        raise ServerError(f"{model} has no version yet: {EXPORT} writes one")
    newest = model / str(max(versions))
    if (newest / "manifest.json").is_file() and not (newest / "model.py").is_file():
        raise ServerError(
            f"{newest} was exported when versions did not include their code: export it again with "
            f"{EXPORT}"
        )


def python_version() -> str:
    """This interpreter's version, as the stub folders are named: "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def glibc() -> tuple[int, ...]:
    """The version of glibc; (0,) if the C library is another (Alpine's musl)."""
    key = "CS_GNU_LIBC_VERSION"
    name, _, version = ((key in os.confstr_names and os.confstr(key)) or "").partition(" ")
    return tuple(map(int, version.split(".")[:2])) if name == "glibc" else (0,)


def beside(binary: Path, name: str) -> Path | None:
    """The folder `name` of an installation PREFIX/bin/tritonserver, or None if it has none."""
    folder = binary.parent.parent / name
    return folder if folder.is_dir() else None
