"""What `python -m utils.serving.server` does: serve a model repository until Ctrl-C or SIGTERM.

    python -m utils.serving.server --repo triton_model_repo --http 8000 --grpc 8001 --metrics 8002

It says how far it is and then what to try with curl. Exit status: 0 it was told to end and every
request in flight ended well; 1 the server did not start, or ended by itself; 2 wrong arguments.
"""

import argparse
import signal
import sys
import time

from utils.paths import ROOT
from utils.serving.server import ServerError, TritonServer
from utils.serving.server_start import HOST

REPOSITORY = ROOT / "triton_model_repo"
LOOK = 0.2  # seconds between two looks at whether the server is still there


def main(arguments=None) -> int:
    """Serves; returns the exit status."""
    options = vars(parse(arguments))
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored where a shell's & starts us
        signal.signal(number, signal.default_int_handler)
    server = None
    try:
        with TritonServer(options.pop("repo"), **options) as server:
            print(to_try(server), flush=True)
            while server.alive():
                time.sleep(LOOK)
            print(f"tritonserver has ended by itself. Its log:\n{server.tail()}", file=sys.stderr)
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


def parse(arguments):
    """The command line, named as TritonServer's arguments are."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.serving.server",
        description="Serve a Triton model repository on this machine until Ctrl-C.",
    )
    add = parser.add_argument
    add("--repo", default=REPOSITORY, metavar="FOLDER", help="the repository (triton_model_repo)")
    add("--models", nargs="+", metavar="NAME", help="models to load; default: all")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        add(f"--{name}", type=int, default=port, metavar="PORT", help=f"{port}; 0: a free one")
    add("--host", default=HOST, metavar="ADDRESS", help=f"{HOST}: from this machine only; 0.0.0.0")
    add("--log", metavar="FILE", help="the server's log; default: a temporary file")
    add("--start-seconds", type=float, default=300.0, metavar="S", help="limit to be ready (300)")
    add("--exit-seconds", type=float, default=15.0, metavar="S", help="for requests in flight (15)")
    return parser.parse_args(arguments)


def to_try(server) -> str:
    """Lines for a second terminal."""
    lines = [f"HTTP {server.http}, gRPC {server.grpc}, metrics {server.metrics}. Try:"]
    if "gpt" in server.models:
        for endpoint, stream in (("generate", ""), ("generate_stream", ', "stream": true')):
            body = f'{{"text_input": "def ", "max_tokens": 20{stream}}}'
            lines.append(f"  curl -sN {server.http}/v2/models/gpt/{endpoint} -d '{body}'")
    else:
        lines.append(f"  curl -s {server.http}/v2/models/{server.models[0]}/config")
    lines.append(f"  curl -s {server.metrics}/metrics")
    lines += [f"{name} is left out: {reason}" for name, reason in server.left_out.items()]
    return "\n".join([*lines, f"The log is {server.log}. Ctrl-C ends it."])
