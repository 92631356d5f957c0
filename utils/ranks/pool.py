"""Ranks in a notebook: real processes that run cells and functions together.

    ranks = Ranks(4)                 # four processes and their process group, in about 0.05 s
    ranks.run(function, x)           # function(x) on every rank -> [result of rank 0, 1, 2, 3]

    %%ranks                          # this cell runs on every rank
    t = torch.ones(1) * rank
    dist.all_reduce(t)

How it works. Python's *forkserver* is a small process that has imported torch and does nothing
else. A new rank is a fork of it, so it starts in milliseconds with torch already imported; a fork
of the kernel itself would copy locks held by the kernel's threads, and hang. Each rank waits for
work at its end of a pipe (`utils/ranks/worker.py`). `utils/ranks/diagnosis.py` describes failures.
"""

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from typing import Any

import cloudpickle
import torch

from utils.ranks import diagnosis, magic, worker
from utils.ranks.deadlock import LOOK, LOOKS, SURE, Deadlock
from utils.ranks.diagnosis import RankError, RankFiles
from utils.ranks.supervise import end

GRACE = 1.0  # seconds that ranks may take to end on their own once one of them has failed
LONGEST = 1_000_000.0  # seconds; the longest time limit
PATIENCE = 3.0  # seconds an interrupted rank may take before it is killed
# Modules that the forkserver imports once for all ranks; a module that each rank needs adds itself.
PRELOADED = ["utils.ranks.preload"]


@dataclass(frozen=True)
class Dead:
    """Returned instead of a result by a rank that may die and whose process has ended."""

    code: int  # its exit status, -n for signal n


class Ranks:
    """A pool of `size` ranks on this machine, each a process with one thread.

    device: "cpu", "cuda" or None. None uses CUDA if every rank has a GPU of its own (NCCL), else
        the CPU (gloo).
    timeout: seconds after which an incomplete collective fails. seed: for torch, random and numpy,
    the same on every rank. places: the node of each rank (passed by `utils.ranks.nodes`), with
    gloo. may_die: a rank whose process ends returns `Dead`, in this call and in later ones, and the
    others continue; otherwise all end with it. end_deadlocks: end ranks that wait for one another
    at once, without waiting for a time limit.

    Cells have `rank`, `world_size`, `device`, `dist` and `torch`; their variables persist. A call
    waits for the call of another thread to return; close() and restart() end that call.
    Raises RankError if a rank fails, ValueError for invalid arguments.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str | None = None,
        timeout: float = 30.0,
        seed: int = 0,
        places: Sequence[worker.Place] | None = None,
        may_die: bool = False,
        end_deadlocks: bool = False,
    ):
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= 256:
            raise ValueError(f"size {size!r} is not a number of ranks: give 1 to 256")
        if not isinstance(timeout, (int, float)) or not 0 < timeout <= LONGEST:
            fix = f"give seconds above 0, at most {LONGEST:,.0f}"
            raise ValueError(f"timeout {timeout!r} is not a time limit: {fix}")
        if type(seed) is not int or not 0 <= seed < 2**32:
            fix = f"give an integer from 0 to {2**32 - 1:,}"
            raise ValueError(f"seed {seed!r} is not a seed: {fix}")
        self.size, self.timeout, self.seed, self.may_die = size, timeout, seed, may_die
        self.end_deadlocks = end_deadlocks
        self.backend, self._devices = choose_devices(size, "cpu" if places else device)
        self._places = places or [None] * size
        self._cells, self._lock = 0, threading.RLock()
        self._start()
        magic.pools.append(weakref.ref(self))
        magic.register_magic()

    # --- called by notebooks -------------------------------------------------------------------

    def run(self, function: Callable, *args: Any, **keywords: Any) -> list:
        """Call `function(*args, **keywords)` on every rank and return the results by rank."""
        return self._ask(range(self.size), "call", function, args, keywords)

    def cell(self, source: str, on: Sequence[int] | None = None) -> None:
        """Run the source of a cell on the ranks `on` (all by default); `%%ranks` calls this."""
        on = list(range(self.size) if on is None else on)
        if not all(rank in range(self.size) for rank in on):
            raise ValueError(f"on={on!r} names ranks that do not exist: give 0 to {self.size - 1}")
        self._cells += 1
        name = f"<ranks cell {self._cells}>"
        diagnosis.remember_source(name, source)
        self._ask(on, "cell", name, source)

    def get(self, name: str) -> list:
        """The variable `name` of every rank, as a list by rank."""
        return self._ask(range(self.size), "get", name)

    def put(self, **values: Any) -> None:
        """Set variables on every rank."""
        self._ask(range(self.size), "put", values)

    def restart(self) -> None:
        """Kill these ranks and start new ones with nothing in their memory."""
        self.close()
        with self._lock:  # by now a call in another thread has ended with its ranks
            self._start()
            magic.pools.append(weakref.ref(self))

    def close(self) -> None:
        """End the ranks. Closing twice does nothing."""
        self._stop("they were closed")
        magic.pools[:] = [pool for pool in magic.pools if pool() not in (self, None)]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def __repr__(self):
        state = f"stopped: {self._stopped}" if self._stopped else f"{self.backend}, open"
        return f"Ranks({self.size}) on {self._devices[0].split(':')[0]} ({state})"

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    @property
    def alive(self) -> list[int]:
        """The ranks still alive, if ranks may die."""
        return [rank for rank in range(self.size) if rank not in self._deaths]

    # --- starting and stopping ------------------------------------------------------------------

    def _start(self):
        context = start_forkserver()
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._stopped, self._generation = None, 0
        self._deaths: dict[int, Dead] = {}
        self._asked = [0] * self.size  # the number of each rank's last request
        self._files = RankFiles(self._folder)
        self._pipes, self._processes = [], []
        self._finalizer = weakref.finalize(
            self, end_ranks, self._processes, self._pipes, self._folder
        )
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            setup = worker.Setup(
                rank, self.size, self._devices[rank], self.backend,
                self._folder, self.timeout, self.seed, self._places[rank],
            )
            process = context.Process(
                target=worker.main, args=(setup, theirs), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._ask(range(self.size), "join", self._generation)
        if self._deaths:  # a rank died before it could do anything
            raise self._dead()

    def _stop(self, reason):
        self._stopped = self._stopped or reason
        self._finalizer()

    # --- one request to some ranks, and everything that can go wrong with it --------------------

    def _ask(self, on, *request):
        with self._lock:
            self._look_for_folder()
            if self._stopped:
                raise self._not_running()
            on = list(on)
            payload = worker.dumps(request)
            replies = {rank: self._deaths[rank] for rank in on if rank in self._deaths}
            waiting_for = set(on) - set(replies)
            try:
                self._send(sorted(waiting_for), payload)
                deadlock = Deadlock() if self.end_deadlocks else None
                self._collect(waiting_for, replies, None, stop_at_failure=True, deadlock=deadlock)
                if waiting_for or failures(replies):
                    raise self._failure(on, waiting_for, replies)
            except KeyboardInterrupt:
                self._interrupt(waiting_for, replies)
                raise
            except (BrokenPipeError, ConnectionResetError):
                raise self._dead() from None
            except OSError:
                if not self._stopped:  # by another thread
                    raise
                raise self._not_running() from None
            finally:
                print(diagnosis.folded(self._new_output(on), self.size), end="")
            return [replies[rank] for rank in on]

    def _look_for_folder(self):
        """Stop if the folder is gone: ranks print into it and meet through it."""
        if not os.path.isdir(self._folder):
            self._stop(f"their folder {self._folder} is gone")

    def _not_running(self):
        return RankError(f"The ranks are not running: {self._stopped}. Call ranks.restart().")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Delay Ctrl-C until a message is complete, because its rest would be read as the next
        message; a second Ctrl-C acts at once and ends the ranks."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        came = []

        def note(number, frame):
            came.append(number)
            if len(came) > 1:
                raise KeyboardInterrupt

        before = signal.signal(signal.SIGINT, note)
        try:
            yield
        except KeyboardInterrupt:
            self._stop("a second interrupt came in the middle of a message")
            raise
        finally:
            signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)

    def _send(self, ranks, payload):
        with self._whole():
            for rank in ranks:
                self._asked[rank] += 1
                number = self._asked[rank].to_bytes(worker.NUMBER, "little")
                try:
                    self._pipes[rank].send_bytes(number + payload)
                except (BrokenPipeError, ConnectionResetError):
                    if not self.may_die:
                        raise

    def _collect(self, waiting_for, replies, until, stop_at_failure=False, deadlock=None):
        """Move ranks from `waiting_for` to `replies`, until the time `until` (None: no limit), or
        until the remaining ranks wait for one another (deadlock: the Deadlock that checks)."""
        while waiting_for:
            pipes = {self._pipes[rank]: rank for rank in waiting_for}
            ends = {self._processes[rank].sentinel: rank for rank in self.alive}
            limit = None if until is None else max(0.0, until - time.monotonic())
            limit = LOOK if deadlock else limit
            ready = connection.wait([*pipes, *ends], limit)
            for pipe in ready:
                if pipe not in pipes:
                    continue
                with self._whole():
                    try:
                        reply = pipe.recv_bytes()
                    except (EOFError, ConnectionResetError):
                        continue
                    rank, number = pipes[pipe], int.from_bytes(reply[: worker.NUMBER], "little")
                    if number == self._asked[rank]:  # otherwise the reply to an abandoned request
                        replies[rank] = unpickled(reply[worker.NUMBER :])
                        waiting_for.discard(rank)
            for rank in [rank for sentinel, rank in ends.items() if sentinel in ready]:
                if not self.may_die:
                    raise self._dead()
                self._bury(rank)
                if rank in waiting_for:
                    replies[rank] = self._deaths[rank]
                    waiting_for.discard(rank)
            if not ready and not (deadlock and not self._wait_for_ever(waiting_for, deadlock)):
                return
            if stop_at_failure and failures(replies):
                return

    def _wait_for_ever(self, ranks, deadlock):
        """Whether these ranks are all asleep, each of them in a collective."""
        looks = deadlock.look([self._processes[rank].pid for rank in ranks])
        if looks == 0 or looks % LOOKS:
            return False
        if looks >= SURE and self.size > 1:
            return True
        stacks = diagnosis.stacks(self._files, ranks, self._signal)
        deadlock.disturbed()
        return all(diagnosis.collective(stacks.get(rank, ())) for rank in ranks)

    def _failure(self, on, waiting_for, replies):
        """After a rank has failed, let the others end, rejoin the group, return the RankError."""
        locked = not failures(replies)
        if not locked:
            self._collect(waiting_for, replies, time.monotonic() + GRACE)
        until = time.monotonic() + PATIENCE  # if all have lost a rank that is slow to say why
        while waiting_for and not locked and all(
            map(diagnosis.consequence, failures(replies).values())
        ):
            if time.monotonic() > until:
                break
            self._collect(waiting_for, replies, until, stop_at_failure=True)
        stacks = diagnosis.stacks(self._files, waiting_for, self._signal)
        first = dict(replies)
        hung = locked or any(diagnosis.timed_out(reply) for reply in first.values())
        if locked:
            self._stop("they waited for one another")
        else:
            self._release(waiting_for, replies, self.timeout, interrupt=hung)
        self._rejoin()
        limit = self.timeout if hung else None
        text = diagnosis.failure(
            on, first, stacks, replies, size=self.size, limit=limit, ended=self._stopped,
            grouped=not self._deaths, locked=locked,
        )
        return RankError(text, failures(first))

    def _release(self, waiting_for, replies, seconds, interrupt):
        """End what still runs. A rank that leaves the group frees the ranks that wait for it."""
        deadline = time.monotonic() + seconds
        if interrupt:
            self._signal(waiting_for, signal.SIGINT)
            deadline = time.monotonic() + PATIENCE
        left = set()
        while waiting_for and time.monotonic() < deadline:
            idle = set(self.alive) - waiting_for - left
            self._request_all(idle, "leave")
            left |= idle
            self._collect(waiting_for, replies, time.monotonic() + 0.2)
        if waiting_for:
            names = diagnosis.label(sorted(waiting_for), self.size)
            self._stop(f"{names} did not end after a failure and had to be killed")

    def _rejoin(self):
        """Create the process group again, which is useless after a failure; variables are kept.
        After a death, the remaining ranks decide for themselves whether to have a group."""
        self._look_for_folder()
        if self._stopped:
            return
        self._generation += 1
        self._request_all(self.alive, "leave")
        if not self._deaths:
            self._request_all(self.alive, "join", self._generation)

    def _request_all(self, ranks, *request):
        ranks, replies = set(ranks), {}
        self._send(ranks, worker.dumps(request))
        self._collect(ranks, replies, time.monotonic() + self.timeout + worker.JOIN_TIMEOUT)
        if ranks:
            names = diagnosis.label(sorted(ranks), self.size)
            self._stop(f"{names} did not answer and had to be killed")

    def _interrupt(self, waiting_for, replies):
        """Interrupt the ranks, because the kernel was interrupted."""
        if self._stopped:
            return
        try:
            self._release(waiting_for, replies, PATIENCE, interrupt=True)
            self._rejoin()
        except KeyboardInterrupt:
            self._stop("a second interrupt came before they had finished")
            raise

    def _bury(self, rank):
        """Record the death of a rank that may die."""
        process = self._processes[rank]
        process.join(5.0)  # its exit code comes through the forkserver
        self._deaths[rank] = Dead(process.exitcode)

    def _dead(self):
        """After a process has ended on its own, end the others and return a RankError naming it."""
        if self._stopped:  # by another thread
            return self._not_running()
        # exit codes reach the kernel through the forkserver, a moment after the process is gone
        connection.wait([process.sentinel for process in self._processes], 5.0)
        time.sleep(0.05)  # for others that died with it
        codes = [process.exitcode for process in self._processes]
        text = diagnosis.deaths(self._files, codes)
        self._stop(text.splitlines()[0].rstrip("."))
        return RankError(text + "\nThe other ranks were ended too. Call ranks.restart().")

    def _signal(self, ranks, signum):
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signum)

    def _new_output(self, ranks):
        """The output of each rank since the last call: {rank: text}."""
        return {rank: self._files.new(rank, "out") for rank in ranks}


def unpickled(reply: bytes) -> Any:
    """The reply of a rank; a Failure if it arrived but cannot be unpickled here."""
    try:
        return cloudpickle.loads(reply)
    except Exception as error:
        what = f"the result was sent but cannot be read: {type(error).__name__}: {error}"
        return worker.Failure("UnpicklingError", what, ())


def failures(replies: dict[int, Any]) -> dict[int, worker.Failure]:
    """The replies that are failures."""
    return {rank: one for rank, one in replies.items() if isinstance(one, worker.Failure)}


def choose_devices(size: int, device: str | None) -> tuple[str, list[str]]:
    """(backend, device of each rank) for `size` ranks."""
    gpus = torch.cuda.device_count()
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'device {device!r} is unknown: give "cpu", "cuda" or None')
    if device == "cuda" and gpus < size:
        raise ValueError(f'{size} ranks need {size} GPUs but this machine has {gpus}: device="cpu"')
    if device != "cpu" and gpus >= size:
        return "nccl", [f"cuda:{rank}" for rank in range(size)]
    if device is None and gpus:
        print(f"{size} ranks and {gpus} GPU(s): the ranks run on the CPU, with gloo.")
    return "gloo", ["cpu"] * size


def start_forkserver() -> multiprocessing.context.BaseContext:
    """Start the forkserver, with torch imported: 1 to 3 s for a kernel's first pool, then 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # ranks share the cores: more threads would be slower
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


class ForkedRank:
    """A rank's process and our end of its pipe, in the form `supervise.end` takes."""

    def __init__(self, process: multiprocessing.process.BaseProcess, pipe: connection.Connection):
        self._process, self._pipe = process, pipe

    def close_input(self) -> None:
        self._pipe.close()

    def wait(self, seconds: float = 5.0) -> bool:
        self._process.join(seconds)
        return self._process.exitcode is not None

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        pass  # the forkserver is its parent


def end_ranks(
    processes: Iterable[multiprocessing.process.BaseProcess],
    pipes: Iterable[connection.Connection],
    folder: str,
) -> None:
    """Close the pipes, so that idle ranks end on their own, and kill the rest."""
    end(map(ForkedRank, processes, pipes), 0.3)
    shutil.rmtree(folder, ignore_errors=True)


def device() -> torch.device:
    """The torch.device of the rank that calls this; in the kernel, the CPU."""
    return worker.device
