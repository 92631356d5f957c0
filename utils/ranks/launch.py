"""Starts a training script on several ranks with torchrun, from a notebook.

    metrics = launch("utils.train", ranks=2, args=["--steps", 50, "--metrics", "-"])

`utils.ranks` runs cells; this runs programs, the way a terminal or a cluster does. It prints the
command, shows rank 0's output as it arrives, and returns rank 0's metrics: every line of its
standard output that is a JSON object becomes a row of the table (and is not shown).
"""

import json
import os
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from utils.ranks.supervise import OVER, Child, end, supervised

PREFIX = "[default0]:"  # torchrun's prefix for each line of rank 0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# For a torchrun that may restart its ranks, and should log what it does. In torch 2.13 it shares
# its store with the ranks: new ranks find the addresses of dead ones there, even on one node, and a
# node that comes back waits in vain for the store's own.
RESTARTING = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LOGLEVEL": "INFO"}


class LaunchError(RuntimeError):
    """A rank of a launched script failed; the message begins with that rank's traceback."""

    def _render_traceback_(self):  # IPython shows this instead of the notebook's own frames
        return [f"LaunchError: {self}"]


def launch(
    target: Path | str, *, ranks: int = 2, args: Sequence[object] = (), timeout: float = 600.0
) -> pd.DataFrame:
    """Run a module ("utils.train") or a script ("path/to/file.py") on `ranks` processes.

    args: words for its command line (numbers are fine). timeout: seconds for the whole run.
    Returns a pandas DataFrame, one row per metrics line of rank 0 (empty if there were none).
    Raises LaunchError when a rank fails or time runs out, ValueError for a target that is neither.
    Interrupting the kernel ends the run: SIGTERM first, then SIGKILL for what remains.
    """
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"ranks={ranks!r} is not a number of ranks: give 1 or more")
    program = program_words(target) + [str(word) for word in args]
    print("$ " + shell_command(program, ranks), flush=True)
    with tempfile.TemporaryDirectory(prefix="launch-") as logs:
        run = Child(
            supervised(torchrun_words(logs, ranks) + program),
            output="together",
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        late = threading.Event()
        timer = threading.Timer(timeout, lambda: (late.set(), run.close_input()))
        timer.daemon = True
        timer.start()
        try:
            rows, log = read(run.lines())
            run.wait()
        finally:  # whatever happened here, the run must not outlive this call
            timer.cancel()
            end([run], OVER)
        if late.is_set():
            raise LaunchError(f"The run did not end within {timeout:g} s and was stopped.")
        if run.returncode:
            raise LaunchError(failure(logs, log, run.returncode))
    return pd.DataFrame(rows)


def program_words(target: Path | str) -> list[str]:
    """["-m", "utils.train"] or ["path/to/script.py"]."""
    target = str(target)
    if target.endswith(".py"):
        if not Path(target).is_file():
            raise ValueError(f"there is no script {target!r} (looked in {os.getcwd()})")
        return [target]
    if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", target):
        raise ValueError(f'{target!r} is neither a module ("utils.train") nor a .py file')
    return ["-m", target]


def torchrun_words(logs: str, ranks: int, nodes: int = 1, head: str = "node0") -> list[str]:
    """The words for torchrun, with all ranks' output in files and rank 0's also on our pipe."""
    options = [*meeting_words(ranks, nodes, head), f"--log-dir={logs}"]
    options += ["--redirects=3", "--tee=3", "--local-ranks-filter=0"]
    return [*TORCHRUN, *options]


def meeting_words(
    ranks: int,
    nodes: int | tuple[int, int] = 1,
    head: str = "node0",
    job: str = "1",
    restarts: int = 0,
    waits: tuple[int, int] | None = None,
) -> list[str]:
    """torchrun's words for the ranks per node and the meeting point, the same on every node.

    nodes       their number; or (minimum, maximum): the run continues with those available
    head        name or address of the first node; it holds the store through which all nodes find
                one another, and the run ends with it
    job         distinguishes runs that meet at the same place
    restarts    how often a node restarts its ranks after one of them has failed
    waits       seconds that the nodes wait for more than the minimum, and seconds (4 or more) after
                which a silent node counts as gone; None: torchrun's own, 30 and 15
    """
    again = [f"--max-restarts={restarts}"] if restarts else []
    if nodes == 1:
        return ["--standalone", f"--nproc-per-node={ranks}", *again]
    count = ":".join(map(str, nodes)) if isinstance(nodes, tuple) else nodes
    place = ["--rdzv-backend=c10d", f"--rdzv-endpoint={head}:29500", f"--rdzv-id={job}"]
    if waits is not None:
        # a sign of life is due every second, and one may be late; with fewer attempts a live node
        # could count as gone, and two groups of ranks would each believe they are the run
        signs = f"keep_alive_interval=1,keep_alive_max_attempt={waits[1]}"
        place.append(f"--rdzv-conf=last_call_timeout={waits[0]},{signs}")
    return [f"--nnodes={count}", f"--nproc-per-node={ranks}", *again, *place]


def shell_command(program: Sequence[object], *meeting: Any, **more: Any) -> str:
    """The command to type in a terminal (on each node) for the same run.

    program         ["-m", "utils.train", "--steps", "50"], or a script's path and its arguments
    meeting, more   as in `meeting_words`
    """
    words = meeting_words(*meeting, **more)
    variables = {"OMP_NUM_THREADS": "1"}
    if any(word.startswith("--max-restarts") for word in words):
        variables |= RESTARTING
    set_first = [f"{name}={value}" for name, value in variables.items()]
    return " ".join([*set_first, shlex.join(["torchrun", *words, *map(str, program)])])


def read(lines: Iterable[str]) -> tuple[list[dict], list[str]]:
    """Show rank 0's lines as they arrive; return (its metrics, torchrun's own lines)."""
    rows, log = [], []
    for line in lines:
        if not line.startswith(PREFIX):
            log.append(line)
            continue
        line = line.removeprefix(PREFIX)
        row = metrics_row(line)
        if row is not None:
            rows.append(row)
        elif not line.startswith("[rank0]:"):  # its traceback is not news; the first failure's is
            print(line, flush=True)
    return rows, log


def metrics_row(line: str) -> dict | None:
    """The JSON object on this line, or None."""
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def failure(logs: str, log: Sequence[str], status: int) -> str:
    """The text of a LaunchError: the rank that failed first, its traceback, and how it ended."""
    root = root_cause(log)
    if not root:
        return f"torchrun ended with status {status}:\n" + "\n".join(log[-15:])
    rank, local_rank, code = root
    traceback = last_traceback(logs, rank, local_rank)
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    head = f"rank {rank} failed first:\n{traceback}\n" if traceback else ""
    return f"{head}Rank {rank} {how}; the other ranks were stopped."


def root_cause(log: Sequence[str]) -> tuple[int, int, int] | None:
    """(rank, local rank, exit code) from torchrun's "Root Cause", or None."""
    found = re.search(
        r"Root Cause.*?rank\s*:\s*(\d+) \(local_rank: (\d+)\).*?exitcode\s*:\s*(-?\d+)",
        "\n".join(log),
        re.S,
    )
    return tuple(map(int, found.groups())) if found else None


def last_traceback(logs: str, rank: int, local_rank: int) -> str:
    """The last traceback that a rank wrote to its standard error, or else its last lines."""
    for path in sorted(Path(logs).glob(f"*/attempt_*/{local_rank}/stderr.log"), reverse=True):
        text = path.read_text(errors="replace")
        start = text.rfind("Traceback (most recent call last)")
        lines = re.sub(rf"(?m)^\[rank{rank}\]: ?", "", text[max(start, 0) :]).rstrip().splitlines()
        lines = [line for line in lines if not line.startswith("terminate called")]
        return "\n".join(lines if start >= 0 else lines[-15:])
    return ""
