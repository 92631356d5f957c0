"""The gateway's process, started by `utils/serving/gateway/process.py`.

    python -m utils.serving.gateway --triton 127.0.0.1:21034 --pid 4711 --port 8000

Once it listens it prints {"port": 8000, "grpc_port": 8001}. It ends when its standard input does:
for --drain-seconds it reports that it is not ready but still serves; then it accepts no more
requests, and those in flight have --exit-seconds to finish. Its keys are in the environment:
KINTSUGI_TRITON_KEY (for Triton's model control), KINTSUGI_CONTROL_KEY, KINTSUGI_API_KEY.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from utils.cli import port
from utils.serving.gateway import grpc_door
from utils.serving.gateway.app import Front, Options
from utils.serving.gateway.checks import is_loopback
from utils.serving.gateway.process import add_options
from utils.serving.gateway.stubs import Stubs
from utils.serving.gateway.triton import Triton

KEPT = 75  # seconds that an idle connection is kept
HEAD_SECONDS = 15.0  # within which the head of a request must arrive


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    logging.basicConfig(
        filename=options.log, level=logging.WARNING, format="%(asctime)s gateway: %(message)s"
    )
    try:
        asyncio.run(serve(options))
    except OSError as error:  # the port, a TLS file, the server
        print(f"the gateway cannot serve: {error}", file=sys.stderr)
        return 1
    return 0


async def serve(given: argparse.Namespace) -> None:
    """Serve until standard input or the server ends. Raises OSError."""
    options = Options(
        body_bytes=given.body_bytes, requests=given.requests, seconds=given.seconds,
        repository=given.repository, control_key=os.environ.get("KINTSUGI_CONTROL_KEY") or None,
        api_key=os.environ.get("KINTSUGI_API_KEY") or None, local=is_loopback(given.host),
    )
    async with Triton(given.triton, given.metrics, os.environ.get("KINTSUGI_TRITON_KEY")) as triton:
        stubs = Stubs(triton, given.pid, given.load_seconds)
        front = Front(triton, stubs, options)
        config = uvicorn.Config(
            front.application(), lifespan="off", ws="none", http=Protocol, access_log=False,
            log_config=None, server_header=False, proxy_headers=False,
            timeout_keep_alive=KEPT, timeout_graceful_shutdown=given.exit_seconds,
            ssl_certfile=given.tls_cert, ssl_keyfile=given.tls_key,
        )
        config.load()
        family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
        # with the protocol's number: asyncio sets TCP_NODELAY only on sockets that name TCP
        with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind((given.host, given.port))
            await stubs.begin()  # may take minutes, so the port and certificate are checked first
            own.listen(1024)
            ports = {"port": own.getsockname()[1]}
            rpc = None
            if given.triton_grpc:
                host = f"[{given.host}]" if ":" in given.host else given.host
                rpc, ports["grpc_port"] = await grpc_door.opened(
                    front, given.triton_grpc, f"{host}:{given.grpc_port}", given.tls_cert,
                    given.tls_key,
                )
            server = Server(config)
            serving = asyncio.create_task(server.serve([own]))
            print(json.dumps(ports), flush=True)
            ends = [asyncio.create_task(stubs.run()), asyncio.create_task(until_told())]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            stubs.leaving = True
            await asyncio.wait(ends[:1], timeout=given.drain_seconds)
            ends[0].cancel()
            server.should_exit = True
            await asyncio.gather(serving, *([rpc.stop(given.exit_seconds)] if rpc else []))
        if not ends[1].done():
            raise ChildProcessError("the server has exited")


class Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection if a request's head takes longer than HEAD_SECONDS."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait(KEPT + HEAD_SECONDS)

    def _wait(self, seconds):
        last = self.cycle

        def end() -> None:
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.close()

        self.loop.call_later(seconds, end)


class Server(uvicorn.Server):
    """A uvicorn server that leaves signals to `until_told`."""

    def capture_signals(self) -> AbstractContextManager:
        return nullcontext()


async def until_told() -> None:
    """Wait for the end of standard input, SIGTERM or SIGINT."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), told.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    await told.wait()
    loop.remove_reader(sys.stdin.fileno())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m utils.serving.gateway", description=__doc__)
    add = parser.add_argument
    add("--triton", required=True, metavar="HOST:PORT", help="Triton's HTTP, or unix:FILE")
    add("--triton-grpc", metavar="HOST:PORT", help="Triton's gRPC, or unix:FILE; default: none")
    add("--metrics", metavar="HOST:PORT", help="Triton's metrics")
    add("--pid", type=int, metavar="N", help="the server's process, to watch its models")
    add("--repository", type=Path, metavar="FOLDER", help="the served folder, for chat templates")
    add("--log", metavar="FILE", help="log file; default: standard error")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (127.0.0.1)")
    add("--port", type=port, default=8000, help="8000; 0: a free port")
    add("--grpc-port", type=port, default=8001, help="8001; 0: a free port")
    finish = "time limit for requests in flight at the end (15)"
    add("--exit-seconds", type=float, default=15.0, metavar="S", help=finish)
    drain = "before that, time in which it is not ready but still serves (0)"
    add("--drain-seconds", type=float, default=0.0, metavar="S", help=drain)
    add_options(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
