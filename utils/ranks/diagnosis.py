"""Describes what went wrong on which rank: a hang with the stack of every rank, an exception, a
death. Also formats the ranks' output, with equal lines folded. `utils.ranks.pool` uses this."""

import linecache
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from utils.ranks.worker import Failure, Frame

LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})


class RankError(RuntimeError):
    """A rank failed. The message says which rank, where, and what to do.

    failures: {rank: its exception}, for ranks that had one when the first failure was noticed.
    """

    def __init__(self, text: str, failures: dict[int, Failure] | None = None):
        super().__init__(text)
        self.failures = failures or {}

    def _render_traceback_(self):  # IPython shows this instead of the kernel's own frames
        return [f"RankError: {self}"]


def label(ranks: Sequence[int], size: int) -> str:
    """[0, 1, 2, 5] -> "ranks 0–2, 5"; every rank -> "all ranks"."""
    if len(ranks) == size and size > 1:
        return "all ranks"
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(a) if a == b else f"{a}–{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def folded(texts: dict[int, str], size: int) -> str:
    """{rank: text} as labelled lines; ranks with the same text share one block."""
    return columns([(rank, text) for rank, text in texts.items() if text], size)


def columns(pairs: Sequence[tuple[int, str]], size: int) -> str:
    """[(rank, text)] as `label │ line`, equal texts folded."""
    blocks = {}
    for rank, text in pairs:
        blocks.setdefault(text.rstrip("\n"), []).append(rank)
    labels = {text: label(ranks, size) for text, ranks in blocks.items()}
    width = max(map(len, labels.values()), default=0)
    lines = []
    for text, name in labels.items():
        for number, line in enumerate(text.split("\n")):
            lines.append(f"{name if number == 0 else '':<{width}} │ {line}".rstrip() + "\n")
    return "".join(lines)


class RankFiles:
    """The files that ranks write into their pool's folder: rank0.out, rank0.log, rank0.stack …"""

    def __init__(self, folder: Path | str):
        self._folder, self._seen = Path(folder), {}

    def new(self, rank: int, kind: str) -> str:
        """The text appended to one of these files since the last call."""
        path = self._folder / f"rank{rank}.{kind}"
        try:
            with open(path, "rb") as file:
                file.seek(self._seen.get(path, 0))
                data = file.read()
        except FileNotFoundError:
            return ""
        self._seen[path] = self._seen.get(path, 0) + len(data)
        return data.decode("utf-8", "replace")


def remember_source(name: str, source: str) -> None:
    """Let `linecache` find the lines of a cell."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def timed_out(reply: Any) -> bool:
    """Whether a rank failed because a collective reached its time limit."""
    return says(reply, r"[Tt]imed out|[Tt]imeout")


def consequence(reply: Any) -> bool:
    """Whether a rank failed only because another left and closed the connection."""
    return says(reply, r"closed by peer|Connection reset|Broken pipe|aborted")


def says(reply: Any, pattern: str) -> bool:
    """Whether a rank failed in a collective, with a message that matches the pattern."""
    return (
        isinstance(reply, Failure)
        and bool(re.search(pattern, reply.message))
        and bool(collective(reply.stack) or re.search("gloo|NCCL|ProcessGroup", reply.message))
    )


def collective(stack: Sequence[Frame]) -> str | None:
    """The name of the collective (or send, recv, barrier …) a stack is in, or None."""
    inside = [frame for frame in stack if in_torch(frame, "distributed")]
    inside = [frame for frame in inside if frame.function not in ("wrapper", "__exit__")]
    return inside[0].function if inside else None


def in_torch(frame: Frame, package: str) -> bool:
    """Whether a frame belongs to a package of torch, such as "distributed"."""
    return f"torch/{package}/" in frame.file.replace(os.sep, "/")


def own(stack: Sequence[Frame]) -> list[Frame]:
    """The learner's own frames, without those of Python's library and installed packages."""
    mine = [frame for frame in stack if not frame.file.startswith((*LIBRARIES, "<frozen"))]
    return mine or list(stack[-1:])


def where(frame: Frame) -> str:
    """ "line 3", with the file's name unless it is a cell."""
    if frame.file.startswith("<ranks cell"):
        place = f"line {frame.line}"
    elif "ipykernel" in frame.file:
        place = f"{frame.function}, line {frame.line}"
    else:
        place = f"{Path(frame.file).name}:{frame.line}"
    code = linecache.getline(frame.file, frame.line).strip()
    return f"{place}: {code}" if code else place


def failure(
    on: Sequence[int],
    first: dict[int, Any],
    stacks: dict[int, Sequence[Frame]],
    final: dict[int, Any],
    *,
    size: int,
    limit: float | None,
    ended: str | None,
    grouped: bool = True,
    locked: bool = False,
) -> str:
    """The full text of a RankError: what each rank did, equal ranks folded, and the state now.

    on: the ranks that were called, of `size`; first: replies when the failure was noticed; stacks:
    {rank: frames} of those still running; final: replies after the others were released; limit:
    seconds, if a collective reached its time limit, else None; ended: why the ranks had to be
    ended, or None; grouped: whether the remaining ranks have a process group again; locked:
    whether they were found waiting for one another, without a time limit.
    """
    blocks, waited = [], []
    for rank in on:
        reply = first.get(rank, final.get(rank))
        stack = stacks.get(rank) or (reply.stack if isinstance(reply, Failure) else ())
        lines = [where(frame) for frame in own(stack)]
        in_backward = any(in_torch(frame, "autograd") for frame in stack)
        waits_in = collective(stack)
        asleep = locked and rank not in first
        if asleep:
            waits_in = waits_in or "a call"
        elif timed_out(reply) or consequence(reply):
            # DDP starts collectives inside autograd's C++
            waits_in = waits_in or ("backward, in a collective" if in_backward else "a collective")
        is_victim = rank not in first or consequence(reply) or timed_out(reply)
        if is_victim and waits_in:
            waited.append(rank)
            blocks.append((rank, "\n".join([f"waiting in {waits_in}", *lines])))
        elif rank not in first:
            state = "running backward" if in_backward else "running, in no collective"
            blocks.append((rank, "\n".join([state, *lines])))
        elif isinstance(reply, Failure):
            lines.append(f"{reply.kind}: {reply.message}".rstrip(": "))
            blocks.append((rank, "\n".join(lines)))
        else:
            blocks.append((rank, "had finished"))
    idle = [rank for rank in range(size) if rank not in on]
    if limit is not None:
        blocks += [(rank, "does not run this cell") for rank in idle]
        head = f"A collective did not complete within {limit:g} s. Where each rank was:"
        if locked:
            head = "A call did not complete and never will. Where each rank was:"
    else:
        culprits = [r for r in on if isinstance(first.get(r), Failure) and r not in waited]
        head = f"{label(culprits, size).capitalize()} failed:"
        if not culprits:  # nothing more is known: the others had already left
            head = f"{label(waited, size).capitalize()} lost the connection to the others:"
    if ended:
        tail = f"The ranks were ended: {ended}. Call ranks.restart()."
    else:
        group = "the process group was created again" if grouped else "they have no process group"
        tail = f"The ranks stay usable and keep their variables; {group}."
    return f"{head}\n{columns(blocks, size)}{tail}"


def stacks(
    files: RankFiles, ranks: Sequence[int], signal_ranks: Callable[[Sequence[int], int], None]
) -> dict[int, tuple[Frame, ...]]:
    """The stack of each of these ranks now: {rank: frames, outermost first}.

    files: their `RankFiles`; signal_ranks(ranks, number) sends them a signal.

    The ranks write the stacks themselves on SIGUSR1 (faulthandler), even inside C++ code.
    """
    texts = dict.fromkeys(ranks, "")
    for rank in ranks:
        files.new(rank, "stack")
    signal_ranks(ranks, signal.SIGUSR1)
    deadline = time.monotonic() + 5.0
    # the outermost frame comes last (or "...", if there are many): a stack may be half written
    while not all(text.endswith((" in <module>\n", "  ...\n")) for text in texts.values()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
        for rank in ranks:
            texts[rank] += files.new(rank, "stack")
    found = {}
    for rank, text in texts.items():
        lines = re.findall(r'File "(.+)", line (\d+) in (.+)', text)
        if lines:
            frames = [Frame(file, int(line), name) for file, line, name in reversed(lines)]
            found[rank] = tuple(frame for frame in frames if not plumbing(frame))
    return found


def plumbing(frame: Frame) -> bool:
    """Whether a frame is below the learner's code: the worker's loop or its starter."""
    return frame.file.endswith(("ranks/worker.py", "<string>")) or "multiprocessing" in frame.file


def deaths(files: RankFiles, exit_codes: Sequence[int | None]) -> str:
    """Name the ranks that have ended, how each ended, and its last lines.

    exit_codes: by rank, -n for signal n, None for running ranks.
    """
    lines = []
    for rank, code in enumerate(exit_codes):
        if code is None:
            continue
        killed = code < 0
        how = f"was killed by {signal.Signals(-code).name}" if killed else f"ended with code {code}"
        lines.append(f"Rank {rank} {how}.")
        log = files.new(rank, "log").strip().splitlines()[-5:]
        lines += [f"    {line}" for line in log]
    return "\n".join(lines) or "A rank closed its connection."


if sys.platform == "win32":
    raise ImportError("utils.ranks needs Linux or macOS (on Windows: use WSL 2)")
