"""One rank of `utils.ranks`: the loop that runs in every worker process.

The notebook's kernel and a rank talk over one pipe, one request and its reply at a time:

    ("join", generation)            create the process group     -> None
    ("leave",)                      destroy the process group    -> None
    ("cell", name, source)          run the source of a cell     -> None
    ("call", function, args, kw)    call a function              -> the result
    ("get", name), ("put", values)  read or set variables        -> the value

A request that fails returns a `Failure` instead. A cell's output goes to a file that the kernel
reads, so nothing is lost when a rank is killed.
"""

import ast
import ctypes
import datetime
import faulthandler
import importlib
import io
import linecache
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from utils.private_api import may_have_children, set_default_timeout

NUMBER = 8  # bytes of a request's number, which precedes the request and its reply
JOIN_TIMEOUT = 30.0  # seconds to meet, on a possibly busy machine; not the learner's time limit
device = torch.device("cpu")  # of this process; a rank sets its own, for functions that query it


@dataclass(frozen=True)
class Frame:
    """One line of a stack: file name, line number (from 1), function name."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Failure:
    """An exception on a rank: its one-line text and its stack, outermost frame first."""

    kind: str  # name of the exception's class
    message: str
    stack: tuple[Frame, ...]


@dataclass(frozen=True)
class Place:
    """The node of `nodes` on which a rank runs: a process whose namespaces it enters."""

    pid: int
    namespaces: tuple[str, ...]  # in this order: "user" (if there is one), "net", "uts"
    interface: str  # the node's cable


@dataclass(frozen=True)
class Setup:
    """Everything a rank must know before its first cell. `timeout` is in seconds."""

    rank: int
    world_size: int
    device: str
    backend: str
    folder: str
    timeout: float
    seed: int
    place: Place | None = None


class Interrupt:
    """Lets Ctrl-C end the running cell, but never the loop between two cells.

    The notebook's interrupt reaches a rank twice, and counts once: from Jupyter, which signals the
    whole process group, and from the kernel, which passes it on.
    """

    def __init__(self):
        self.armed = False
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, signum: int, frame: types.FrameType | None) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def __enter__(self):
        self.armed = True

    def __exit__(self, *exception):
        self.armed = False


class Pickler(cloudpickle.CloudPickler):
    """cloudpickle, which pickles a notebook's functions, but with every module by name.

    A function that imports `torch.distributed` and has a global named like one of its submodules
    (`config`) takes that module along; some of torch's are objects that cloudpickle refuses.
    """

    def reducer_override(self, value: Any) -> Any:
        name = value.__name__ if isinstance(value, types.ModuleType) else "__main__"
        if name != "__main__" and sys.modules.get(name) is value:
            return importlib.import_module, (name,)
        return super().reducer_override(value)


def dumps(value: Any) -> bytes:
    """A value as bytes for a pipe; `cloudpickle.loads` reads it."""
    with io.BytesIO() as buffer:
        Pickler(buffer).dump(value)
        return buffer.getvalue()


def main(setup: Setup, connection: Connection) -> None:
    """Serve requests until the pipe closes. A reply begins with its request's number, which is
    readable even if the rest is not."""
    global device
    if setup.place:  # before the first thread: a process with several cannot change its user
        enter(setup.place)
    device = torch.device(setup.device)
    interrupt = Interrupt()
    redirect_output(setup)
    die_with_kernel(setup.folder)
    os.register_at_fork(after_in_child=die_with_parent)
    me = os.getpid()
    # ranks are daemons, which may not have children by default; DataLoader's workers are children
    may_have_children()
    namespace = first_namespace(setup)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        number, request = request[:NUMBER], request[NUMBER:]
        try:
            with interrupt:
                payload = dumps(answer(setup, namespace, *cloudpickle.loads(request)))
        except BaseException as error:  # exit() or Ctrl-C in a cell must not end the rank
            payload = dumps(describe(error))
        try:
            sys.stdout.flush()
        except (AttributeError, ValueError):  # the cell has closed or deleted it
            redirect_output(setup)
        if os.getpid() != me:  # a child that the cell forked: only the rank itself answers
            os._exit(0)
        connection.send_bytes(number + payload)


def enter(place: Place) -> None:
    """Move this process to a node: from now on it has that node's network and host name."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists from Python 3.12 on
    for name in place.namespaces:
        with open(f"/proc/{place.pid}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                number = ctypes.get_errno()
                raise OSError(number, f"the rank could not move to its node: {os.strerror(number)}")
    os.environ["GLOO_SOCKET_IFNAME"] = place.interface


def answer(setup: Setup, namespace: dict, kind: str, *args: Any) -> Any:
    """Carry out one request and return the reply's value."""
    if kind == "cell":
        return run_cell(namespace, *args)
    if kind == "call":
        function, positional, keywords = args
        return function(*positional, **keywords)
    if kind == "join":
        return join(setup, *args)
    if kind == "leave":
        return dist.destroy_process_group() if dist.is_initialized() else None
    if kind == "get":
        return namespace[args[0]]
    if kind == "put":
        return namespace.update(args[0])
    raise ValueError(f"unknown request {kind!r}")


def join(setup: Setup, generation: int) -> None:
    """Create the process group; a file in the pool's folder is the meeting point."""
    if setup.backend == "nccl":
        torch.cuda.set_device(setup.device)
    else:  # on one machine an unresolvable host name or a VPN must not matter
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    store = dist.FileStore(f"{setup.folder}/meeting-{generation}", setup.world_size)
    store.set_timeout(datetime.timedelta(seconds=JOIN_TIMEOUT))
    store.set(f"rank {setup.rank} is here", "")
    store.wait([f"rank {rank} is here" for rank in range(setup.world_size)])
    limit = datetime.timedelta(seconds=setup.timeout)
    # groups that a cell makes with new_group take their time limit from here
    set_default_timeout(limit)
    dist.init_process_group(
        setup.backend, store=store, rank=setup.rank, world_size=setup.world_size, timeout=limit
    )


def first_namespace(setup: Setup) -> dict:
    """The initial variables of cells. Every rank gets the same seed, as a learner expects."""
    torch.set_num_threads(1)
    torch.manual_seed(setup.seed)
    random.seed(setup.seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(setup.seed)
    return {
        "__name__": "__ranks__",
        "torch": torch,
        "dist": dist,
        "rank": setup.rank,
        "world_size": setup.world_size,
        "device": device,
    }


def run_cell(namespace: dict, name: str, source: str) -> None:
    """Run a cell; print the value if its last line is an expression, as Jupyter does."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is not None and not source.rstrip().endswith(";"):
            print(repr(value))


def describe(error: BaseException) -> Failure:
    """An exception as a `Failure`; the kernel looks up the source lines, as it has them all."""
    frames = traceback.extract_tb(error.__traceback__)
    stack = [Frame(f.filename, f.lineno or 0, f.name) for f in frames if f.filename != __file__]
    if isinstance(error, SyntaxError) and error.filename:
        stack.append(Frame(error.filename, error.lineno or 0, "<module>"))
    try:
        message = str(error.args[0]) if isinstance(error, SyntaxError) else str(error)
    except Exception as second:
        message = f"(its text is unavailable: {type(second).__name__})"
    return Failure(type(error).__name__, message, tuple(stack))


def redirect_output(setup: Setup) -> None:
    """Send Python's output to `rank0.out`, and that of libraries below Python to `rank0.log`."""
    base = f"{setup.folder}/rank{setup.rank}"
    sys.stdout = sys.stderr = open(f"{base}.out", "a", 1, encoding="utf-8")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    with open(f"{base}.log", "ab", buffering=0) as log:
        os.dup2(log.fileno(), 2)
    # on SIGUSR1 the stack is written, even while the rank waits in a collective's C++ code
    stack = open(f"{base}.stack", "ab")  # noqa: SIM115, faulthandler keeps it open
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)


def die_with_kernel(folder: str) -> None:
    """End this rank when the kernel ends, whatever the rank is doing."""

    def watch():
        multiprocessing.parent_process().join()
        shutil.rmtree(Path(folder), ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="watch the kernel").start()


def die_with_parent() -> None:
    """End this process, which a cell has forked, when its parent ends."""
    parent = os.getppid()

    def watch():
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
