"""The leader's side of the ranks: N processes that run each step together, or die together.

    group = RankGroup(version, EngineConfig(max_num_seqs=16))
    group.ready()                                            # LoadError, RankDied
    group.send(step.command())
    tokens = group.receive()                                 # RankDied, at once or at step_seconds
    group.close()                                            # no process is left

A rank runs `worker.py` of this file's folder in Python, with pipes for commands and answers, and a
temporary file for the rendezvous. The ranks' parent is a further process, which imports torch for
all of them and reports how each ends. When a rank dies or stops, the others wait for it in a
collective; so the leader watches all ranks, kills the rest, and reports which failed first.
"""

import contextlib
import functools
import json
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from utils.ranks.supervise import Child, ChildEnded, Pipes, end
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.version import LoadError, Version

ROOT = Path(__file__).resolve().parents[3]  # the folder of `utils`: the workshop, or a version
# Makes PyTorch request pages of 2 MiB from Linux: with pages of 4 KiB, a CPU spends a tenth of a
# decode step on translating the addresses of keys and values.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
# First on the path, so that a rank runs the same files as its leader, whatever is installed.
START = """
import json, sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from utils.serving.engine.worker import main
main(json.loads(sys.argv[2]))
"""


class RankDied(RuntimeError):
    """A rank ended or did not answer; the message says which, and why."""


class WakeUp:
    """Lets any thread interrupt the thread that waits for the ranks."""

    def __init__(self):
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake up anyway
            self._writer.send(b".")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(1 << 16)


class Rank(Pipes):
    """Our ends of a rank's pipes; `theirs` are the rank's ends, to be inherited."""

    def __init__(self):
        commands, to = os.pipe()
        of, answers = os.pipe()
        super().__init__(open(to, "wb"), open(of, "rb"), tempfile.TemporaryFile())  # noqa: SIM115
        self.theirs = commands, answers, os.dup(self._errors.fileno())
        os.set_blocking(to, False)
        self._room = select.poll()
        self._room.register(to, select.POLLOUT)

    def tell(self, command: dict, seconds: float) -> None:
        """Send a command. Raises ChildEnded if the rank has ended, TimeoutError if it does not
        read."""
        data, deadline = memoryview(pickle.dumps(command)), time.monotonic() + seconds
        while data:
            if not self._room.poll(1000 * max(0, deadline - time.monotonic())):
                raise TimeoutError
            try:
                data = data[os.write(self._to.fileno(), data) :]
            except (BrokenPipeError, ConnectionResetError):
                raise ChildEnded from None

    def listen(self) -> None:
        """Read the bytes that have arrived. Raises ChildEnded."""
        data = os.read(self.fileno(), 1 << 20)
        if not data:
            raise ChildEnded
        self._unread += data

    def answer(self) -> dict | None:
        """The next answer that has arrived; None if it is incomplete."""
        size = 4 + int.from_bytes(self._unread[:4], "little")
        if len(self._unread) < max(5, size):
            return None
        data, self._unread = self._unread[4:size], self._unread[size:]
        return pickle.loads(data)

    def handed_over(self) -> None:
        """Close our copies of the rank's ends, once it has inherited them."""
        for end_of_it in self.theirs:
            os.close(end_of_it)
        self.theirs = ()

    def close(self) -> None:
        self.handed_over()
        super().close()


class RankGroup:
    """The ranks of one version of a model, as processes: call `ready` before the first step.

    Create, use and close it in one thread: on Linux a rank ends with the thread that started it.

    Raises LoadError if the version cannot be loaded, RankDied if a rank fails.
    """

    def __init__(self, version: Version, config: EngineConfig):
        self.size = version.tp
        self.start_seconds, self.step_seconds = config.start_seconds, config.step_seconds
        self.threads = config.threads or max(1, (cores() - 1) // self.size)
        self.pids = []  # process ids by rank, once known
        self.blocks, self.ahead = 0, 1  # blocks of the cache, steps that may be in flight; likewise
        self._parent, self._ranks, self._ended = None, [], {}  # _ended: {rank: exit status}
        self._meeting = tempfile.mkdtemp(prefix="ranks-")
        try:
            for _ in range(self.size):
                self._ranks.append(Rank())
            theirs = [rank.theirs for rank in self._ranks]
            self._parent = Child(
                [python(), "-c", START, str(ROOT), json.dumps(theirs)],
                env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(self.threads)},
                fds=sum(theirs, ()),
            )
            for rank in self._ranks:
                rank.handed_over()
            self._outputs = [rank.fileno() for rank in self._ranks]
            self._poll = select.poll()
            for output in self._outputs:
                self._poll.register(output, select.POLLIN)
            setup = {
                "folder": str(version.folder.resolve()), "config": asdict(config),
                "threads": self.threads, "meeting": f"{self._meeting}/file",
                "seconds": max(self.start_seconds, 2 * self.step_seconds),
            }
            for rank in range(self.size):
                self._tell(rank, setup | {"rank": rank})
        except BaseException:
            self.close()
            raise

    def ready(self) -> None:
        """Wait until all ranks have loaded their shard."""
        answer = self.receive(self.start_seconds)
        self.blocks, self.ahead = answer["blocks"], answer["ahead"]
        if "eager" in answer:
            _say(f"decode steps run in PyTorch, which is slower: {answer['eager']}")
        self._listen(self.step_seconds)  # the parent's first message: the process ids
        shutil.rmtree(self._meeting, ignore_errors=True)

    def send(self, command: dict) -> None:
        """Send the same command to every rank."""
        for rank in range(self.size):
            self._tell(rank, command)

    def receive(self, seconds: float | None = None) -> dict:
        """Rank 0's answer to the oldest unanswered command, once all ranks have answered it."""
        seconds = self.step_seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        answers, silent = {}, set(range(self.size))
        while True:
            for rank in tuple(silent):
                if (answer := self._ranks[rank].answer()) is not None:
                    answers[rank] = answer
                    silent.remove(rank)
                    if "at" in answer:
                        raise self._failure(rank, answer)
            if not silent:
                return answers[0]
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankDied(self._who_is_late(silent, seconds))
            for output, _ in self._poll.poll(1000 * left):
                rank = self._outputs.index(output)
                try:
                    self._ranks[rank].listen()
                except ChildEnded:
                    raise RankDied(self._who_died(rank)) from None

    def wait(self, wake_up: WakeUp) -> None:
        """Wait until woken; raise RankDied if a rank ends in the meantime."""
        self._poll.register(wake_up, select.POLLIN)
        ready = [descriptor for descriptor, _ in self._poll.poll()]
        self._poll.unregister(wake_up)
        wake_up.clear()
        for rank, output in enumerate(self._outputs):
            if output in ready:  # no answer is due, so this is the end of its pipe
                raise RankDied(self._who_died(rank))

    def close(self) -> None:
        """End the ranks: idle ones exit by themselves when their pipe closes; kill the others."""
        for rank in self._ranks:
            rank.close_input()
        end([self._parent] if self._parent else [], 0.3)
        for rank in self._ranks:
            rank.close()
        self._parent, self._ranks, self.pids = None, [], []
        shutil.rmtree(self._meeting, ignore_errors=True)

    def kill(self) -> None:
        """End the ranks from another thread; a waiting `receive` raises RankDied."""
        if parent := self._parent:
            parent.kill()  # and all of its process group

    # --- one rank -------------------------------------------------------------------------------

    def _tell(self, rank, message):
        # a pipe buffers 64 KiB: a longer chunk of a prompt waits until the rank reads
        try:
            self._ranks[rank].tell(message, self.step_seconds)
        except TimeoutError:
            raise RankDied(self._who_is_late({rank}, self.step_seconds)) from None
        except ChildEnded:
            raise RankDied(self._who_died(rank)) from None

    # --- what went wrong ------------------------------------------------------------------------

    def _failure(self, rank, answer):
        """The error of the rank that failed first: its report has arrived when others report."""
        failures = {rank: answer}
        for other in set(range(self.size)) - {rank}:
            with contextlib.suppress(ChildEnded, BlockingIOError):
                os.set_blocking(self._outputs[other], False)
                self._ranks[other].listen()
            while (answer := self._ranks[other].answer()) is not None:
                if "at" in answer:
                    failures[other] = answer
        rank, answer = min(failures.items(), key=lambda failure: failure[1]["at"])
        if "load_error" in answer:
            return LoadError(answer["load_error"])
        return RankDied(self._who_died(rank, answer["error"]))

    def _who_died(self, rank, error=None):
        """Names the rank to blame: one that was killed, rather than one whose collective failed as
        a result.

        `rank` has ended or is about to, so its status will arrive, later on a busy machine; that of
        a killed rank arrives at most half a second after it.
        """
        deadline, known = time.monotonic() + self.step_seconds, False
        while True:
            killed = [r for r in range(self.size) if (self._status(r) or 0) < 0]
            if killed:
                code = -self._status(killed[0])
                return f"{self._name(killed[0])} was killed by {signal.Signals(code).name}"
            if not known and self._status(rank) is not None:
                deadline, known = time.monotonic() + 0.5, True
            if len(self._ended) == self.size or time.monotonic() > deadline:
                break
            self._listen(0.01)
        if error is not None:
            return f"{self._name(rank)} failed: {error}"
        who = self._ranks[rank] if rank in self._ended else self._parent
        return f"{self._name(rank)} ended with status {self._status(rank)}: {who.last_words()}"

    def _listen(self, seconds):
        """Read one message from the ranks' parent, if it arrives within `seconds`."""
        try:
            news = json.loads(self._parent.answer(seconds))
        except TimeoutError:
            return
        except ChildEnded:
            time.sleep(0.01)
            return
        if "pids" in news:
            self.pids = news["pids"]
        else:
            self._ended[news["rank"]] = news["status"]

    def _status(self, rank):
        """A rank's exit status; None while it runs; the parent's, if that has ended."""
        return self._ended.get(rank, self._parent.returncode)

    def _who_is_late(self, ranks, seconds):
        stopped = [rank for rank in sorted(ranks) if self.pids and _is_stopped(self.pids[rank])]
        if stopped:
            return f"{self._name(stopped[0])} is stopped: no answer in {seconds:g} seconds"
        names = ", ".join(str(rank) for rank in sorted(ranks))
        ranks_ = "ranks" if len(ranks) > 1 else "rank"
        return f"{ranks_} {names} of {self.size} did not answer in {seconds:g} seconds"

    def _name(self, rank):
        process = f" (process {self.pids[rank]})" if self.pids else ""
        return f"rank {rank} of {self.size}{process}"


def python() -> str:
    """The interpreter for ranks. If Python is embedded, as in a server, sys.executable is another
    program; then it is the first python3 on PATH."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise RankDied("there is no python3 on PATH to run the ranks")
    return found


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache  # once, however often ranks are started again
def _say(sentence):
    print(sentence, file=sys.stderr, flush=True)


def _is_stopped(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:  # not Linux, or gone
        return False
