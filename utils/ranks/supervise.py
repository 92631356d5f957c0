"""Starts child processes and ends them, so that none outlives its parent.

    child = Child(["python", "worker.py"])      # a program that ends when its standard input does
    child.write_line(b"a line")                 # ChildEnded
    child.answer(20.0)                          # the next line; ChildEnded, TimeoutError
    child.last_words()                          # the last line of its standard error
    end([child], 0.3)                           # its input ends; 0.3 s later it is killed

    child = Child(supervised(["torchrun", …]))  # any program, in the same way

A program that does not watch its standard input runs under a *supervisor*: this file, as a small
process between the parent and the program. It waits for the first of these:

- its standard input ends, its parent is gone for whatever reason, or it receives SIGTERM, SIGINT or
  SIGHUP: the program gets SIGTERM, GRACE seconds to end, and then SIGKILL (SIGKILL at once if
  `AT_ONCE` was read);
- the program ends, on its own or killed.

Then every process it left behind is killed, unless `daemons` may stay. On Linux its orphans become
children of the supervisor, which is their *subreaper*, even those with a session of their own; on
other systems its earlier descendants are killed. If the supervisor itself is killed, Linux sends
SIGTERM to the program (PDEATHSIG). The exit status is the program's, 128 + n for signal n.

This file uses only the standard library and nothing else of `utils`: the supervisor runs as
`python -I -S`, starts in 30 ms and needs 10 MB, and every exported version ships this file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

GRACE = 8.0  # seconds from SIGTERM to SIGKILL
OVER = 2 * GRACE  # seconds within which such a supervisor has ended, even on a busy machine
AT_ONCE = b"kill"  # written by a parent that will not wait, before it closes the pipe
LOOK = 0.05  # seconds between two checks for ended processes
ORPHANS = 0.5  # seconds that orphans have to notice by themselves that their program is gone
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # Linux, prctl(2)
HAS_PRCTL = sys.platform == "linux"

# ---- in the parent


class ChildEnded(RuntimeError):
    """The child's pipe has closed: the child is dead or about to die."""


class Endable(Protocol):
    """A child that `end` can end: it reads from a pipe and ends on its own when that closes."""

    def close_input(self) -> None: ...
    def wait(self, seconds: float | None = None) -> bool: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


def end(children: Iterable[Endable], seconds: float) -> None:
    """Close the inputs of all children, and after `seconds` kill those still running."""
    children = list(children)
    for child in children:
        child.close_input()
    until = time.monotonic() + seconds
    for child in children:
        if not child.wait(max(0.0, until - time.monotonic())):
            child.kill()  # SIGKILL also ends a stopped process
            child.wait()
        child.close()


class Pipes:
    """Lines to and from a process, over two pipes.

    errors  a file with its standard error
    """

    def __init__(self, to: IO | None, of: IO | None, errors: IO | None) -> None:
        self._to, self._of, self._errors = to, of, errors
        self._unread = b""

    def write_line(self, line: bytes) -> None:
        """Write a line to its standard input; ChildEnded if the pipe is closed."""
        try:
            self._to.write(line + b"\n")
            self._to.flush()
        except (BrokenPipeError, ConnectionResetError):
            raise ChildEnded from None

    def fileno(self) -> int:
        """Its standard output, for `select.poll`: when that is ready, call `read_line`."""
        return self._of.fileno()

    def read_line(self) -> bytes | None:
        """Read what has arrived: a line, or None if it is not complete yet; ChildEnded."""
        if b"\n" not in self._unread:
            data = os.read(self.fileno(), 1 << 20)
            if not data:
                raise ChildEnded
            self._unread += data
        if b"\n" not in self._unread:
            return None
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def answer(self, seconds: float) -> bytes:
        """The next line of its standard output; ChildEnded, or TimeoutError after `seconds`."""
        until, line = time.monotonic() + seconds, None
        poll = select.poll()
        poll.register(self, select.POLLIN)
        while line is None:
            if b"\n" not in self._unread and not poll.poll(1000 * max(0, until - time.monotonic())):
                raise TimeoutError
            line = self.read_line()
        return line

    def lines(self) -> Iterator[str]:
        """Its output, line by line, until no process holds the pipe any longer."""
        with io.TextIOWrapper(self._of, errors="replace") as text:
            for line in text:
                yield line.rstrip("\n")

    def last_words(self) -> str:
        """The last line it wrote to standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")

    def close_input(self, last: bytes = b"") -> None:
        """Close its standard input, after writing `last`."""
        with contextlib.suppress(OSError, ValueError):
            self._to.write(last)
        with contextlib.suppress(OSError):
            self._to.close()

    def close(self) -> None:
        """Close the files that are still open here."""
        self.close_input()
        for file in (self._of, self._errors):
            if file is not None:
                file.close()


class Child(Pipes):
    """A process in a session of its own, so that Ctrl-C in a terminal or notebook reaches only us.

    output  "apart": read standard output with `answer`, standard error with `last_words`;
            "together": read both with `lines`; or a file that receives both
    env     its environment; None: ours
    fds     file descriptors that it inherits
    """

    def __init__(
        self,
        command: list[str],
        *,
        output: str | IO = "apart",
        env: dict[str, str] | None = None,
        fds: tuple[int, ...] = (),
    ) -> None:
        errors = tempfile.TemporaryFile() if output == "apart" else None  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if isinstance(output, str) else output,
            stderr=subprocess.STDOUT if errors is None else errors,
            env=env,
            pass_fds=fds,
            start_new_session=True,
        )
        super().__init__(self._process.stdin, self._process.stdout, errors)
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, -n for signal n; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait up to `seconds` (None: no limit); return whether it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
            return True
        return False

    def kill(self) -> None:
        """Send SIGKILL to its process group; do nothing if it has ended."""
        if self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


def supervised(
    command: list[str],
    *,
    grace: float = GRACE,
    folder: str | Path | None = None,
    pid_to: int | None = None,
    daemons: bool = False,
) -> list[str]:
    """The words that run a command under a supervisor.

    grace    seconds from SIGTERM to SIGKILL
    folder   a temporary folder, which the supervisor removes if the parent has died
    pid_to   a file descriptor of the child (`fds`) to which the program's pid is written
    daemons  processes that the program leaves running when it ends on its own may stay
    """
    words = [sys.executable, "-I", "-S", os.path.abspath(__file__), f"--grace={grace}"]
    words += [] if folder is None else [f"--folder={folder}"]
    words += [] if pid_to is None else [f"--pid-to={pid_to}"]
    words += ["--daemons"] if daemons else []
    return [*words, "--", *command]


# ---- in the child


def end_with(parent: int) -> None:
    """Kill this process once process `parent` is gone, whatever this process is doing then.

    On Linux it ends with the very thread of the parent that started it.
    """
    if HAS_PRCTL:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# ---- in the supervisor


def main(words: list[str]) -> int:
    """Run a command until it ends or must end; return its exit status."""
    parser = argparse.ArgumentParser(prog="supervise.py", description="Runs COMMAND; see the file.")
    parser.add_argument("--grace", type=float, default=GRACE)
    parser.add_argument("--folder")
    parser.add_argument("--pid-to", type=int)
    parser.add_argument("--daemons", action="store_true")
    options = parser.parse_args(words[: words.index("--")])
    command = words[words.index("--") + 1 :]

    parent, stop = os.getppid(), []  # stop: signals that asked this process to end
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stop.append(number))
    if HAS_PRCTL:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_begin)
    program = process.pid  # it is reaped below, with its orphans
    if options.pid_to is not None:
        with open(options.pid_to, "wb") as pipe:
            pipe.write(b"%d\n" % program)

    status, said, before = None, None, []
    while status is None and not stop and said is None and os.getppid() == parent:
        said = _read_input()
        status = _reap(program)
    by_itself = status is not None
    if not by_itself:
        before = [] if HAS_PRCTL else _descendants(program)
        os.kill(program, signal.SIGTERM)
        until = time.monotonic() + (0 if said == AT_ONCE else options.grace)
        while status is None:
            time.sleep(LOOK)
            status = _reap(program)
            if status is None and time.monotonic() > until:
                before += [] if HAS_PRCTL else _descendants(program)
                os.kill(program, signal.SIGKILL)
    if not (by_itself and options.daemons):
        _end_orphans(before)
    if options.folder and os.getppid() != parent:
        shutil.rmtree(options.folder, ignore_errors=True)  # no other process is left to do it
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _begin() -> None:
    """Run in the program before it begins: SIGTERM if the supervisor dies; Ctrl-C as usual."""
    if HAS_PRCTL:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _read_input() -> bytes | None:
    """Wait a moment; return the data from standard input: b"" at its end, None for nothing yet."""
    ready, _, _ = select.select([0], [], [], LOOK)
    return os.read(0, 1024) if ready else None


def _reap(program: int) -> int | None:
    """Reap every child that has ended; return the program's status if it has."""
    status = None
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == program else status
    return status


def _end_orphans(before: list[int]) -> None:
    """Wait a moment for orphans to end, then kill them and their children until none is left."""
    patience = time.monotonic() + ORPHANS
    while HAS_PRCTL and (left := [pid for pid, up in _parents().items() if up == os.getpid()]):
        for pid in left:
            if time.monotonic() > patience:
                os.kill(pid, signal.SIGKILL)  # a child keeps its pid until it is reaped
        _reap(0)
        time.sleep(0.005)
    for pid in before:  # on systems where orphans do not become our children
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Children, grandchildren … of a process."""
    parents, found = _parents(), [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _parents() -> dict[int, int]:
    """{pid: its parent's} of all processes."""
    if not os.path.isdir("/proc/self"):  # macOS
        text = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True)
        rows = [line.split() for line in text.stdout.splitlines()]
        return {int(pid): int(parent) for pid, parent in rows}
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):  # it is gone meanwhile
            stat = Path(f"/proc/{entry}/stat").read_bytes()
            found[int(entry)] = int(stat.rpartition(b")")[2].split()[1])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
