"""Starts a server, and sees to it that nothing stays: keeper.py SECONDS PORT FOLDER COMMAND …

A small process between `TritonServer` and tritonserver. It writes the server's pid to its standard
output, and then waits for the first of these:

- its standard input ends, or its parent has gone in whatever way: the server gets SIGTERM, so that
  requests in flight can end, and after SECONDS it is killed (at once, where `AT_ONCE` was read);
- the server ends, by itself or killed.

Then every process that is left of it is killed, and FOLDER, the server's temporary one, is removed
if the parent has gone. Orphans of the server (stubs, ranks) become children of the keeper, because
it is their *subreaper*. If the keeper itself is killed, the kernel sends SIGTERM to the server
(PDEATHSIG). The exit status is the server's, 128 + n for signal n.

Triton waits until every HTTP connection is closed, also those of clients that keep one open and ask
nothing; so while the server drains, connections to PORT that have been idle for a while are closed
for it. Where the kernel does not allow that, they hold the server until its own time limit.

Runs as `python -I -S` with the standard library alone, so it starts in 30 ms and needs 10 MB.
"""

import ctypes
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
AT_ONCE = b"kill"
LOOK = 0.05  # seconds between two looks at what has ended
IDLE = 3.0  # seconds without a word: more than a stream's pause between two tokens
ORPHANS = 0.5  # seconds that orphans have to see by themselves that their server has gone

PIDFD_GETFD = 438  # number of the system call, the same on all machines
# of struct tcp_info: the state, and the milliseconds since data were sent and received
TCP_INFO, ESTABLISHED = struct.Struct("B43xI4xI"), 1

libc = ctypes.CDLL(None, use_errno=True)


def main(seconds: float, port: int, folder: str, command: list[str]) -> int:
    """Runs `command` until it ends, or until nobody wants it any more."""
    parent, stop = os.getppid(), []  # stop: signals that asked for the end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: stop.append(number))
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=die_with_parent
    ).pid
    print(server, flush=True)
    status, said = None, None
    while status is None and not stop and said is None and os.getppid() == parent:
        said = read_input()
        status = bury(server)
    if status is None:
        os.kill(server, signal.SIGTERM)
        until = time.monotonic() + (0 if said == AT_ONCE else seconds)
        while status is None:
            time.sleep(LOOK)
            close_idle(server, port)
            status = bury(server)
            if status is None and time.monotonic() > until:
                os.kill(server, signal.SIGKILL)
    end_children()
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def die_with_parent() -> None:
    """In the server before it begins: SIGTERM when the keeper dies, and signals as usual."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_input() -> bytes | None:
    """Waits a moment; what standard input says: b"" is its end, None nothing yet."""
    ready, _, _ = select.select([0], [], [], LOOK)
    return os.read(0, 1024) if ready else None


def bury(server: int) -> int | None:
    """Takes every child that has ended off the kernel's list; the server's status if it has."""
    status = None
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == server else status
    except ChildProcessError:
        pass  # there is no child at all
    return status


def close_idle(server: int, port: int) -> None:
    """Closes the server's connections at `port` over which nothing is under way.

    That is: the server waits for a next request there, and nothing went in or out for IDLE seconds.
    """
    try:
        pidfd = os.pidfd_open(server)
    except (OSError, AttributeError):
        return  # it has ended, or the kernel is old
    try:
        for number in read_from(server):
            copy = libc.syscall(PIDFD_GETFD, pidfd, number, 0)
            if copy < 0:
                continue  # closed meanwhile, or not allowed here
            with socket.socket(fileno=copy) as connection, suppress(OSError):
                if is_idle(connection, port):
                    connection.shutdown(socket.SHUT_RDWR)  # of the socket, so of every copy
    finally:
        os.close(pidfd)


def read_from(pid: int) -> list[int]:
    """Sockets (file descriptors) that a process waits to read from, as its epoll objects say.

    While Triton works on a request it does not read from the request's connection.
    """
    found = []
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{number}") == "anon_inode:[eventpoll]":
                with open(f"/proc/{pid}/fdinfo/{number}") as file:
                    watched = re.findall(r"tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)", file.read())
                found += [int(fd) for fd, events in watched if int(events, 16) & select.EPOLLIN]
        links = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in found}
    except OSError:
        return []  # the server has ended, or closed one of its files just now
    return [fd for fd, link in links.items() if link.startswith("socket:")]


def is_idle(connection: socket.socket, port: int) -> bool:
    """Whether this is an open connection at `port` that has been silent for IDLE seconds."""
    if connection.family != socket.AF_INET or connection.getsockname()[1] != port:
        return False
    information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    state, sent, received = TCP_INFO.unpack_from(information)
    return state == ESTABLISHED and min(sent, received) >= 1000 * IDLE


def end_children() -> None:
    """Waits a moment for orphans to end, then kills them, and their orphans, until none is left."""
    patience = time.monotonic() + ORPHANS
    while left := children():
        for pid in left:
            if time.monotonic() > patience:
                os.kill(pid, signal.SIGKILL)  # a child keeps its pid until it is buried
        bury(0)
        time.sleep(0.005)


def children() -> list[int]:
    """Pids of this process' children, also of those that have ended and are not buried."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):
            continue  # it has gone meanwhile
        found += [int(entry)] if parent == os.getpid() else []
    return found


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
