"""Shared by all tests of this room: waiting for a condition, inspecting processes."""

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
    """Wait until `condition()` is true, and return its value."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"still not true after {seconds:g} s"
        time.sleep(0.02)
    return found


def parent(pid):
    """The id of a process's parent. Raises OSError if the process is gone."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid=None):
    """Process ids of the living children of a process (None: of this one)."""
    pid, found = pid or os.getpid(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if parent(folder.name) == pid and alive(folder.name):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def family(pid):
    """The supervisor that started the server `pid`, and all its descendants."""
    supervisor = psutil.Process(pid).parent()
    return [supervisor, *supervisor.children(recursive=True)]


def wait_gone(processes):
    """Wait until all of them have ended."""
    until(lambda: not [p for p in processes if is_there(p)])


def is_there(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_thread(function):
    """Call a function in a thread; the returned join() gives its result or raises its exception."""
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
    """The ports of the clients that are connected to the HTTP port."""
    port = int(server.http.rpartition(":")[2])
    found = psutil.Process(server.pid).net_connections("tcp")
    here = [c for c in found if c.status == psutil.CONN_ESTABLISHED and c.laddr.port == port]
    return {c.raddr.port for c in here}


class started(subprocess.Popen):
    """A program in its own session, with its output as text; killed at the end."""

    def __init__(self, *command):
        super().__init__(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            cwd=ROOT, start_new_session=True,
        )

    def __exit__(self, *exception):
        self.kill()
        super().__exit__(*exception)
