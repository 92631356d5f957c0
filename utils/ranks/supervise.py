"""Runs a command that cannot outlive whoever started it.

    python -m utils.ranks.supervise COMMAND ...

The command gets a session of its own. When this process's standard input closes (its parent has
closed the pipe, or has died in whatever way), the command gets SIGTERM, GRACE seconds to end, and
then it and all that it started get SIGKILL. The exit status is the command's.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

import psutil

GRACE = 8.0  # seconds from SIGTERM to SIGKILL


def run(command):
    """Runs `command` (a list of words) until it ends or standard input closes."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: os.close(0))  # as if the parent had closed the pipe
    while child.poll() is None:
        if parent_has_gone():
            end(child)
        time.sleep(0.02)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def parent_has_gone():
    """Whether standard input has reached its end."""
    try:
        ready, _, _ = select.select([0], [], [], 0.05)
        return bool(ready) and not os.read(0, 1024)
    except (OSError, ValueError):
        return True


def end(child):
    """SIGTERM, time to end, then SIGKILL for the whole family."""
    family = descendants(child.pid)
    child.terminate()
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        family += descendants(child.pid)
        child.kill()
        child.wait()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil compares start times: never a stranger with a reused pid


def descendants(pid):
    """Children, grandchildren … of a process."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
