"""The network of `nodes` as its owner sees it: one process that holds it, and what it runs.

`World(count)` starts `utils/ranks/node_world.py` in namespaces of its own and speaks with it
through two pipes. When the first of them closes, because it is told to or because the owner has
died, the world ends, and the kernel ends everything in it.
"""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path

import psutil

from utils.paths import ROOT
from utils.ranks.node_world import CABLE, SEARCH, address

START = 30.0  # seconds that the network may take to come up, on a machine that may be busy


class NodesError(RuntimeError):
    """The nodes could not be made, or are gone. The message says why, and what would help."""


class World:
    """The process that holds the network, and everything that runs in it."""

    def __init__(self, count):
        self.folder = tempfile.mkdtemp(prefix="nodes-")  # the world removes it, whatever happens
        hosts = Path(self.folder) / "hosts"
        # torch's stores listen for both kinds of addresses, and see the first kind as the second
        kinds = ("{}", "::ffff:{}")
        lines = [
            f"{kind.format(address(node))} node{node}\n" for kind in kinds for node in range(count)
        ]
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))
        self.user = os.geteuid() != 0
        words = ["unshare", *(["--user", "--map-root-user"] if self.user else [])]
        words += ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words += [sys.executable, "-m", "utils.ranks.node_world", str(count), str(hosts)]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Jupyter's interrupt is for the kernel
            env={**os.environ, "PATH": SEARCH, "PYTHONPATH": _import_path()},
        )
        self._finalizer = weakref.finalize(self, _end_world, self._process, self.folder)
        try:
            inside = self._answer()["nodes"]
            self.pids = outside_pids(self._process.pid, inside)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self):
        return not self._finalizer.alive

    def open_pids(self):
        """The processes of the nodes; NodesError if they are gone."""
        if self.closed or self._process.poll() is not None:
            raise NodesError("the nodes are closed: make new ones with Nodes(…)")
        return self.pids

    def namespaces(self, names):
        return ("user", *names) if self.user else tuple(names)

    def ask(self, request):
        """Sends a request to the world and waits for its answer; NodesError if it could not."""
        self.open_pids()
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self):
        ready, _, _ = select.select([self._process.stdout], [], [], START)
        line = self._process.stdout.readline() if ready else ""
        try:
            answer = json.loads(line)
        except ValueError:
            answer = {"error": line.strip() or f"no answer within {START:g} s"}
        if "error" in answer:
            raise NodesError(answer["error"])
        return answer

    def start_on(self, pid, command, more):
        """A process on a node: its standard input is the tether, its output is a pipe."""
        flags = [f"--{name}" for name in self.namespaces(("net", "uts", "mount", "pid"))]
        keep = ["--preserve-credentials"] if self.user else []
        enter = ["nsenter", "--target", str(pid), *flags, *keep]
        tethered = [sys.executable, "-m", "utils.ranks.supervise", *command]
        return subprocess.Popen(
            [*enter, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *tethered],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{SEARCH}",
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "1",
                "GLOO_SOCKET_IFNAME": CABLE,
                **more,
            },
        )

    def close(self):
        self._finalizer()


def _end_world(process, folder):
    """The world ends when its input does; the kernel then kills what is left in it."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # it has died before
            pipe.close()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()  # unshare --kill-child: its child dies with it
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def outside_pids(process, inside):
    """The pids by which this process knows what the world calls `inside`: /proc has both."""
    found = {}
    for child in psutil.Process(process).children(recursive=True):
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                found[int(line.split()[-1])] = child.pid
    return [found[pid] for pid in inside]


def sent_bytes(pid):
    """Bytes sent through the cable of the node that a process lives on."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == CABLE:
            return int(numbers.split()[8])
    raise NodesError(f"process {pid} has no cable: the nodes are closed")


def _import_path():
    """Where this process found `utils`, for a program that is started elsewhere."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
