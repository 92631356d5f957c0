"""Watches the processes in which Triton's Python models run, and restarts what Triton does not.

Triton runs each Python model in a process of its own, a *stub*. When one is killed, Triton does not
restart it: streams hang, and the model still counts as ready. So the gateway checks the stubs
itself (Linux: /proc), several times per second:

- a stub has died: its requests end with an error, new ones are refused, and the model is unloaded
  and loaded repeatedly until it is back;
- a stub is stopped: its requests wait; after HUNG seconds it is killed, which leads to the first
  case;
- a load takes longer than its time limit: the loading stub is killed, so the load fails.
"""

import asyncio
import ctypes
import logging
import os
import platform
import signal
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from utils.serving.gateway.refusal import Refusal
from utils.serving.gateway.triton import Triton

LOOK = 0.4  # seconds between two checks
HUNG = 10.0  # seconds that a stub may be stopped
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two attempts to load a model again
UNLOAD = 60.0  # seconds
TEXT = {"gpt", "gpt_engine", "gpt_tokenize"}  # without one of these no text is answered

log = logging.getLogger("gateway")


@dataclass(frozen=True)
class Stub:
    """A process of a model. begun: start time on the kernel's clock, which tells old from new."""

    model: str
    version: str
    pid: int
    begun: int


class Call:
    """A request in flight, or a stream of requests."""

    def __init__(self, limit: asyncio.Timeout, model: str, seconds: float):
        self.limit, self.models, self.seconds = limit, {model}, seconds

    def goes_on(self, model: str | None = None) -> None:
        """Another message has arrived, for this model: restarts the time limit."""
        self.models |= {model} - {None}
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time() + self.seconds)

    def end(self) -> None:
        """Let it time out now."""
        self.seconds = 0.0
        self.goes_on()


class Stubs:
    """The stubs of the server with the process id `pid`; None: none are watched.

    load_seconds   time limit of a load
    """

    def __init__(self, triton: Triton, pid: int | None, load_seconds: float):
        self.triton, self.pid, self.load_seconds = triton, pid, load_seconds
        self.wanted: set[str] = set()  # models that should be served
        self.down: dict[str, str] = {}  # {model: why it is not served}
        self.leaving = False  # whether the gateway is about to end
        self.loads = 0  # models that were loaded again
        self._known: set[Stub] = set()  # that ran at the last check
        self._stopped: dict[Stub, float] = {}  # since when
        self._calls: set[Call] = set()
        self._healing: dict[str, asyncio.Task] = {}

    # --- for requests ---------------------------------------------------------------------------

    @asynccontextmanager
    async def call(self, model: str, seconds: float) -> AsyncIterator[Call]:
        """A request to `model` with a time limit. Raises Refusal if the model is down now or goes
        down before the request ends."""
        self.refuse_if_down(model)
        try:
            async with asyncio.timeout(seconds) as limit:
                call = Call(limit, model, seconds)
                self._calls.add(call)
                try:
                    yield call
                finally:
                    self._calls.discard(call)
        except TimeoutError:
            for asked in call.models:
                self.refuse_if_down(asked)
            raise Refusal(f"DEADLINE_EXCEEDED: no answer after {seconds:g} s") from None

    def refuse_if_down(self, model: str) -> None:
        """Raise Refusal with the reason if the model is down."""
        if why := self.down.get(model):
            raise Refusal(f"UNAVAILABLE: {why}, try again later")

    async def why_not_ready(self) -> str | None:
        """None if every model that should be served is; else the reason why one is not.

        Triton's own answer is useless: it stays false once any model has been unloaded.
        """
        if self.leaving:
            return "this server is about to end"
        if self.down:
            return next(iter(self.down.values()))
        missing = sorted(self.wanted - await self._served("READY"))
        return f"{missing[0]} is not served" if missing else None

    # --- model control --------------------------------------------------------------------------

    async def load(self, model: str, body: bytes = b"{}") -> None:
        """Load a model, or its changes; a load that hangs is ended and retried once."""
        try:
            await self._load(model, body)
        except Hangs:
            log.warning("%s: retrying the load", model)
            await self._load(model, body)
        self.wanted.add(model)

    async def unload(self, model: str, body: bytes = b"{}") -> None:
        """Unload a model, which is no longer wanted."""
        self.wanted.discard(model)
        await self.triton.control(model, "unload", UNLOAD, body)

    async def _load(self, model, body=b"{}"):
        await self.triton.settle()  # before its time begins
        task = asyncio.create_task(
            self.triton.control(model, "load", self.load_seconds + UNLOAD, body)
        )
        if not (await asyncio.wait({task}, timeout=self.load_seconds))[0]:
            killed = 0  # start time of the last stub killed: an older one may be in service
            while not task.done():  # the stub may not have started yet
                with suppress(Refusal):
                    hang = [stub for stub in await self._loading(model) if stub.begun > killed]
                    self._kill(hang)
                    killed = max([killed, *(stub.begun for stub in hang)])
                await asyncio.wait({task}, timeout=LOOK)
            with suppress(Refusal):
                await task
            raise Hangs(f"UNAVAILABLE: loading {model} took longer than {self.load_seconds:g} s")
        await task

    async def _loading(self, model):
        """The newest stub of each version that Triton is loading."""
        states = await self.triton.states()
        newest = {}
        for stub in sorted(self.stubs(), key=lambda stub: stub.begun):
            if stub.model == model and states.get((model, stub.version)) == "LOADING":
                newest[stub.version] = stub
        return newest.values()

    def _kill(self, stubs: Iterable[Stub]):
        for stub in stubs:
            log.error("%s version %s hangs: killing its process", stub.model, stub.version)
            with suppress(ProcessLookupError):
                os.kill(stub.pid, signal.SIGKILL)

    # --- the watch ------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Wait for the server; the models that it serves then are wanted. Raises TimeoutError.

        Those of TEXT are wanted if they have ever been loaded: one that is unloaded now may be so
        only until its ranks are back.
        """
        until = asyncio.get_running_loop().time() + self.load_seconds
        while True:
            with suppress(Refusal):  # it is not up yet
                states = await self.triton.states()
                if "LOADING" not in states.values():
                    ready = {model for (model, _), state in states.items() if state == "READY"}
                    self.wanted = ready | TEXT & {model for (model, _), s in states.items() if s}
                    return
            if asyncio.get_running_loop().time() > until:
                raise TimeoutError(f"no server at {self.triton.address} that has loaded its models")
            await asyncio.sleep(LOOK)

    async def run(self) -> None:
        """Watch until the server is gone."""
        while self.pid is None or Path(f"/proc/{self.pid}").exists():
            try:
                await self._look()
            except Refusal as error:  # Triton does not answer; why_not_ready reports it too
                log.warning("%s", error.message)
            await asyncio.sleep(LOOK)

    async def _look(self):
        now = asyncio.get_running_loop().time()
        # The kernel's lists of children may lack a stub for a moment, when a thread of the server
        # ends and another becomes its parent: so known stubs are also looked up by their own pid.
        found = {*self.stubs(), *(stub for stub in self._known if stub_of(stub.pid) == stub)}
        here = {stub: state(stub.pid) for stub in found}
        stopped = {stub for stub, letter in here.items() if letter in "Tt"}
        self._stopped = {stub: self._stopped.get(stub, now) for stub in stopped}
        self._kill(stub for stub, since in self._stopped.items() if now - since > HUNG)
        for model in {stub.model for stub in stopped} - set(self._healing):
            self.down[model] = f"{model} is stopped"
        alive = {stub for stub, letter in here.items() if letter not in "ZX"}
        if self._known - alive:
            states = await self.triton.states()
            for model, version in await self._lacking(states, served_by(alive)):
                others = [one for one in alive if (one.model, one.version) == (model, version)]
                self._heal(model, others)
        self._known = alive
        # only now: a stub that was stopped may have died
        for model in set(self.down) - {stub.model for stub in stopped} - set(self._healing):
            del self.down[model]

    async def _lacking(self, states, here):
        """Served versions of models that have fewer processes than instances."""
        found = []
        for model, version in served_by(self._known):
            if states.get((model, version)) == "READY":
                groups = (await self.triton.config(model)).get("instance_group") or [{}]
                if here[model, version] < sum(group.get("count", 1) for group in groups):
                    found.append((model, version))
        return found

    def _heal(self, model, others):
        """Start to reload a model. others: the remaining processes of its version, which Triton
        does not end if the dead one had requests."""
        if model in self._healing:
            return
        log.error("%s has died: loading it again", model)
        self.down[model] = f"{model} has died and is being loaded again"
        for call in self._calls:
            if model in call.models:
                call.end()
        self._healing[model] = asyncio.create_task(self._load_again(model, others))

    async def _load_again(self, model, others):
        pause = FIRST_PAUSE
        try:
            while model in self.wanted:
                try:
                    await self.triton.control(model, "unload", UNLOAD)  # or load would do nothing
                    await self._load(model)
                    await self._load_the_rest()
                    self._kill(stub for stub in others if stub_of(stub.pid) == stub)
                    self.loads += 1
                    return
                except Refusal as error:
                    log.error("%s does not load: %s", model, error.message)
                    self.down[model] = f"{model} has died and does not load"
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            del self._healing[model], self.down[model]

    async def _load_the_rest(self):
        """Load models that went down with it: while an engine is down, `gpt` is out of service."""
        for model in sorted(self.wanted - await self._served("READY", "LOADING")):
            await self._load(model)

    async def _served(self, *states):
        """The models that have a version in one of these states."""
        found = await self.triton.states()
        return {model for (model, _), state in found.items() if state in states}

    def stubs(self) -> list[Stub]:
        """The children of the server that run a model."""
        if self.pid is None:
            return []
        found, threads = [], f"/proc/{self.pid}/task"
        with suppress(OSError):  # the server is gone
            for thread in os.listdir(threads):
                with suppress(OSError):  # the thread is gone
                    found += read(f"{threads}/{thread}/children").split()
        return [stub for pid in found if (stub := stub_of(int(pid)))]


class Hangs(Refusal):
    """A load that took too long."""


def served_by(stubs: Iterable[Stub]) -> Counter[tuple[str, str]]:
    """{(model, version): processes}"""
    return Counter((stub.model, stub.version) for stub in stubs)


def stub_of(pid: int) -> Stub | None:
    """A process as a stub; None if it is not a stub or is gone."""
    try:
        words = read(f"/proc/{pid}/cmdline").split("\0")
        if not words[0].endswith("triton_python_backend_stub"):
            return None
        file = Path(words[1])  # …/NAME/VERSION/model.py
        begun = int(_stat(pid)[19])
        return Stub(file.parents[1].name, file.parent.name, pid, begun)
    except OSError:
        return None


def stop_at_rest(pid: int, seconds: float = 60.0) -> None:
    """Stop a stub (SIGSTOP) at a moment when none of its threads holds a mutex shared with Triton,
    so that it can be killed: Triton 24.10 crashes (boost::interprocess::lock_exception) when it
    locks a mutex whose owner was killed. The kernel knows the owners (get_robust_list(2)). Raises
    TimeoutError.
    """
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        os.kill(pid, signal.SIGSTOP)
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
        if all(state(thread) == "T" for thread in threads):
            if not any(map(_holds_a_mutex, threads)):
                return
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)
    os.kill(pid, signal.SIGCONT)
    raise TimeoutError(f"the threads of process {pid} were not at rest for {seconds:g} s")


def _holds_a_mutex(thread):
    """Whether a thread of another, stopped process owns a robust mutex or is locking one."""
    libc, head, size = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p(), ctypes.c_size_t()
    number = {"x86_64": 274, "aarch64": 100}[platform.machine()]
    if libc.syscall(number, thread, ctypes.byref(head), ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), "get_robust_list")
    with open(f"/proc/{thread}/mem", "rb", 0) as memory:
        memory.seek(head.value)
        first, _, pending = struct.unpack("3q", memory.read(24))
    return first != head.value or pending != 0


def state(pid: int) -> str:
    """The letter of a process's state; "X" if it is gone (proc(5))."""
    try:
        return _stat(pid)[0]
    except OSError:
        return "X"


def _stat(pid):
    """The fields of /proc/PID/stat after the name, which may contain any character."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def read(file: str) -> str:
    """A small file of /proc. Each check reads about two hundred, one per thread of the server, so
    it uses the fastest way: 4 µs, compared to 20 µs for Path.read_text. Raises OSError."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    finally:
        os.close(descriptor)
