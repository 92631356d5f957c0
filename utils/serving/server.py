"""A Triton Inference Server on this machine, as a context manager or in a terminal.

    with TritonServer("triton_model_repo") as server:      # ready when the block begins
        server.http, server.grpc, server.metrics           # "127.0.0.1:21034", …
        server.load("gpt");  server.unload("gpt");  server.ready("gpt");  server.versions("gpt")
                                                           # at the end requests in flight end first

    python -m utils.serving.server --repo triton_model_repo        # stays until Ctrl-C

The server is a real one, with an address on this machine only (127.0.0.1). It has a process group
of its own, so the Ctrl-C that interrupts a cell does not reach it; `utils/serving/keeper.py` ends
it, its stubs and its ranks with whoever started it. Where its binary is: `server_files.py`.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from utils.serving import keeper
from utils.serving.install import (
    ServerError,
    container_command,
    find_server,
    models_of,
    server_available,
)
from utils.serving.server_log import end_of, load_reason, port_was_taken, tail
from utils.serving.server_start import HOST, Progress, choose_ports, failure, listens
from utils.serving.triton_http import LOST, call, reason_of

__all__ = ["ServerError", "TritonServer", "container_command", "server_available"]

TRIES = 5  # starts with other ports, should somebody take one between our look and the server's
KILL = 5.0  # seconds after the server's own time limit until it is killed
# The model that calls the others. On SIGTERM Triton lets requests by HTTP end first, but stops all
# models at once for those by gRPC: a request that is on its way from one to the next would fail.
FRONT = "gpt"
LOAD = 120.0  # seconds that a model may take to load or to unload


class TritonServer:
    """A tritonserver that serves the folder `repo`; ready when this returns.

    models    names of the models to load; None: all that the folder has
    log       the file that the server writes; None: a temporary one, gone with this object
    start_seconds   time limit until the models are ready
    exit_seconds    how long requests in flight may take at the end
    control   "explicit": models are loaded and unloaded by request; "none": all at start, for good
    host      the address to listen at; "0.0.0.0": all that this machine has
    http, grpc, metrics   port numbers; 0: free ones
    options   further words for tritonserver's command line
    quiet     no word while it starts

    `http`, `grpc` and `metrics` are then "host:port", `pid` the server's, `log` the file.
    Raises ServerError when it cannot start: the model's own reason first, then the log's tail.
    """

    def __init__(
        self, repo, models=None, log=None, start_seconds=120.0, exit_seconds=15.0,
        control="explicit", *, host=HOST, http=0, grpc=0, metrics=0, options=(), quiet=False,
    ):  # fmt: skip
        check_limits(control, models, start_seconds, exit_seconds)
        self.repo, self.control, self.options = Path(repo).resolve(), control, list(options)
        self.host = host
        self.start_seconds, self.exit_seconds = start_seconds, max(1, round(exit_seconds))
        installation = find_server()
        self.models, self.left_out = models_of(self.repo, models, installation.backends())
        self._folder = Path(tempfile.mkdtemp(prefix="triton-"))
        self._held = {"owner": os.getpid(), "folder": self._folder, "process": None}
        self._finalizer = weakref.finalize(self, finish, self._held, self.exit_seconds)
        self.log = Path(log).resolve() if log else self._folder / "server.log"
        self.pid, progress = None, Progress(self, quiet)
        try:
            backends = installation.assemble(self._folder)
            self._start(installation, backends, (http, grpc, metrics), progress)
        except BaseException:  # also Ctrl-C: nothing stays behind
            progress.end("failed")
            finish(self._held, self.exit_seconds, keep_folder=True, at_once=True)
            raise

    # --- what is called -------------------------------------------------------------------------

    def ready(self, model=None) -> bool:
        """Whether the server, or one of its models, says that it is ready. Never raises."""
        path = f"/v2/models/{model}/ready" if model else "/v2/health/ready"
        with suppress(*LOST):
            return call(self.http, "GET", path, timeout=5.0)[0] == 200
        return False

    def load(self, model: str, config: dict | None = None) -> None:
        """Loads a model, or what is new of it. config: instead of its config.pbtxt, until it is
        unloaded.

        Raises ServerError with the model's own reason; versions that were served still are.
        """
        body = {"parameters": {"config": json.dumps(config)}} if config is not None else {}
        try:
            self._ask(f"/v2/repository/models/{model}/load", body)
        except ServerError as error:
            raise ServerError(load_reason(model, str(error))) from None

    def unload(self, model: str, dependents=False, seconds=LOAD) -> None:
        """Unloads a model and returns when its requests have ended and it has gone."""
        until = time.monotonic() + seconds
        body = {"parameters": {"unload_dependents": bool(dependents)}}
        self._ask(f"/v2/repository/models/{model}/unload", body, seconds)
        while self.states(model, "READY", "UNLOADING"):
            if time.monotonic() > until:
                raise ServerError(f"{model} still has requests in flight after {seconds:g} s")
            time.sleep(0.02)

    def versions(self, model: str) -> list[int]:
        """The versions of a model that are served."""
        return sorted(self.states(model, "READY"))

    def states(self, model: str, *which: str) -> dict[int, str]:
        """{version: state} of a model, of all states or of some: "READY", "LOADING", …"""
        entries = json.loads(self._ask("/v2/repository/index", {}))
        mine = [entry for entry in entries if entry["name"] == model and entry.get("version")]
        states = {int(entry["version"]): entry.get("state", "") for entry in mine}
        return {v: state for v, state in states.items() if not which or state in which}

    def config(self, model: str) -> dict:
        """The configuration that a model is served with, defaults filled in."""
        return json.loads(self._ask(f"/v2/models/{model}/config"))

    def alive(self) -> bool:
        """Whether the server's process is there."""
        process = self._held["process"]
        return process is not None and process.poll() is None

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        return tail(self.log, lines)

    def close(self) -> int | None:
        """Ends the server and all its processes; requests in flight have `exit_seconds` to end.

        Returns its exit status: 0 when nothing had to be cut short. Closing twice does nothing.
        """
        if FRONT in self.models and self.control == "explicit" and self.alive():
            with suppress(ServerError):
                self.unload(FRONT, seconds=self.exit_seconds)
        finish(self._held, self.exit_seconds, keep_folder=True)
        return self.returncode

    @property
    def returncode(self) -> int | None:
        """The server's exit status, 128 + n for signal n; None while it runs."""
        process = self._held["process"]
        return None if process is None else process.poll()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        state = f"at {self.http}, pid {self.pid}" if self.alive() else "stopped"
        return f"TritonServer({str(self.repo)!r}) {state}"

    # --- starting -------------------------------------------------------------------------------

    def _start(self, installation, backends, wanted, progress):
        for last in [False] * (TRIES - 1) + [True]:
            ports = choose_ports(wanted, self.host)
            address = HOST if self.host == "0.0.0.0" else self.host
            self.http, self.grpc, self.metrics = (f"{address}:{port}" for port in ports)
            name = f"kintsugi-{secrets.token_hex(6)}"
            command = self._command(installation, backends, name, ports)
            self._spawn(command, installation.environment())
            if self._wait(name, progress):
                progress.end("ready")
                return
            if last or all(wanted) or not port_was_taken(end_of(self.log)):
                what = "has no port" if self.alive() else f"ended with status {self.returncode}"
                raise ServerError(failure(self.log, what, self.log.parent == self._folder))
            finish(self._held, self.exit_seconds, keep_folder=True, at_once=True)

    def _command(self, installation, backends, name, ports):
        http_port, grpc_port, metrics_port = ports
        words = [
            str(installation.binary), f"--id={name}", f"--model-repository={self.repo}",
            f"--http-address={self.host}", f"--http-port={http_port}",
            f"--grpc-address={self.host}", f"--grpc-port={grpc_port}",
            f"--metrics-address={self.host}", f"--metrics-port={metrics_port}",
            f"--exit-timeout-secs={self.exit_seconds}",
            "--disable-auto-complete-config",  # else every model is started twice
            "--metrics-interval-ms=500",
        ]  # fmt: skip
        if backends:
            words.append(f"--backend-directory={backends}")
        if caches := installation.caches():
            words.append(f"--cache-directory={caches}")
        words.append(f"--model-control-mode={self.control}")
        if self.control == "explicit":
            words += [f"--load-model={model}" for model in self.models]
        return words + self.options

    def _spawn(self, command, environment):
        self.log.parent.mkdir(parents=True, exist_ok=True)
        launcher = [sys.executable, "-I", "-S", keeper.__file__]
        launcher += [str(self.exit_seconds + KILL), self.http.rpartition(":")[2], str(self._folder)]
        with self.log.open("wb") as log:
            process = self._held["process"] = subprocess.Popen(
                launcher + command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=environment, start_new_session=True,
            )  # fmt: skip
        line = process.stdout.readline()  # the keeper writes it at once, or ends
        process.stdout.close()
        self.pid = int(line) if line.strip().isdigit() else None

    def _wait(self, name, progress) -> bool:
        """Waits until this very server serves the models; False: it has ended or lacks a port."""
        until = time.monotonic() + self.start_seconds
        while self.alive():
            if self._is_ours(name) and self.ready() and all(map(self.ready, self.models)):
                if listens(self.pid, self.metrics):
                    return True
                if port_was_taken(end_of(self.log)):
                    return False  # without its metrics alone the server would go on
            if time.monotonic() > until:
                what = f"was not ready after {self.start_seconds:g} s"
                raise ServerError(failure(self.log, what, self.log.parent == self._folder))
            progress.look()
            time.sleep(0.05)
        return False

    def _is_ours(self, name) -> bool:
        """With a taken port another server may answer; ours has the name that we gave it."""
        with suppress(*LOST, ValueError, KeyError):
            status, body = call(self.http, "GET", "/v2", timeout=5.0)
            return status == 200 and json.loads(body)["name"] == name
        return False

    def _ask(self, path, body=None, seconds=LOAD) -> bytes:
        method = "GET" if body is None else "POST"
        try:
            status, answer = call(self.http, method, path, body, timeout=seconds)
        except LOST as error:
            raise ServerError(f"the server does not answer at {self.http}: {error}") from None
        if status != 200:
            raise ServerError(reason_of(answer))
        return answer


def finish(held, seconds, keep_folder=False, at_once=False):
    """Ends the server through its keeper, within a time limit; removes the temporary folder."""
    if held["owner"] != os.getpid():
        return  # this is a fork of the process that owns the server
    process = held["process"]
    if process is not None and process.poll() is None:
        with suppress(BrokenPipeError):
            process.stdin.write(keeper.AT_ONCE if at_once else b"")
            process.stdin.close()  # the keeper's sign
        try:
            process.wait(seconds + 2 * KILL)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not keep_folder:
        shutil.rmtree(held["folder"], ignore_errors=True)


def check_limits(control, models, start_seconds, exit_seconds):
    """Refuses arguments that make no sense, before anything is started."""
    if control not in ("explicit", "none"):
        raise ValueError(f'control {control!r} is not known: give "explicit" or "none"')
    if models is not None and control == "none":
        raise ValueError('control "none" loads every model: leave out models')
    for name, seconds in (("start_seconds", start_seconds), ("exit_seconds", exit_seconds)):
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{name} {seconds!r} is not a time limit: give seconds above 0")


if __name__ == "__main__":
    from utils.serving.server_command import main

    sys.exit(main())
