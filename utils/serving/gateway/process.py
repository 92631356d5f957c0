"""Starts the gateway in front of a server, as a context manager.

    with TritonServer(repo) as server, Gateway(server, port=8000) as gateway:
        gateway.http, gateway.grpc      # "127.0.0.1:8000", …
        gateway.alive();  gateway.start()   # after it was killed: on the same port

The process (`__main__.py`) ends with the process that started it.
"""

import argparse
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any, Protocol

from utils.ranks.supervise import Child, ChildEnded, end
from utils.serving.install import ServerError

HOST = "127.0.0.1"
START = 30.0  # seconds until it listens
KILL = 5.0  # seconds after exit_seconds until it is killed


def add_options(parser: argparse._ActionsContainer) -> None:
    """The limits of a gateway, for a command line."""
    add = parser.add_argument
    add("--body-bytes", type=int, default=1 << 20, metavar="N", help="limit per request (1 MiB)")
    add("--requests", type=int, default=256, metavar="N", help="most in flight (256)")
    add("--seconds", type=float, default=600.0, metavar="S", help="time limit per request (600)")
    add("--load-seconds", type=float, default=300.0, metavar="S", help="time limit per load (300)")
    add("--tls-cert", metavar="FILE", help="certificate; serves HTTPS instead of HTTP")
    add("--tls-key", metavar="FILE", help="its key, if the certificate's file has none")


class Served(Protocol):
    """The attributes of a TritonServer that a gateway needs."""

    http: str
    grpc: str
    metrics: str
    pid: int
    repo: Path
    log: Path
    control_key: str | None


class Gateway:
    """The gateway of a running server, on `host` and `port` (0: a free one).

    control_key   required from clients to load and unload models; None: a random one
    api_key       required for everything else; None: no key
    options       further options of the command, by name: body_bytes, requests, seconds, …
    Raises ServerError if it does not start.
    """

    def __init__(
        self,
        server: Served,
        *,
        host: str = HOST,
        port: int = 0,
        grpc_port: int = 0,
        exit_seconds: float = 15.0,
        control_key: str | None = None,
        api_key: str | None = None,
        **options: Any,
    ):
        self.server, self.host, self.exit_seconds = server, host, exit_seconds
        self.port, self.grpc_port = port, grpc_port
        self.control_key = control_key or secrets.token_urlsafe(16)
        self._options = {"exit_seconds": exit_seconds, **options}
        keys = {
            "KINTSUGI_TRITON_KEY": server.control_key,
            "KINTSUGI_CONTROL_KEY": self.control_key,
            "KINTSUGI_API_KEY": api_key,
        }
        self._environment = os.environ | {name: key or "" for name, key in keys.items()}
        self._child = None
        self.start()

    def start(self) -> None:
        """Start it, for the first time or again."""
        self.close()
        words = [sys.executable, "-m", "utils.serving.gateway"]
        options = {
            "triton": self.server.http, "triton_grpc": self.server.grpc,
            "metrics": self.server.metrics, "pid": self.server.pid,
            "repository": self.server.repo, "log": self.server.log, "host": self.host,
            "port": self.port, "grpc_port": self.grpc_port, **self._options,
        }
        words += [
            f"--{name.replace('_', '-')}={value}"
            for name, value in options.items()
            if value is not None
        ]
        self._child = Child(words, env=self._environment)
        try:
            ports = json.loads(self._child.answer(START))
            self.port, self.grpc_port = ports["port"], ports["grpc_port"]
        except (ChildEnded, TimeoutError):
            self._child.wait(1.0)
            why = self._child.last_words() or f"it was not listening after {START:g} s"
            self.close()
            raise ServerError(f"the gateway did not start: {why}") from None
        except BaseException:  # also Ctrl-C
            self.close()
            raise

    @property
    def http(self) -> str:
        """ "host:port" for clients on this machine."""
        return f"{HOST if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def grpc(self) -> str:
        """ "host:port" for gRPC clients on this machine."""
        return f"{HOST if self.host == '0.0.0.0' else self.host}:{self.grpc_port}"

    @property
    def pid(self) -> int:
        return self._child.pid

    def alive(self) -> bool:
        """Whether its process is running."""
        return self._child is not None and self._child.returncode is None

    def close(self) -> None:
        """End it; requests in flight have `exit_seconds`. Closing twice does nothing."""
        if self._child is not None:
            drain = self._options.get("drain_seconds", 0.0)
            end([self._child], drain + self.exit_seconds + KILL)
            self._child = None

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
