"""torchrun on several nodes of which some fail: the run goes on with those that are left.

    with Nodes(2) as nodes, ElasticRun(nodes, "utils.train", folder, args=[…]) as run:
        run.wait_until(lambda: last_step(metrics) >= 20)
        nodes.kill(1)                                   # or os.kill(run.ranks()[1], SIGKILL)
        nodes.revive(1), run.start(1)                   # it takes part again
        run.wait()                                      # {0: 0, 1: 0}, the exit statuses
        print("\n".join(run.story(0)))                  # torchrun's own lines tell what it did

Every node has a torchrun, its *agent*, which starts the node's ranks and watches them. The agents
meet in a store that the one on node 0 holds. When a rank fails, its agent ends the others of its
node; those of other nodes fail too, as their collectives do. Then all agents meet again, as many as
come, and start their ranks anew, which take up the newest checkpoint. Nothing restarts an agent:
where node 0's has gone the others end too, and whoever has started them must start all again.
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
    """A program under torchrun on all nodes, which may go on with fewer of them.

    target            a module ("utils.train") or a script
    args              words for its command line, or its options: {"save_every": 5}; True: a flag
    folder            where what each node's torchrun and ranks say is kept: node0.log, node1.log …
    ranks_per_node    ranks that each node starts
    restarts          how often a node starts its ranks again after one has failed
    waits             as of `meeting_words`: seconds for latecomers, and for a silent node
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
        """Starts the agent of a node: its first one, or another after that one has ended."""
        if node in self._agents:
            if self._agents[node].returncode is None:
                raise ValueError(f"the agent of node{node} still runs: it cannot be started twice")
            self._agents[node].close()
        with self.log(node).open("ab") as file:
            self._agents[node] = self.nodes.start(
                node, self._words, environment=RESTARTING, output=file
            )

    def stop(self, node: int) -> None:
        """Asks the agent of a node to end, by SIGTERM, as one does who needs the node."""
        self._agents[node].close_input()

    def log(self, node: int) -> Path:
        """The file with all that the agent of a node and its ranks have said."""
        return self.folder / f"node{node}.log"

    def ranks(self) -> dict[int, int]:
        """{rank: pid} of the ranks that are there now, on all nodes."""
        found = {}
        for agent in self._agents.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(agent.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error, KeyError):
                        found.setdefault(int(process.environ()["RANK"]), process.pid)
        return found

    def wait_until(self, condition: Callable[[], Any], seconds: float = 120.0) -> None:
        """Waits until condition() is true; LaunchError after `seconds`, or once all have ended."""
        until = time.monotonic() + seconds
        while not condition():
            if self._over() and not condition():
                raise LaunchError(f"The run has ended before:\n{self._last_lines()}")
            if time.monotonic() > until:
                raise LaunchError(f"It has not come within {seconds:g} s:\n{self._last_lines()}")
            time.sleep(0.02)

    def statuses(self) -> dict[int, int | None]:
        """{node: exit status of its agent}: None while it runs, -9 where the node was killed."""
        return {node: agent.returncode for node, agent in self._agents.items()}

    def wait(self, seconds: float = 120.0) -> dict[int, int]:
        """Waits for the end of all agents; their exit statuses. LaunchError after `seconds`."""
        self.wait_until(self._over, seconds)
        return self.statuses()

    def _over(self):
        return None not in self.statuses().values()

    def story(self, node: int) -> list[str]:
        """What a node's agent and its ranks say about faults; see `story`."""
        return story(self.log(node).read_text(errors="replace"))

    def close(self) -> None:
        """Ends all agents and their ranks, as SIGTERM does."""
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
    """The last step in a metrics file of `utils.train`; 0 where there is none yet."""
    with contextlib.suppress(FileNotFoundError):
        for line in reversed(Path(metrics).read_bytes().splitlines(keepends=True)):
            if line.endswith(b"\n"):  # else it is being written
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
# what is another at each run, and what one can do without
_LEFT_OUT = re.compile(
    r" \(pid: \d+\)| of binary: .*|(?<=process) \d+|, last in .*|\.? Waiting \d+ seconds.*|"
    r"^torch\.\S+\.(?=Rendezvous)|\. See inner .*|; go on with.*"
)


def story(log: str) -> list[str]:
    """The lines of a torchrun's log that tell of faults and restarts, without times and pids.

    Of the dozen that it says when the nodes have met, one is made with three of their values:
    restart_count, group_world_size (nodes) and global_world_sizes (ranks).
    """
    text = "\n".join(_PREFIX.sub("", line) for line in log.splitlines())
    lines = _MEETING.sub(r"\1: \2 \3 \4\5", text).splitlines()
    return [_LEFT_OUT.sub("", line) for line in lines if _TELLING.search(line)]
