"""Several nodes on one Linux machine, joined by links of a chosen bandwidth.

    with Nodes(2, gbit=1) as nodes:
        nodes.launch("utils.train", ranks_per_node=2, args=["--steps", 20])   # torchrun on each
        ranks = nodes.ranks(per_node=2)             # warm ranks for cells; 0 and 1 are on node 0
        nodes.gbit = 0.1                            # the same nodes, a slower network
        nodes.sent()                                # bytes that each node has put on its cable

A node is a set of Linux namespaces: a network of its own, a host name (node0, node1 …), and a cable
to a switch. Processes on different nodes reach each other through the cables only, which carry so
many Gbit/s in each direction; those on one node talk to each other at full speed. The disk, the
cores and the memory are shared.

It works for root, and for others where the kernel lets them make user namespaces; `Nodes.
available()` says in one sentence why not. Nothing is taken from the machine: the switch has a
namespace too (`utils/ranks/node_world.py`), so there are no names to collide, and the kernel
removes everything when the one process that holds it ends, however it ends.
"""

import contextlib
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import pandas as pd
import psutil

from utils.ranks import Ranks
from utils.ranks import launch as launching
from utils.ranks.launch import LaunchError
from utils.ranks.node_network import NodesError, World, sent_bytes
from utils.ranks.node_world import CABLE, SEARCH
from utils.ranks.worker import Place

GRACE = 8.0  # seconds that the other nodes may go on when the ranks of one have failed


class Nodes:
    """`count` nodes, up to 64; `gbit`: what a cable carries, in Gbit/s (None: all that it can)."""

    def __init__(self, count, *, gbit=None):
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
    def available():
        """None where this machine allows nodes, else one sentence that says why not."""
        return _why_not(os.geteuid() if hasattr(os, "geteuid") else None)

    @property
    def gbit(self):
        """What every cable carries in each direction, in Gbit/s; None: all that it can."""
        return self._gbit

    @gbit.setter
    def gbit(self, value):
        check_speed(value)
        self._world.ask({"gbit": value})
        self._gbit = value

    @property
    def names(self):
        """The host names of the nodes."""
        return [f"node{node}" for node in range(self.count)]

    def sent(self):
        """Bytes that each node has put on its cable until now, headers included, as a list."""
        return [sent_bytes(pid) for pid in self._world.open_pids()]

    def ranks(self, per_node, *, spread=False, **options):
        """`utils.ranks.Ranks` with `per_node` ranks on each node: the first ones are on node 0.

        spread: neighbours live on different nodes instead, rank r on node r modulo their number.
        The ranks compute on the CPU and talk through gloo. options: timeout, seed.
        """
        pids = self._world.open_pids()
        order = [pids[number % self.count if spread else number // per_node]
                 for number in range(self.count * per_node)]  # fmt: skip
        namespaces = self._world.namespaces(("net", "uts"))
        places = [Place(pid, namespaces, CABLE) for pid in order]
        pool = Ranks(len(places), places=places, **options)
        self._pools.append(weakref.ref(pool))
        return pool

    def launch(self, target, *, ranks_per_node=2, args=(), timeout=600.0, environment=None):
        """Runs a module or a script with torchrun on every node, as `launch` does on one.

        The same command runs on each node; they find each other at node0 (torchrun's c10d
        rendezvous). environment: variables for all of them. Returns the metrics of rank 0 as a
        pandas DataFrame; raises LaunchError when a rank fails, or the time (seconds) is over.
        """
        if type(ranks_per_node) is not int or ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node!r}: give 1 or more")
        program = launching.program_words(target) + [str(word) for word in args]
        shown = launching.shell_command(program, ranks_per_node, self.count)
        on_each = f"on each of {self.count} nodes" if self.count > 1 else "on node0"
        print(f"{on_each} $ {shown}", flush=True)
        with tempfile.TemporaryDirectory(prefix="launch-", dir=self._world.folder) as folder:
            logs = [f"{folder}/{name}" for name in self.names]
            commands = [
                launching.torchrun_words(log, ranks_per_node, self.count) + program for log in logs
            ]
            rows, ended, late = self._run_all(commands, timeout, environment or {})
            if late:
                raise LaunchError(f"The run did not end within {timeout:g} s and was stopped.")
            if any(status for status, _ in ended):
                raise LaunchError(first_failure(logs, ended))
        return pd.DataFrame(rows)

    def run(self, command, *, environments=None, timeout=600.0):
        """Runs a command (a list of words) on every node at once.

        environments: variables for each node, a list. Returns [(exit status, output)] by node.
        """
        _, ended, late = self._run_all([command] * self.count, timeout, environments or {})
        if late:
            raise LaunchError(f"The command did not end within {timeout:g} s and was stopped.")
        return [(status, "\n".join(lines)) for status, lines in ended]

    def close(self):
        """Ends everything that runs on the nodes, and the nodes. Closing twice does nothing."""
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

    # --- commands on all nodes ------------------------------------------------------------------

    def _run_all(self, commands, timeout, environments):
        """(metrics of rank 0, [(status, torchrun's own lines)] by node, whether time was over)."""
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
            rows, outputs[0] = launching.read(runs[0].stdout)
            for thread in threads:
                thread.join()
            ended = [(run.wait(), lines) for run, lines in zip(runs, outputs)]
        finally:  # whatever happened here, the runs must not outlive this call
            for run in runs:
                _hang_up(run)
            for run in runs:
                run.wait()
                run.stdout.close()
        watch.join()
        return rows, ended, over.is_set()


def _watch(runs, timeout, over):
    """Hangs up when time is over, or when one node has failed and the others go on for long."""
    began, failed_at = time.monotonic(), None
    while any(run.poll() is None for run in runs):
        now = time.monotonic()
        if failed_at is None and any(run.poll() for run in runs):
            failed_at = now
        if now - began > timeout:
            over.set()
        if over.is_set() or (failed_at is not None and now - failed_at > GRACE):
            for run in runs:
                _hang_up(run)
        time.sleep(0.05)


def _hang_up(run):
    """Closes the tether: SIGTERM for what it holds, and SIGKILL some seconds later."""
    with contextlib.suppress(OSError):
        run.stdin.close()


def _collect(run, outputs, node):
    """The lines of a node that is not the first, without those of its ranks."""
    lines = [line.rstrip("\n") for line in run.stdout]
    outputs[node] = [line for line in lines if not line.startswith("[default")]


def first_failure(logs, ended):
    """The text of a LaunchError: of the node whose rank failed first."""
    failed = [node for node, (status, _) in enumerate(ended) if status]

    def when(node):
        root = launching.root_cause(ended[node][1])
        if root is None:  # it was stopped, because of another node
            return float("inf")
        files = list(Path(logs[node]).glob(f"*/attempt_*/{root[1]}/stderr.log"))
        return max((file.stat().st_mtime for file in files), default=float("inf"))

    node = min(failed, key=when)
    status, lines = ended[node]
    return f"On node{node} {launching.failure(logs[node], lines, status)}"


def check_speed(gbit):
    """ValueError unless this is a bandwidth that a cable can have."""
    if gbit is not None and not (isinstance(gbit, (int, float)) and 1e-4 <= gbit <= 100):
        raise ValueError(f"gbit {gbit!r} is not a bandwidth: give 0.0001 to 100 Gbit/s, or None")


@functools.cache
def _why_not(user):
    """Tries it once per process and user: None, or the sentence of `Nodes.available`."""
    if not sys.platform.startswith("linux"):
        return f"Several nodes on one machine need Linux's namespaces, and this is {sys.platform}."
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
