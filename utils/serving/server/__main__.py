"""Serves a model repository until Ctrl-C: Triton, and the gateway in front of it.

    python -m utils.serving.server --repo triton_model_repo

The gateway owns the HTTP and gRPC ports. Triton itself listens on sockets that only this user can
open. A gateway that is killed is started again; if the server exits by itself, so does the command:
in production a supervisor should restart it.

It prints its progress and then what to try with curl. Exit status: 0: it was told to stop and every
request in flight completed; 1: the server did not start or exited by itself; 2: wrong arguments.
"""

import argparse
import os
import signal
import sys
import time

import psutil

from utils.cli import path, port
from utils.paths import ROOT
from utils.serving.gateway import Gateway
from utils.serving.gateway.process import HOST, add_options
from utils.serving.server import ServerError, TritonServer
from utils.serving.server.triton_server import taken

REPOSITORY = ROOT / "triton_model_repo"
LOOK = 0.2  # seconds between two checks that the server is alive


def main(arguments: list[str] | None = None) -> int:
    """Serves; returns the exit status."""
    options = parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's & starts us with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    server = None
    try:
        with triton(options) as server, gateway(options, server) as front:
            print(to_try(server, front, bool(options.tls_cert)), flush=True)
            while server.alive():
                # it also exits when the server is gone, which `alive` sees a moment later
                if not front.alive() and psutil.pid_exists(server.pid):
                    print("the gateway has died: starting it again", file=sys.stderr)
                    front.start()
                time.sleep(LOOK)
            print(f"tritonserver exited by itself. Its log:\n{server.tail()}", file=sys.stderr)
            return 1
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        status = server.returncode if server else 0
        print("stopped" if status == 0 else "stopped: requests in flight were cut short")
        return 0 if status == 0 else 1


def triton(options: argparse.Namespace) -> TritonServer:
    """The server, reachable only through the gateway."""
    for name, host in (("http", options.host), ("grpc", options.host), ("metrics", HOST)):
        if (port := getattr(options, name)) and taken(host, port):
            raise ServerError(
                f"port {port} is taken: use another --{name} (make serve {name.upper()}=…)"
            )
    return TritonServer(
        options.repo, options.models, options.log, options.start_seconds, options.exit_seconds,
        metrics=options.metrics, private=True,
    )


def gateway(options: argparse.Namespace, server: TritonServer) -> Gateway:
    """The gateway that clients talk to; its keys are in the environment."""
    return Gateway(
        server, host=options.host, port=options.http, grpc_port=options.grpc,
        exit_seconds=options.exit_seconds,
        control_key=os.environ.get("KINTSUGI_CONTROL_KEY"),
        api_key=os.environ.get("KINTSUGI_API_KEY"),
        body_bytes=options.body_bytes, requests=options.requests, seconds=options.seconds,
        load_seconds=options.load_seconds, tls_cert=options.tls_cert, tls_key=options.tls_key,
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; options have the names of TritonServer's and Gateway's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.serving.server",
        description="Serve a Triton model repository on this machine until Ctrl-C.",
        epilog="Keys are read from the environment: KINTSUGI_CONTROL_KEY is required to load and "
        "unload models (unset: a random one, printed at the start); KINTSUGI_API_KEY for all other "
        "requests except probes and /metrics (unset: no key).",
    )
    add = parser.add_argument
    add("--repo", type=path, default=REPOSITORY, metavar="FOLDER", help="triton_model_repo")
    add("--models", nargs="+", metavar="NAME", help="models to load; default: all")
    for name, usual in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        add(f"--{name}", type=port, default=usual, metavar="PORT", help=f"{usual}; 0: a free port")
    reach = f"address of HTTP and gRPC ({HOST}: this machine only); 0.0.0.0: all addresses"
    add("--host", default=HOST, metavar="ADDRESS", help=reach)
    kept = "log of server and gateway, appended to; default: a temporary file, deleted at the end"
    add("--log", metavar="FILE", help=kept)
    ready, finish = "time limit to be ready (300)", "time limit for requests in flight (15)"
    add("--start-seconds", type=float, default=300.0, metavar="S", help=ready)
    add("--exit-seconds", type=float, default=15.0, metavar="S", help=finish)
    front = parser.add_argument_group("the gateway")
    add_options(front)
    return parser.parse_args(arguments)


def to_try(server: TritonServer, front: Gateway, tls: bool) -> str:
    """Lines for a second terminal."""
    http = f"{'https' if tls else 'http'}://{front.http}"
    curl = "curl -sN"
    if tls:
        curl += " -k"
    if os.environ.get("KINTSUGI_API_KEY"):
        curl += ' -H "Authorization: Bearer $KINTSUGI_API_KEY"'
    lines = [f"HTTP {front.http}, gRPC {front.grpc}, Triton's metrics {server.metrics}. Try:"]
    if "gpt" in server.models:
        for endpoint, stream in (("generate", ""), ("generate_stream", ', "stream": true')):
            body = f'{{"text_input": "def ", "max_tokens": 20{stream}}}'
            lines.append(f"  {curl} {http}/v2/models/gpt/{endpoint} -d '{body}'")
        lines.append(f'  OpenAI\'s clients: base_url="{http}/v1", model="gpt"')
    else:
        lines.append(f"  {curl} {http}/v2/models/{server.models[0]}/config")
    lines.append(f"  {curl} {http}/metrics")
    if not os.environ.get("KINTSUGI_CONTROL_KEY"):
        lines.append(f"The key to load and unload models is {front.control_key}")
    if front.host not in (HOST, "localhost") and not os.environ.get("KINTSUGI_API_KEY"):
        lines.append(f"Anyone who reaches {front.host} is served: set KINTSUGI_API_KEY for a key.")
    lines += [f"{name} is left out: {reason}" for name, reason in server.left_out.items()]
    return "\n".join([*lines, f"The log is {server.log}. Ctrl-C stops the server."])


if __name__ == "__main__":
    sys.exit(main())
