"""Closes the connections of idle clients while a Triton server drains.

Triton waits until every HTTP connection is closed, also those of clients that keep one open and ask
nothing. So while the server ends, its supervisor calls `look` again and again
(utils/ranks/supervise.py). Where the kernel does not allow what is done here, idle clients hold the
server until its own time limit.

The supervisor runs without packages: the standard library alone is used.
"""

import ctypes
import os
import re
import select
import socket
import struct
from contextlib import suppress

IDLE = 3.0  # seconds without a word: more than a stream's pause between two tokens
PIDFD_GETFD = 438  # number of the system call, the same on all machines
# of struct tcp_info: the state, and the milliseconds since data were sent and received
TCP_INFO, ESTABLISHED = struct.Struct("B43xI4xI"), 1

libc = ctypes.CDLL(None, use_errno=True)


def look(server: int, port: str) -> None:
    """Closes the connections at `port` of the process `server` over which nothing is under way.

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
                if is_idle(connection, int(port)):
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
