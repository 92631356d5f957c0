"""Several nodes on one Linux machine, joined by links of a chosen bandwidth.

    with Nodes(2, gbit=1) as nodes:
        nodes.launch("utils.train", ranks_per_node=2, args=["--steps", 20])   # torchrun on each
        ranks = nodes.ranks(per_node=2)             # warm ranks for cells; 0 and 1 are on node 0
        nodes.gbit = 0.1                            # the same nodes, a slower network
        nodes.sent()                                # bytes that each node has put on its cable
        child = nodes.start(1, ["sleep", "60"])     # a command on one node
        nodes.kill(1)                               # its power fails: nothing on it survives
        nodes.revive(1)                             # it is back, with nothing running

A node is a set of Linux namespaces: a network of its own, a host name (node0, node1 …), and a cable
to a switch. Processes on different nodes reach each other only through the cables, which carry
`gbit` Gbit/s in each direction; those on one node talk to each other at full speed. The disk, the
cores and the memory are shared.

It works for root, and for other users if the kernel lets them create user namespaces; otherwise
`Nodes.available()` says in one sentence why not. The machine itself is unchanged: the switch has a
namespace too (`utils/ranks/node_world.py`), so no names can collide, and the kernel removes
everything when the one process that holds it ends, for whatever reason.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pandas as pd
import psutil

from utils.paths import ROOT
from utils.ranks import launch as torchrun
from utils.ranks.launch import LaunchError
from utils.ranks.node_world import CABLE, SEARCH, address
from utils.ranks.pool import Ranks
from utils.ranks.supervise import OVER, Child, ChildEnded, end, supervised
from utils.ranks.worker import Place

GRACE = 8.0  # seconds that other nodes may continue after the ranks of one node have failed
START = 30.0  # seconds that the network may take to come up, even on a busy machine


class NodesError(RuntimeError):
    """The nodes could not be created or are gone. The message says why and what would help."""


class Nodes:
    """`count` nodes, up to 64; `gbit`: the bandwidth of a cable, in Gbit/s (None: no limit)."""

    def __init__(self, count: int, *, gbit: float | None = None):
        if type(count) is not int or not 1 <= count <= 64:
            raise ValueError(f"count {count!r} is not a number of nodes: give 1 to 64")
        check_speed(gbit)
        if reason := Nodes.available():
            raise NodesError(reason)
        self.count = count
        self._world = World(count)
        self._pools = []
        self.gbit = gbit

    @staticmethod
    def available() -> str | None:
        """None if this machine allows nodes, else one sentence that says why not."""
        return _why_not(os.geteuid() if hasattr(os, "geteuid") else None)

    @property
    def gbit(self) -> float | None:
        """The bandwidth of every cable in each direction, in Gbit/s; None: no limit."""
        return self._gbit

    @gbit.setter
    def gbit(self, value: float | None) -> None:
        check_speed(value)
        self._world.ask({"gbit": value})
        self._gbit = value

    @property
    def names(self) -> list[str]:
        """The host names of the nodes."""
        return [f"node{node}" for node in range(self.count)]

    def sent(self) -> list[int]:
        """Bytes that each node has sent over its cable so far, including headers, as a list."""
        return [sent_bytes(pid) for pid in self._world.open_pids()]

    def ranks(self, per_node: int, *, spread: bool = False, **options: Any) -> Ranks:
        """`utils.ranks.Ranks` with `per_node` ranks on each node, the first ones on node 0.

        spread: place neighbouring ranks on different nodes instead: rank r on node r modulo their
        number. The ranks compute on the CPU and communicate through gloo. options: timeout, seed.
        """
        pids = self._world.open_pids()
        order = [pids[number % self.count if spread else number // per_node]
                 for number in range(self.count * per_node)]
        namespaces = self._world.namespaces(("net", "uts"))
        places = [Place(pid, namespaces, CABLE) for pid in order]
        pool = Ranks(len(places), places=places, **options)
        self._pools.append(weakref.ref(pool))
        return pool

    def launch(
        self,
        target: Path | str,
        *,
        ranks_per_node: int = 2,
        args: Sequence[object] = (),
        timeout: float = 600.0,
        environment: dict[str, str] | None = None,
    ) -> pd.DataFrame:
        """Run a module or a script with torchrun on every node, as `launch` does on one.

        The same command runs on each node; they find each other at node0 (torchrun's c10d
        rendezvous). environment: variables for all of them. Returns the metrics of rank 0 as a
        pandas DataFrame; raises LaunchError if a rank fails, or after `timeout` seconds.
        """
        if type(ranks_per_node) is not int or ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node!r}: give 1 or more")
        program = torchrun.program_words(target) + [str(word) for word in args]
        shown = torchrun.shell_command(program, ranks_per_node, self.count)
        on_each = f"on each of {self.count} nodes" if self.count > 1 else "on node0"
        print(f"{on_each} $ {shown}", flush=True)
        with tempfile.TemporaryDirectory(prefix="launch-", dir=self._world.folder) as folder:
            logs = [f"{folder}/{name}" for name in self.names]
            commands = [
                torchrun.torchrun_words(log, ranks_per_node, self.count) + program for log in logs
            ]
            rows, ended, late = self._run_all(commands, timeout, environment or {})
            if late:
                raise LaunchError(f"The run did not end within {timeout:g} s and was stopped.")
            if any(status for status, _ in ended):
                raise LaunchError(first_failure(logs, ended))
        return pd.DataFrame(rows)

    def run(
        self,
        command: Sequence[str],
        *,
        environments: Sequence[dict[str, str]] | None = None,
        timeout: float = 600.0,
    ) -> list[tuple[int, str]]:
        """Run a command (a list of words) on every node at once.

        environments: variables for each node, a list. Returns [(exit status, output)] by node.
        """
        _, ended, late = self._run_all([command] * self.count, timeout, environments or {})
        if late:
            raise LaunchError(f"The command did not end within {timeout:g} s and was stopped.")
        return [(status, "\n".join(lines)) for status, lines in ended]

    def close(self) -> None:
        """End the nodes and everything that runs on them. Closing twice does nothing."""
        for pool in self._pools:
            if pool() is not None:
                pool().close()
        self._world.close()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        speed = "no limit" if self.gbit is None else f"{self.gbit:g} Gbit/s"
        return f"Nodes({self.count}), {speed}" + (", closed" if self._world.closed else "")

    # --- single nodes ---------------------------------------------------------------------------

    def start(
        self,
        node: int,
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        output: str | IO = "together",
    ) -> Child:
        """Start a command (a list of words) on one node without waiting; end it with `end`.

        environment: variables for it. output: as in `Child`; a pipe that is never read fills up.
        """
        self._check(node)
        [pid] = self._world.open_pids([node])
        return self._world.start_on(pid, command, environment or {}, output)

    def kill(self, node: int) -> None:
        """Cut the power of a node. Its cable goes first, so the others do not notice its end:
        connections fall silent instead of closing. Then all its processes are killed."""
        self._check(node)
        [pid] = self._world.open_pids([node])
        self._world.ask({"cut": node})
        self._world.pids[node] = None
        kill_all_with(pid)

    def revive(self, node: int) -> None:
        """Bring a killed node back, with its name and address and nothing running."""
        self._check(node)
        if self._world.pids[node] is not None:
            raise ValueError(f"node{node} is up: only a killed node can come back")
        self._world.revive(node)
        self.gbit = self._gbit

    def _check(self, node):
        if type(node) is not int or not 0 <= node < self.count:
            raise ValueError(f"there is no node {node!r}: give 0 to {self.count - 1}")

    # --- commands on all nodes ------------------------------------------------------------------

    def _run_all(self, commands, timeout, environments):
        """(metrics of rank 0, [(status, torchrun's own lines)] by node, whether time ran out)."""
        if isinstance(environments, dict):
            environments = [environments] * self.count
        runs, threads, outputs = [], [], [None] * self.count
        over = threading.Event()
        try:
            for command, more, pid in zip(commands, environments, self._world.open_pids()):
                runs.append(self._world.start_on(pid, command, more))
            watch = threading.Thread(target=_watch, args=(runs, timeout, over), daemon=True)
            watch.start()
            for node, run in enumerate(runs[1:], start=1):
                thread = threading.Thread(target=_collect, args=(run, outputs, node), daemon=True)
                thread.start()
                threads.append(thread)
            rows, outputs[0] = torchrun.read(runs[0].lines())
            for thread in threads:
                thread.join()
            for run in runs:
                run.wait()
        finally:  # whatever happened here, the runs must not outlive this call
            end(runs, OVER)
        watch.join()
        ended = [(run.returncode, lines) for run, lines in zip(runs, outputs)]
        return rows, ended, over.is_set()


def _watch(runs, timeout, over):
    """Hang up when time runs out, or GRACE seconds after a node has failed."""
    began, failed_at = time.monotonic(), None
    while any(run.returncode is None for run in runs):
        now = time.monotonic()
        if failed_at is None and any(run.returncode for run in runs):
            failed_at = now
        if now - began > timeout:
            over.set()
        if over.is_set() or (failed_at is not None and now - failed_at > GRACE):
            for run in runs:
                run.close_input()
        time.sleep(0.05)


def _collect(run, outputs, node):
    """Collect the lines of a node other than the first, without those of its ranks."""
    outputs[node] = [line for line in run.lines() if not line.startswith("[default")]


def first_failure(logs: Sequence[str], ended: Sequence[tuple[int, list[str]]]) -> str:
    """The text of a LaunchError about the node whose rank failed first."""
    failed = [node for node, (status, _) in enumerate(ended) if status]

    def when(node):
        root = torchrun.root_cause(ended[node][1])
        if root is None:  # it was stopped because of another node
            return float("inf")
        files = list(Path(logs[node]).glob(f"*/attempt_*/{root[1]}/stderr.log"))
        return max((file.stat().st_mtime for file in files), default=float("inf"))

    node = min(failed, key=when)
    status, lines = ended[node]
    return f"On node{node} {torchrun.failure(logs[node], lines, status)}"


class World:
    """The process that holds the network of `count` nodes and everything that runs in it.

    It is `utils/ranks/node_world.py` in namespaces of its own. When its standard input closes, on
    request or because its owner has died, the world ends, and the kernel ends everything in it.
    """

    def __init__(self, count: int):
        self.folder = tempfile.mkdtemp(prefix="nodes-")  # the world removes it in any case
        hosts = Path(self.folder) / "hosts"
        # torch's stores listen for both kinds of address, and see IPv4 ones as IPv6
        kinds = ("{}", "::ffff:{}")
        lines = [
            f"{kind.format(address(node))} node{node}\n" for kind in kinds for node in range(count)
        ]
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))
        self.user = os.geteuid() != 0
        words = ["unshare", *(["--user", "--map-root-user"] if self.user else [])]
        words += ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        words += [sys.executable, "-m", "utils.ranks.node_world", str(count), str(hosts)]
        environment = {**os.environ, "PATH": SEARCH, "PYTHONPATH": _import_path()}
        self._process = Child(words, output="together", env=environment)
        self._finalizer = weakref.finalize(self, _end_world, self._process, self.folder)
        try:
            inside = self._answer()["nodes"]
            self.pids = outside_pids(self._process.pid, inside)
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def open_pids(self, nodes: Sequence[int] | None = None) -> list[int]:
        """The processes of these nodes, or of all; NodesError if one is gone."""
        self._check_open()
        nodes = range(len(self.pids)) if nodes is None else nodes
        for node in nodes:
            if self.pids[node] is None:
                raise NodesError(f"node{node} has been killed: nodes.revive({node}) brings it back")
        return [self.pids[node] for node in nodes]

    def _check_open(self):
        if self.closed or self._process.returncode is not None:
            raise NodesError("the nodes are closed: make new ones with Nodes(…)")

    def namespaces(self, names: Sequence[str]) -> tuple[str, ...]:
        return ("user", *names) if self.user else tuple(names)

    def ask(self, request: dict) -> dict:
        """Send a request to the world and return its answer; NodesError if it failed."""
        self._check_open()
        self._process.write_line(json.dumps(request).encode())
        return self._answer()

    def revive(self, node: int) -> None:
        """Start a new process for a node whose process was killed."""
        inside = self.ask({"revive": node})["nodes"]
        [self.pids[node]] = outside_pids(self._process.pid, inside)

    def _answer(self):
        line = b""
        try:
            line = self._process.answer(START)
            answer = json.loads(line)
        except (ValueError, ChildEnded, TimeoutError):
            said = line.decode(errors="replace").strip()
            answer = {"error": said or f"no answer within {START:g} s"}
        if "error" in answer:
            raise NodesError(answer["error"])
        return answer

    def start_on(
        self, pid: int, command: Sequence[str], more: dict[str, str], output: str | IO = "together"
    ) -> Child:
        """Start a command on a node as a `Child`; more: variables for its environment."""
        flags = [f"--{name}" for name in self.namespaces(("net", "uts", "mount", "pid"))]
        keep = ["--preserve-credentials"] if self.user else []
        enter = ["nsenter", "--target", str(pid), *flags, *keep]
        here = ["sh", "-c", 'cd "$0" && exec "$@"', os.getcwd()]
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{SEARCH}",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": CABLE,
            **more,
        }
        words = supervised(command, daemons=True)  # daemons end with the node
        return Child([*enter, *here, *words], output=output, env=environment)

    def close(self) -> None:
        self._finalizer()


def _end_world(process, folder):
    """End the world by closing its input; the kernel then kills what is left in it."""
    end([process], 3.0)
    shutil.rmtree(folder, ignore_errors=True)


def outside_pids(process: int, inside: Sequence[int]) -> list[int]:
    """The pids in our namespace of the processes `inside` the world: /proc has both."""
    found = {}
    for child in psutil.Process(process).children(recursive=True):
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                found[int(line.split()[-1])] = child.pid
    return [found[pid] for pid in inside]


def kill_all_with(pid: int) -> None:
    """Kill every process in the network namespace of process `pid`, which is a node's."""
    network, until = _network(pid), time.monotonic() + START
    if network == _network(os.getpid()):  # it ended by itself, and its pid was reused
        raise NodesError(f"process {pid} belongs to no node: make new nodes with Nodes(…)")
    while network and (left := [one for one in psutil.pids() if _network(one) == network]):
        if time.monotonic() > until:
            raise NodesError(f"processes {left} cannot be killed")
        for one in left:
            with contextlib.suppress(ProcessLookupError), _handle(one) as handle:
                if _network(one) == network:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
        time.sleep(0.01)


@contextlib.contextmanager
def _handle(pid):
    """A file descriptor of a process, which stays valid if its pid is reused."""
    handle = os.pidfd_open(pid)
    try:
        yield handle
    finally:
        os.close(handle)


def _network(pid):
    """The network namespace of a process; None if it has ended or is not visible to us."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")


def sent_bytes(pid: int) -> int:
    """Bytes sent over the cable of the node on which a process runs."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == CABLE:
            return int(numbers.split()[8])
    raise NodesError(f"process {pid} has no cable: the nodes are closed")


def _import_path():
    """Where this process found `utils`, for a program started elsewhere."""
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def check_speed(gbit: float | None) -> None:
    """Raise ValueError unless this is a valid bandwidth for a cable."""
    if gbit is not None and not (isinstance(gbit, (int, float)) and 1e-4 <= gbit <= 100):
        raise ValueError(f"gbit {gbit!r} is not a bandwidth: give 0.0001 to 100 Gbit/s, or None")


@functools.cache
def _why_not(user):
    """The sentence of `Nodes.available`, or None; tried once per process and user."""
    if not sys.platform.startswith("linux"):
        return f"Several nodes on one machine need Linux's namespaces, but this is {sys.platform}."
    missing = [w for w in ("ip", "tc", "unshare", "nsenter") if not shutil.which(w, path=SEARCH)]
    if missing:
        return (
            f"Several nodes on one machine need the command {missing[0]}: install iproute2 and "
            "util-linux (apt-get install iproute2 util-linux)."
        )
    world = None
    try:
        world = World(1)
        world.ask({"gbit": 1})
    except (NodesError, OSError, psutil.Error, KeyError) as error:
        return f"This machine does not allow several nodes ({error})."
    finally:
        if world is not None:
            world.close()
    return None
