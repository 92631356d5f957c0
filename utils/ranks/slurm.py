"""A Slurm cluster on one Linux machine: a login node, and as many compute nodes as you ask for.

    with Slurm(2) as slurm:
        print(slurm.shell("sinfo"))             # a command line on the login node, node0
        slurm.shell("sbatch job.sh")            # runs on node1 and node2
        slurm.kill(2)                           # node2 loses its power
        slurm.revive(2)                         # it is back and reports to slurmctld

The daemons are Slurm's own, slurmctld on the login node and slurmd on the others. The nodes are
those of `utils/ranks/nodes.py`, so everything that the daemons write and start disappears when they
are closed. No keys are needed inside (auth/none): the network is isolated.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.ranks.node_world import SEARCH, address
from utils.ranks.nodes import Nodes, NodesError
from utils.ranks.supervise import OVER, end

DAEMONS = ("slurmctld", "slurmd", "sbatch")

# Enough for a cluster that lives for a few minutes; the lines of its nodes follow.
CONFIG = """
ClusterName=kintsugi
SlurmctldHost={controller}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,sched_interval=1,bf_interval=1
KillWait=10
PartitionName=all Nodes=ALL Default=YES
"""

# A dead node is noticed within 15 s, not minutes, and its job may restart 6 s later.
IMPATIENT = """
AuthInfo=cred_expire=5
MessageTimeout=3
SlurmdTimeout=5
ReturnToService=2
"""


def missing() -> str | None:
    """None if Slurm's daemons are installed, else one sentence that names a missing one."""
    absent = [name for name in DAEMONS if not shutil.which(name, path=SEARCH)]
    return f"Slurm's {absent[0]} is not installed (apt-get install slurm-wlm)." if absent else None


def configure(folder: Path, controller: str, user: str, ports: tuple[int, int], more: str) -> Path:
    """Write a slurm.conf into a folder; more: its NodeName=… lines, and others."""
    (folder / "state").mkdir()
    conf = folder / "slurm.conf"
    text = CONFIG.format(folder=folder, controller=controller, user=user, ports=ports)
    conf.write_text(text + more)
    return conf


class Slurm(Nodes):
    """`count` compute nodes, node1 …, of `cores` cores each, and the login node, node0."""

    def __init__(self, count: int = 2, *, cores: int = 1):
        if reason := Slurm.available():
            raise NodesError(reason)
        super().__init__(count + 1)
        self._daemons = []
        lines = [f"NodeName={name} NodeAddr={address(node)} CPUs={cores} RealMemory=1024\n"
                 for node, name in enumerate(self.names) if node]
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=self._world.folder))
        conf = configure(self.folder, f"node0({address(0)})", "root", (6817, 6818),
                         IMPATIENT + "".join(lines))
        self._variables = {"SLURM_CONF": str(conf)}
        try:
            for node in range(self.count):
                self._start_daemon(node)
            states = "sinfo --noheader --Node --format=%T"
            self.wait_until(lambda: self.shell(states).split() == ["idle"] * count)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def available() -> str | None:
        """None if this machine can be a cluster, else one sentence that says why not."""
        if hasattr(os, "geteuid") and os.geteuid():  # root starts the jobs of all users
            return "A Slurm cluster on one machine needs root: slurmd starts the jobs of its users."
        return missing() or Nodes.available()

    def shell(self, line: str, seconds: float = 60.0) -> str:
        """The output of a command line on the login node; NodesError after `seconds`."""
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            child = self.start(0, ["sh", "-c", line], environment=self._variables, output=said)
            try:
                if not child.wait(seconds):
                    raise NodesError(f"{line!r} did not end within {seconds:g} s")
            finally:
                end([child], OVER)
            said.seek(0)
            return said.read().rstrip()

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        """Wait until condition() is true; after `seconds` NodesError, with slurmctld's lines."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                last = (self.folder / "node0.log").read_text(errors="replace").splitlines()[-8:]
                raise NodesError(f"It did not happen within {seconds:g} s:\n" + "\n".join(last))
            time.sleep(0.02)

    def revive(self, node: int) -> None:
        super().revive(node)
        self._start_daemon(node)

    def close(self) -> None:
        super().close()  # the daemons have ended with their nodes
        end(self._daemons, 0)

    def _start_daemon(self, node):
        name = "slurmd" if node else "slurmctld"
        with (self.folder / f"node{node}.log").open("ab") as log:
            self._daemons.append(
                self.start(node, [name, "-D"], environment=self._variables, output=log)
            )
