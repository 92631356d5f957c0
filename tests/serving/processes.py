"""Waiting for a condition, and a look at processes: what all tests of this room share."""

import os
import subprocess
import threading
import time
from pathlib import Path

import psutil

from tests.patience import patience
from utils.paths import ROOT

PATIENCE = patience(120)


def until(condition, seconds=PATIENCE):
    """Waits until `condition()` is true, and returns what it gave."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"after {seconds:g} s it is still not so"
        time.sleep(0.02)
    return found


def parent(pid):
    """The parent's id of a process. Raises OSError where it has gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid):
    """Whether a process is there and is more than a dead child that nobody has asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid=None):
    """Process ids of the children of a process (None: of this one) that run."""
    pid, found = pid or os.getpid(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if parent(folder.name) == pid and alive(folder.name):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def family(pid):
    """The supervisor that has started the server `pid`, the server, and all of theirs."""
    supervisor = psutil.Process(pid).parent()
    return [supervisor, *supervisor.children(recursive=True)]


def wait_gone(processes):
    """Waits until none of them is left."""
    until(lambda: not [p for p in processes if is_there(p)])


def is_there(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_thread(function):
    """Calls a function in a thread; join() then gives its result or raises its exception."""
    found = []

    def run():
        try:
            found.append((function(), None))
        except Exception as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def join():
        thread.join(PATIENCE)
        result, error = found[0]
        if error:
            raise error
        return result

    return join


def callers(server):
    """The clients of the HTTP port, by their own ports."""
    port = int(server.http.rpartition(":")[2])
    found = psutil.Process(server.pid).net_connections("tcp")
    here = [c for c in found if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port]
    return {c.raddr.port for c in here}


class started(subprocess.Popen):
    """A program with its output as text, in a session of its own; killed at the end."""

    def __init__(self, *command):
        super().__init__(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=ROOT, start_new_session=True,
        )

    def __exit__(self, *exception):
        self.kill()
        super().__exit__(*exception)
