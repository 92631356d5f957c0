"""torchrun on several nodes, some of which fail: the run continues on the remaining nodes.

    with Nodes(2) as nodes, ElasticRun(nodes, "utils.train", folder, args=[…]) as run:
        run.wait_until(lambda: last_step(metrics) >= 20)
        nodes.kill(1)                                   # or os.kill(run.ranks()[1], SIGKILL)
        nodes.revive(1), run.start(1)                   # it rejoins the run
        run.wait()                                      # {0: 0, 1: 0}, the exit statuses
        print("\n".join(run.story(0)))                  # what torchrun did, in its own lines

Every node runs a torchrun, its *agent*, which starts and watches the node's ranks. The agents meet
through a store held by the agent on node 0. When a rank fails, its agent ends the other ranks of
its node; those on other nodes fail with their collectives. Then all remaining agents meet again and
restart their ranks, which load the newest checkpoint. Nothing restarts an agent: if the agent of
node 0 is gone, the others end too, and all must be started again from outside.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from utils.cli import flag
from utils.ranks.launch import (
    RESTARTING,
    TORCHRUN,
    LaunchError,
    meeting_words,
    program_words,
    shell_command,
)
from utils.ranks.nodes import Nodes
from utils.ranks.supervise import OVER, end


class ElasticRun:
    """A program under torchrun on all nodes, which may continue with fewer of them.

    target            a module ("utils.train") or a script
    args              words for its command line, or options: {"save_every": 5}; True for a flag
    folder            for the output of each node's torchrun and ranks: node0.log, node1.log …
    ranks_per_node    number of ranks that each node starts
    restarts          how often a node restarts its ranks after one has failed
    waits             as in `meeting_words`: seconds for latecomers, and for a silent node
    """

    def __init__(
        self,
        nodes: Nodes,
        target: Path | str,
        folder: Path | str,
        *,
        args: Sequence[object] | dict[str, object] = (),
        ranks_per_node: int = 1,
        restarts: int = 3,
        waits: tuple[int, int] = (2, 4),
    ):
        self.nodes, self.folder = nodes, Path(folder)
        if isinstance(args, dict):
            args = [w for name, value in args.items() for w in (flag(name), value)]
        program = program_words(target) + [str(word) for word in args if word is not True]
        meeting = {"nodes": (1, nodes.count), "restarts": restarts, "waits": waits}
        self.shown = shell_command(program, ranks_per_node, **meeting)
        self._words = [*TORCHRUN, *meeting_words(ranks_per_node, **meeting), *program]
        self._agents = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        for node in range(nodes.count):
            self.start(node)

    def start(self, node: int) -> None:
        """Start the agent of a node: its first, or another after the last one has ended."""
        if node in self._agents:
            if self._agents[node].returncode is None:
                raise ValueError(f"the agent of node{node} is still running: it cannot start twice")
            self._agents[node].close()
        with self.log(node).open("ab") as file:
            self._agents[node] = self.nodes.start(
                node, self._words, environment=RESTARTING, output=file
            )

    def stop(self, node: int) -> None:
        """Ask the agent of a node to end, by SIGTERM, as if the node were needed elsewhere."""
        self._agents[node].close_input()

    def log(self, node: int) -> Path:
        """The file with the output of a node's agent and ranks."""
        return self.folder / f"node{node}.log"

    def ranks(self) -> dict[int, int]:
        """{rank: pid} of the ranks now running, on all nodes."""
        found = {}
        for agent in self._agents.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(agent.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error, KeyError):
                        found.setdefault(int(process.environ()["RANK"]), process.pid)
        return found

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        """Wait until condition() is true; LaunchError after `seconds`, or once all have ended."""
        until = time.monotonic() + seconds
        while not condition():
            if self._over() and not condition():
                raise LaunchError(f"The run ended before that:\n{self._last_lines()}")
            if time.monotonic() > until:
                raise LaunchError(f"It did not happen within {seconds:g} s:\n{self._last_lines()}")
            time.sleep(0.02)

    def statuses(self) -> dict[int, int | None]:
        """{node: exit status of its agent}: None while it runs, -9 if the node was killed."""
        return {node: agent.returncode for node, agent in self._agents.items()}

    def wait(self, seconds: float = 120.0) -> dict[int, int]:
        """Wait for all agents to end; return their exit statuses. LaunchError after `seconds`."""
        self.wait_until(self._over, seconds)
        return self.statuses()

    def _over(self):
        return None not in self.statuses().values()

    def story(self, node: int) -> list[str]:
        """The lines of a node's agent and ranks about faults; see `story`."""
        return story(self.log(node).read_text(errors="replace"))

    def close(self) -> None:
        """End all agents and their ranks, as SIGTERM does."""
        end(self._agents.values(), OVER)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def _last_lines(self):
        lines = [
            f"node{node}: {line}"
            for node in self._agents
            for line in self.log(node).read_text(errors="replace").splitlines()[-8:]
        ]
        return "\n".join(lines)


def last_step(metrics: Path | str) -> int:
    """The last step in a metrics file of `utils.train`; 0 if there is none yet."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed(Path(metrics).read_bytes().splitlines(keepends=True)):
            if line.endswith(b"\n"):  # otherwise it is still being written
                return json.loads(line)["step"]
    return 0


# ---- torchrun's own lines (torch 2.13, LOGLEVEL=INFO)

_PREFIX = re.compile(r"^[A-Z]\d{4} \S+ \d+ \S+:\d+\] (\[\w+\] )?")  # level, time, pid, file, role
_MEETING = re.compile(
    r"(Rendezvous complete for workers)\. Result:\n.*?(restart_count=\d+)\n"
    r".*?(group_world_size=\d+)\n.*?(global_world_sizes=)\[(\d+)[^\n]*",
    re.DOTALL,
)
_TELLING = re.compile(
    r"^Rendezvous complete for workers: |^failed \(exitcode|will restart worker group|"
    r"closing signal|forcefully exiting|successfully finished|^torch\S*Rendezvous\w*Error|^utils\."
)
# values that change from run to run, and words that say nothing
_LEFT_OUT = re.compile(
    r" \(pid: \d+\)| of binary: .*|(?<=process) \d+|, last in .*|\.? Waiting \d+ seconds.*|"
    r"^torch\.\S+\.(?=Rendezvous)|\. See inner .*|; continue with.*"
)


def story(log: str) -> list[str]:
    """The lines of a torchrun log about faults and restarts, without times and pids.

    The dozen lines printed when the nodes have met become one, with three of their values:
    restart_count, group_world_size (nodes) and global_world_sizes (ranks).
    """
    text = "\n".join(_PREFIX.sub("", line) for line in log.splitlines())
    lines = _MEETING.sub(r"\1: \2 \3 \4\5", text).splitlines()
    return [_LEFT_OUT.sub("", line) for line in lines if _TELLING.search(line)]
