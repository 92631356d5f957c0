"""A Triton Inference Server on this machine, as a context manager or in a terminal.

    with TritonServer("triton_model_repo") as server:      # ready when the block begins
        server.http, server.grpc, server.metrics           # "127.0.0.1:21034", …
        server.load("gpt");  server.unload("gpt");  server.ready("gpt");  server.versions("gpt")
                                                           # on exit requests in flight finish first

The server is real, and reachable only from this machine (127.0.0.1). It has a process group of its
own, so a Ctrl-C that interrupts a cell does not reach it; `utils/ranks/supervise.py` ends it, its
stubs and its ranks with the process that started it. `utils/serving/install.py` finds its binary.

1. the server   2. how it starts: ports, progress, failures   3. its log
"""

import json
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import httpx
import psutil

from utils.ranks.supervise import AT_ONCE, Child, end, supervised
from utils.serving.client import reason_of
from utils.serving.install import (
    CLOSED,
    CONTROL,
    RESTRICTED,
    SETTLE,
    ServerError,
    find_server,
    models_of,
)

HOST = "127.0.0.1"
PORTS = range(20000, 32000)  # below those that the kernel assigns to outgoing connections
TRIES = 5  # starts with new ports, in case another program takes one between our check and the bind
KILL = 5.0  # seconds after the server's own time limit until it is killed
# The model that calls the others. On SIGTERM Triton lets HTTP requests end first, but with gRPC it
# stops all models at once: a request on its way from one model to the next would fail.
FRONT = "gpt"
LOAD = 120.0  # seconds that a model may take to load or to unload


# ---- 1. the server


class TritonServer:
    """A tritonserver that serves the folder `repo`; ready when this returns.

    models    names of the models to load; None: all in the folder
    log       the server's log file, to which it appends; None: a temporary one, deleted with this
              object
    start_seconds   time limit until the models are ready
    exit_seconds    how long requests in flight may take at the end
    control   "explicit": models are loaded and unloaded on request; "none": all at start, for good
    private   whether HTTP and gRPC use sockets that only the user of this process can open
    host      the address to listen on; "0.0.0.0": all addresses of this machine
    http, grpc, metrics   port numbers; 0: free ones
    options   further arguments for tritonserver's command line
    quiet     print nothing while it starts

    Afterwards `http`, `grpc` and `metrics` are "host:port" or "unix:FILE", `pid` is the server's,
    `log` the file, and `control_key` the key that model control over HTTP requires in its header
    CONTROL. That key is on the server's command line: it keeps out web pages and the network, but
    not users logged in to this machine, whom `private` keeps out. gRPC offers no model control.
    Raises ServerError when it cannot start: the model's own reason first, then the log's tail.
    """

    def __init__(
        self,
        repo: str | Path,
        models: list[str] | None = None,
        log: str | Path | None = None,
        start_seconds: float = 120.0,
        exit_seconds: float = 15.0,
        control: str = "explicit",
        *,
        host: str = HOST,
        http: int = 0,
        grpc: int = 0,
        metrics: int = 0,
        private: bool = False,
        options: tuple[str, ...] = (),
        quiet: bool = False,
    ):
        check_limits(control, models, start_seconds, exit_seconds)
        self.repo, self.control, self.options = Path(repo).resolve(), control, list(options)
        self.host, self.private, self.control_key = host, private, secrets.token_urlsafe(16)
        self.start_seconds, self.exit_seconds = start_seconds, max(1, round(exit_seconds))
        installation = find_server()
        self.models, self.left_out = models_of(self.repo, models, installation.backends())
        self._folder = Path(tempfile.mkdtemp(prefix="triton-"))
        self._regions = f"{self._folder.name}-"  # of shared memory
        self._held = {"owner": os.getpid(), "folder": self._folder, "child": None}
        self._finalizer = weakref.finalize(self, finish, self._held, self.exit_seconds)
        self.log = Path(log).resolve() if log else self._folder / "server.log"
        self._log_begin = 0  # where the log of this start begins
        self.pid, progress = None, Progress(self, quiet)
        try:
            backends = installation.assemble(self._folder)
            self._start(installation, backends, (http, grpc, metrics), progress)
        except BaseException:  # on Ctrl-C too, nothing may stay behind
            progress.end("failed")
            finish(self._held, self.exit_seconds, keep_folder=True, at_once=True)
            raise

    # --- public methods -------------------------------------------------------------------------

    def ready(self, model: str | None = None) -> bool:
        """Whether the server, or one of its models, reports that it is ready. Never raises."""
        path = f"models/{quote(model)}/ready" if model else "health/ready"
        with suppress(ServerError):
            self.ask("GET", path, seconds=5.0)
            return True
        return False

    def load(self, model: str, config: dict | None = None, seconds: float = LOAD) -> None:
        """Load a model, or its changes. config: replaces its config.pbtxt until it is unloaded;
        seconds: time limit for the server's answer.

        Raises ServerError with the model's own reason; versions already served stay in service.
        """
        try:
            self._settle()
            body = {} if config is None else {"parameters": {"config": json.dumps(config)}}
            self.ask("POST", f"repository/models/{quote(model)}/load", body, seconds)
        except ServerError as error:
            raise ServerError(load_reason(model, str(error))) from None
        finally:
            self._loaded = time.monotonic()

    def unload(self, model: str, dependents: bool = False, seconds: float = LOAD) -> None:
        """Unload a model; return when its requests have ended and it is gone."""
        self._settle()
        until = time.monotonic() + seconds
        body = {"parameters": {"unload_dependents": bool(dependents)}}
        self.ask("POST", f"repository/models/{quote(model)}/unload", body, seconds)
        while self.states(model, "READY", "UNLOADING"):
            if time.monotonic() > until:
                raise ServerError(f"{model} still has requests in flight after {seconds:g} s")
            time.sleep(0.02)

    def versions(self, model: str) -> list[int]:
        """The versions of a model that are served."""
        return sorted(self.states(model, "READY"))

    def states(self, model: str, *which: str) -> dict[int, str]:
        """{version: state} of a model, for all states or only these: "READY", "LOADING", …"""
        entries = self.ask("POST", "repository/index", {}).json()
        mine = [entry for entry in entries if entry["name"] == model and entry.get("version")]
        states = {int(entry["version"]): entry.get("state", "") for entry in mine}
        return {v: state for v, state in states.items() if not which or state in which}

    def config(self, model: str) -> dict:
        """The configuration that a model is served with, including defaults."""
        return self.ask("GET", f"models/{quote(model)}/config").json()

    def ask(
        self, method: str, path: str, body: dict | None = None, seconds: float = LOAD
    ) -> httpx.Response:
        """The response to an HTTP call, by its path after /v2/. Raises ServerError if the server
        refuses it or does not answer.

        Each call has its own connection, because Triton waits for open ones before it stops.
        """
        kind, _, file = self.http.partition(":")
        unix = kind == "unix"
        url = f"http://{'triton' if unix else self.http}/v2/{path}"
        transport = httpx.HTTPTransport(uds=file if unix else None)
        headers = {CONTROL: self.control_key}
        try:
            with httpx.Client(transport=transport, timeout=seconds, trust_env=False) as client:
                answer = client.request(method, url.removesuffix("/"), json=body, headers=headers)
        except (httpx.HTTPError, OSError) as error:
            raise ServerError(f"the server does not answer at {self.http}: {error!r}") from None
        if answer.status_code != 200:
            raise ServerError(reason_of(answer.content))
        return answer

    def alive(self) -> bool:
        """Whether the server's process is running."""
        child = self._held["child"]
        return child is not None and child.returncode is None

    def tail(self, lines: int = 20) -> str:
        """The last lines of this start's log."""
        return tail(self.log, lines, self._log_begin)

    def log_end(self) -> str:
        """The end of this start's log."""
        return end_of(self.log, self._log_begin)

    def close(self) -> int | None:
        """End the server and all its processes; requests in flight have `exit_seconds` to end.

        Returns its exit status: 0 if no request was cut short. Closing twice does nothing.
        """
        if FRONT in self.models and self.control == "explicit" and self.alive():
            with suppress(ServerError):
                self.unload(FRONT, seconds=self.exit_seconds)
        self._settle()
        finish(self._held, self.exit_seconds, keep_folder=True)
        return self.returncode

    @property
    def returncode(self) -> int | None:
        """The server's exit status, 128 + n for signal n; None while it runs."""
        child = self._held["child"]
        return None if child is None else child.returncode

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
            if self.private:
                self.http = f"unix:{self._folder}/http"
                self.grpc = f"unix:{self._folder}/grpc:{ports[1]}"  # so gRPC calls the file
            name = f"kintsugi-{secrets.token_hex(6)}"
            command = self._command(installation, backends, name, ports)
            self._spawn(command, installation.environment())
            if self._wait(name, progress):
                progress.end("ready")
                self._loaded = time.monotonic()
                return
            if last or all(wanted) or not port_was_taken(self.log_end()):
                what = "has no port" if self.alive() else f"exited with status {self.returncode}"
                raise self._failure(what)
            finish(self._held, self.exit_seconds, keep_folder=True, at_once=True)

    def _command(self, installation, backends, name, ports):
        http_port, grpc_port, metrics_port = ports
        words = [
            str(installation.binary), f"--id={name}", f"--model-repository={self.repo}",
            f"--http-address={self.http if self.private else self.host}",
            f"--http-port={http_port}",
            f"--grpc-address={self.grpc.rpartition(':')[0] if self.private else self.host}",
            f"--grpc-port={grpc_port}",
            f"--metrics-address={self.host}", f"--metrics-port={metrics_port}",
            f"--exit-timeout-secs={self.exit_seconds}",
            "--disable-auto-complete-config",  # otherwise every model is started twice
            "--metrics-interval-ms=500",
            "--http-header-forward-pattern=traceparent",  # to the models, as a request's parameter
            "--grpc-header-forward-pattern=traceparent",
            f"--http-restricted-api={RESTRICTED}:{CONTROL}={self.control_key}",
            f"--grpc-restricted-protocol={RESTRICTED}:{CLOSED}",
            f"--backend-config=python,shm-region-prefix-name={self._regions}",
        ]
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
        heard, told = os.pipe()
        words = supervised(
            command, grace=self.exit_seconds + KILL, folder=self._folder, pid_to=told
        )
        with open(heard, "rb") as said:
            with self.log.open("ab") as log, open(told, "wb"):  # the gateway also writes to the log
                self._log_begin = log.tell()
                self._held["child"] = Child(words, output=log, env=environment, fds=(told,))
            pid = said.read()  # the supervisor writes it at once, or exits
        self.pid = int(pid) if pid else None

    def _wait(self, name, progress) -> bool:
        """Wait until this server serves the models; False: it exited or lacks a port."""
        until = time.monotonic() + self.start_seconds
        while self.alive():
            if self._is_ours(name) and self.ready() and all(map(self.ready, self.models)):
                if listens(self.pid, self.metrics):
                    return True
                if port_was_taken(self.log_end()):
                    return False  # without only its metrics port, the server would keep running
            if time.monotonic() > until:
                raise self._failure(f"was not ready after {self.start_seconds:g} s")
            progress.look()
            time.sleep(0.05)
        return False

    def _failure(self, what):
        """The error for a server that did not start: reasons, then the end of its log."""
        head = "".join(f"{reason}\n" for reason in reasons(self.log_end()))
        temporary = self.log.parent == self._folder
        where = "give a log file to keep all of it" if temporary else self.log
        return ServerError(
            f"{head}tritonserver {what}. The end of its log ({where}):\n{self.tail(12)}"
        )

    def _is_ours(self, name) -> bool:
        """Whether our server answers: if the port was taken, another one may; ours has `name`."""
        with suppress(ServerError, ValueError, KeyError):
            return self.ask("GET", "", seconds=5.0).json()["name"] == name
        return False

    def _settle(self):
        """Wait until the last loaded model can be unloaded safely (SETTLE)."""
        time.sleep(max(0.0, self._loaded + SETTLE - time.monotonic()))


def finish(held: dict, seconds: float, keep_folder: bool = False, at_once: bool = False) -> None:
    """End the server through its supervisor, within a time limit; remove the temporary folder."""
    if held["owner"] != os.getpid():
        return  # this is a fork of the process that owns the server
    child = held["child"]
    if child is not None and child.returncode is None:
        if at_once:
            child.close_input(AT_ONCE)
        end([child], seconds + 2 * KILL)
    if child is not None and child.returncode is not None:
        for region in Path("/dev/shm").glob(f"{held['folder'].name}-*"):  # that a killed one left
            region.unlink(missing_ok=True)
    if not keep_folder:
        shutil.rmtree(held["folder"], ignore_errors=True)


def check_limits(
    control: str, models: list[str] | None, start_seconds: float, exit_seconds: float
) -> None:
    """Refuse invalid arguments before anything is started."""
    if control not in ("explicit", "none"):
        raise ValueError(f'control {control!r} is not known: give "explicit" or "none"')
    if models is not None and control == "none":
        raise ValueError('control "none" loads every model: leave out models')
    for name, seconds in (("start_seconds", start_seconds), ("exit_seconds", exit_seconds)):
        if not 0 < seconds < float("inf"):
            raise ValueError(f"{name} {seconds!r} is not a time limit: give seconds above 0")


# ---- 2. how it starts


def choose_ports(wanted: tuple[int, int, int], host: str) -> list[int]:
    """The ports for HTTP, gRPC and metrics; 0 becomes a free one."""
    chosen = []
    for port, option in zip(wanted, ("http", "grpc", "metrics")):
        if port and taken(host, port):
            raise ServerError(
                f"port {port} is taken: give {option} another, or 0 for any free port"
            )
        while not port or port in chosen:
            candidate = PORTS[secrets.randbelow(len(PORTS))]
            port = 0 if taken(host, candidate) or candidate in wanted else candidate
        chosen.append(port)
    return chosen


def taken(host: str, port: int) -> bool:
    """Whether another process listens on this port."""
    with socket.socket() as listener:
        # connections that have ended do not count
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return True
    return False


class Progress:
    """Progress while a server starts: in a terminal a line that is updated; elsewhere a single line
    that does not depend on the machine, because stored notebooks are compared with it."""

    def __init__(self, server: TritonServer, quiet: bool):
        self.server, self.quiet, self.terminal = server, quiet, sys.stdout.isatty()
        self.begin = time.monotonic()

    def look(self) -> None:
        if self.quiet or not self.terminal:
            return
        loaded = set(re.findall(r"successfully loaded '([^']+)'", self.server.log_end()))
        missing = [model for model in self.server.models if model not in loaded]
        self._show(f"tritonserver: {time.monotonic() - self.begin:.0f} s, {', '.join(missing)} …")

    def end(self, how: str) -> None:
        """Print the result: "ready" or "failed"."""
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


def listens(pid: int, address: str) -> bool:
    """Whether the process `pid` listens on the port of an address, "host:port"."""
    with suppress(psutil.Error):
        port = int(address.rpartition(":")[2])
        connections = psutil.Process(pid).net_connections("tcp")
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)
    return False


# ---- 3. its log

LOG_END = 200_000  # bytes from the end of a log that are read

LOAD_FAILURES = [
    re.compile(r"failed to load '(?P<name>[^']+ version \d+)': (?P<why>.*)", re.DOTALL),
    re.compile(r"failed to load model '(?P<name>[^']+)': (?P<why>.*)", re.DOTALL),
    re.compile(r"Poll failed for model directory '(?P<name>[^']+)': (?P<why>.*)", re.DOTALL),
    re.compile(r"failed to start (?P<name>\w+) service: (?P<why>.*)", re.DOTALL),
]
VERSION_NUMBER = re.compile(r"' version (\d+): ")  # Triton quotes only the name
CONFIG_ERROR = re.compile(r"Error parsing text-format inference.ModelConfig: (?P<why>.*)")
# E1122 07:45:40.050702 22841 file.cc:12] "
LINE_HEAD = re.compile(r'^[IWEF]\d{4} \S+ +\d+ \S+\] "?')
STATUS_WORD = re.compile(r"^(Internal|Invalid argument|Unavailable|Not found|Unsupported)(: | - )")
VERSION_STATE = re.compile(
    r"version (\d+) is at UNAVAILABLE state: (.*?);\s*(?=version|$)", re.DOTALL
)
TABLE_ROWS = ("+-", "| ")  # how lines of Triton's tables begin


def end_of(path: str | Path, begin: int = 0) -> str:
    """The end of the log as text, from byte `begin` on; "" if there is no log yet."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            begin = begin if begin <= size else 0  # logrotate has truncated it
            file.seek(max(begin, size - LOG_END))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def tail(path: str | Path, lines: int = 20, begin: int = 0) -> str:
    """The last lines of the log, from byte `begin` on, without its tables of options."""
    all_lines = end_of(path, begin).splitlines()
    kept = [
        line for line in all_lines if LINE_HEAD.sub("", line) and not line.startswith(TABLE_ROWS)
    ]
    return "\n".join(kept[-lines:])


def reasons(text: str) -> list[str]:
    """Why models could not be loaded or a port could not be opened: each reason once, in order."""
    found, details = [], ""
    for line in text.splitlines():
        if match := CONFIG_ERROR.search(line):
            details = f": {match['why']}"  # the parser's message precedes the server's
        message = VERSION_NUMBER.sub(r" version \1': ", LINE_HEAD.sub("", line))
        for pattern in LOAD_FAILURES:
            if match := pattern.search(message):
                found.append(f"{match['name']}: {own_words(match['why'])}{details}")
                details = ""
                break
    return list(dict.fromkeys(found))


def load_reason(model: str, text: str) -> str:
    """Why a model could not be loaded, from the response to a load request."""
    found = [
        f"{model} version {match[1]}: {own_words(match[2])}"
        for match in VERSION_STATE.finditer(text)
    ]
    return "\n".join(found) or text


def own_words(text: str) -> str:
    """A reason without Triton's status, the traceback and enclosing quotes."""
    text = text.replace("\\n", "\n").partition("\n\nAt:")[0]
    return STATUS_WORD.sub("", text.strip().strip('"').strip())


def port_was_taken(text: str) -> bool:
    """Whether another program had one of the server's ports."""
    return "already in use" in text
