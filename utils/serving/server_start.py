"""What the start of a server needs: free ports, a word on how far it is, and on why it failed."""

import re
import secrets
import shutil
import socket
import sys
import time
from contextlib import suppress

import psutil

from utils.serving.install import ServerError
from utils.serving.server_log import end_of, reasons, tail

HOST = "127.0.0.1"
PORTS = range(20000, 32000)  # below those that the kernel hands out to outgoing connections


def choose_ports(wanted, host) -> list[int]:
    """The ports for HTTP, gRPC and metrics; 0 becomes a free one."""
    chosen = []
    for port, option in zip(wanted, ("http", "grpc", "metrics")):
        if port and taken(host, port):
            raise ServerError(f"port {port} is taken: give {option} another one, or 0 for any")
        while not port or port in chosen:
            candidate = PORTS[secrets.randbelow(len(PORTS))]
            port = 0 if taken(host, candidate) or candidate in wanted else candidate
        chosen.append(port)
    return chosen


def taken(host: str, port: int) -> bool:
    """Whether somebody listens on this port."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not that of old ones
        try:
            listener.bind((host, port))
        except OSError:
            return True
    return False


class Progress:
    """What is said while a server starts: in a terminal one line that changes, else one that does
    not depend on the machine, in one piece: a stored notebook is compared with it."""

    def __init__(self, server, quiet):
        self.server, self.quiet, self.terminal = server, quiet, sys.stdout.isatty()
        self.begin = time.monotonic()

    def look(self):
        if self.quiet or not self.terminal:
            return
        loaded = set(re.findall(r"successfully loaded '([^']+)'", end_of(self.server.log)))
        missing = [model for model in self.server.models if model not in loaded]
        self._show(f"tritonserver: {time.monotonic() - self.begin:.0f} s, {', '.join(missing)} …")

    def end(self, how):
        """The last word: "ready" or "failed"."""
        if self.quiet:
            return
        text = f"tritonserver starts: {', '.join(self.server.models)} … {how}"
        if self.terminal:
            self._show("")
            print("\r", end="")
        print(text, flush=True)

    def _show(self, text):
        columns = shutil.get_terminal_size().columns - 1
        print("\r" + text[:columns].ljust(columns), end="", flush=True)


def failure(log, what, temporary) -> str:
    """The message about a server that did not start: reasons, then the end of its log."""
    head = "".join(f"{reason}\n" for reason in reasons(end_of(log)))
    where = "name a log file to keep all of it" if temporary else log
    return f"{head}tritonserver {what}. The end of its log ({where}):\n{tail(log, 12)}"


def listens(pid: int, address: str) -> bool:
    """Whether the process `pid` listens at the port of an address, "host:port"."""
    with suppress(psutil.Error):
        port = int(address.rpartition(":")[2])
        connections = psutil.Process(pid).net_connections("tcp")
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
    return False
