"""Kernels for the notebooks' tests that start with torch and matplotlib already imported.

A kernel takes four processor seconds to start: Python, IPython, torch, matplotlib; some forty
notebooks are tested. So each pytest process keeps one process that has imported only these (`main`
below), and forks kernels from it. They read, write and show what a kernel started from scratch
does. (The browser's tests, `make course` and `make refresh` start kernels from scratch, and so do
notebooks that set TRITON_INTERPRET: torch's compiler imports Triton, which reads that variable
once.) Linux only: elsewhere kernels start as usual.
"""

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from utils.imports import collector_at_rest

# Without pyplot, whose import must find a running kernel. No import here starts a thread.
IMPORTED = ["ipykernel.kernelapp", "ipykernel.ipkernel", "IPython", "numpy", "torch"]
IMPORTED += ["torch.distributed", "torch.distributed.fsdp", "torch._dynamo", "torch.profiler"]
IMPORTED += ["torch.utils.checkpoint", "matplotlib.figure", "matplotlib.backends.backend_agg"]
BACKEND = "module://matplotlib_inline.backend_inline"  # read when matplotlib is imported
_process = None


def kernels() -> subprocess.Popen:
    """The process whose forks are kernels; it ends with this one."""
    global _process
    if _process is None:
        environment = os.environ | {"PYTHONHASHSEED": "0", "MPLBACKEND": BACKEND}
        _process = subprocess.Popen(
            [sys.executable, "-m", "tests.notebooks.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        atexit.register(_process.stdin.close)
    return _process


class WarmProvisioner(LocalProvisioner):
    """Jupyter's interface for starting a kernel, here by a fork."""

    async def launch_kernel(self, cmd, *, env, cwd=None, **_):
        arguments = cmd[cmd.index("ipykernel_launcher") :]
        wanted = {"arguments": arguments, "environment": env, "folder": cwd}
        pipes = kernels()
        print(json.dumps(wanted), file=pipes.stdin, flush=True)
        answer = pipes.stdout.readline()
        if not answer:
            raise RuntimeError("the process whose forks are kernels has ended: see above")
        self.process = ForkedKernel(int(answer))
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class ForkedKernel:
    """What Jupyter needs of subprocess.Popen, for a process that is not our child."""

    stdin = stdout = stderr = None

    def __init__(self, pid):
        self.pid, self._handle = pid, os.pidfd_open(pid)

    def poll(self):
        ended, _, _ = select.select([self._handle], [], [], 0)
        return 0 if ended else None

    def wait(self):
        select.select([self._handle], [], [])
        return 0

    def send_signal(self, number):
        if self.poll() is None:
            signal.pidfd_send_signal(self._handle, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def __del__(self):
        os.close(self._handle)


def use_warm_kernels(warm: bool = True) -> None:
    """Make this process's Jupyter managers start kernels this way or, if not `warm`, as usual."""
    if not hasattr(os, "pidfd_open"):
        return
    factory = KernelProvisionerFactory.instance()
    if not warm:
        factory.default_provisioner_name = "local-provisioner"
        return
    name, group = "warm", KernelProvisionerFactory.GROUP_NAME
    factory.provisioners[name] = EntryPoint(name, f"{__name__}:{WarmProvisioner.__name__}", group)
    factory.default_provisioner_name = name


# ---- in the process whose forks are kernels


def main() -> None:
    """Read a line per requested kernel, and answer with its process ID."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with collector_at_rest():
        for name in IMPORTED:
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a kernel's exit status is not read
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            answers.close()
            become_kernel(**json.loads(line))
        print(pid, file=answers, flush=True)


def become_kernel(arguments: list[str], environment: dict[str, str], folder: str | None) -> None:
    """In a fork: do what `python -m ipykernel_launcher` does, in this environment and folder."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder or ".")
    sys.argv = arguments

    from ipykernel import kernelapp

    kernelapp.launch_new_instance()
    os._exit(0)


if __name__ == "__main__":
    main()
