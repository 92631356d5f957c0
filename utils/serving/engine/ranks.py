"""The leader's side of the ranks: N processes that do one step together, or die together.

    group = RankGroup(version, EngineConfig(max_num_seqs=16))
    group.ready()                                            # LoadError, RankDied
    group.send(step.command())
    tokens = group.receive()                                 # RankDied, at once or at step_seconds
    group.close()                                            # no process is left

A rank is `worker.py` of the folder that this file stands in, run by Python: with pipes for commands
and answers, and a temporary file where the ranks meet. Their parent is one more process, which has
imported torch for all and says how each ends. When one of them dies or stops, the others wait for
it in a collective; so the leader watches all, kills the rest, and says who was first.
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
# PyTorch asks Linux for pages of 2 MiB: with those of 4 KiB a CPU spends a tenth of a decode step
# on finding where keys and values are.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
# First on the path, so that a rank's files are those of its leader, whatever is installed.
START = """
import json, sys
sys.path[:] = [sys.argv[1], *filter(None, sys.path)]
from utils.serving.engine.worker import main
main(json.loads(sys.argv[2]))
"""


class RankDied(RuntimeError):
    """A rank ended or did not answer; the message says which, and why."""


class WakeUp:
    """Lets any thread end the wait of the one that waits for ranks to speak."""

    def __init__(self):
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: there is enough to read
            self._writer.send(b".")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(1 << 16)


class Rank(Pipes):
    """Our ends of the pipes of a rank; `theirs` are its own, to hand over."""

    def __init__(self):
        commands, to = os.pipe()
        of, answers = os.pipe()
        super().__init__(open(to, "wb"), open(of, "rb"), tempfile.TemporaryFile())  # noqa: SIM115
        self.theirs = commands, answers, os.dup(self._errors.fileno())
        os.set_blocking(to, False)
        self._room = select.poll()
        self._room.register(to, select.POLLOUT)

    def tell(self, command: dict, seconds: float) -> None:
        """Raises ChildEnded if nobody reads there any more, TimeoutError if nobody does now."""
        data, deadline = memoryview(pickle.dumps(command)), time.monotonic() + seconds
        while data:
            if not self._room.poll(1000 * max(0, deadline - time.monotonic())):
                raise TimeoutError
            try:
                data = data[os.write(self._to.fileno(), data) :]
            except (BrokenPipeError, ConnectionResetError):
                raise ChildEnded from None

    def listen(self) -> None:
        """Reads what has come of its answers. Raises ChildEnded."""
        data = os.read(self.fileno(), 1 << 20)
        if not data:
            raise ChildEnded
        self._unread += data

    def answer(self) -> dict | None:
        """The next one that has come; None where it is not whole yet."""
        size = 4 + int.from_bytes(self._unread[:4], "little")
        if len(self._unread) < max(5, size):
            return None
        data, self._unread = self._unread[4:size], self._unread[size:]
        return pickle.loads(data)

    def handed_over(self) -> None:
        """They are somebody else's now; closed there, they are closed."""
        for end_of_it in self.theirs:
            os.close(end_of_it)
        self.theirs = ()

    def close(self) -> None:
        self.handed_over()
        super().close()


class RankGroup:
    """The ranks of one version of a model, as processes: call `ready` before the first step.

    Make, use and close it in one thread: on Linux a rank ends with the thread that started it.

    Raises LoadError where the version can not be loaded, RankDied where a rank fails.
    """

    def __init__(self, version: Version, config: EngineConfig):
        self.size = version.tp
        self.start_seconds, self.step_seconds = config.start_seconds, config.step_seconds
        self.threads = config.threads or max(1, (cores() - 1) // self.size)
        self.pids = []  # process ids by rank, once they are known
        self.blocks, self.ahead = 0, 1  # of the cache; steps that may be under way: likewise
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
        """Waits until all ranks have loaded their part."""
        answer = self.receive(self.start_seconds)
        self.blocks, self.ahead = answer["blocks"], answer["ahead"]
        if "eager" in answer:
            _say(f"decode steps go through PyTorch, which takes longer: {answer['eager']}")
        self._listen(self.step_seconds)  # who they are is the first that it says
        shutil.rmtree(self._meeting, ignore_errors=True)

    def send(self, command: dict) -> None:
        """The same command for every rank."""
        for rank in range(self.size):
            self._tell(rank, command)

    def receive(self, seconds: float | None = None) -> dict:
        """The answer of rank 0 to the oldest command that has none, once all have answered."""
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
        """Until somebody wakes it; RankDied when a rank ends meanwhile."""
        self._poll.register(wake_up, select.POLLIN)
        ready = [descriptor for descriptor, _ in self._poll.poll()]
        self._poll.unregister(wake_up)
        wake_up.clear()
        for rank, output in enumerate(self._outputs):
            if output in ready:  # it has nothing to say now: this is the end of its pipe
                raise RankDied(self._who_died(rank))

    def close(self) -> None:
        """Ends the ranks: idle ones end by themselves when their pipe closes, others are killed."""
        for rank in self._ranks:
            rank.close_input()
        end([self._parent] if self._parent else [], 0.3)
        for rank in self._ranks:
            rank.close()
        self._parent, self._ranks, self.pids = None, [], []
        shutil.rmtree(self._meeting, ignore_errors=True)

    def kill(self) -> None:
        """Ends the ranks from another thread; who waits in `receive` gets RankDied."""
        if parent := self._parent:
            parent.kill()  # and all of its process group

    # --- one rank -------------------------------------------------------------------------------

    def _tell(self, rank, message):
        # a pipe takes 64 KiB without a reader: a long chunk of a prompt waits for a rank to read
        try:
            self._ranks[rank].tell(message, self.step_seconds)
        except TimeoutError:
            raise RankDied(self._who_is_late({rank}, self.step_seconds)) from None
        except ChildEnded:
            raise RankDied(self._who_died(rank)) from None

    # --- what went wrong ------------------------------------------------------------------------

    def _failure(self, rank, answer):
        """The error of the rank that failed first: it has said so by the time that others do."""
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
        """Names the rank to blame: one that was killed, before one whose collective failed then.

        `rank` has ended or is about to, so its status is certain to come, later on a busy machine;
        that of a killed one comes within half a second more, if not before.
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
        """Takes what the parent of the ranks says within some seconds."""
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
        """A rank's exit status, None while it runs; without its parent it is that of the parent."""
        return self._ended.get(rank, self._parent.returncode)

    def _who_is_late(self, ranks, seconds):
        stopped = [rank for rank in sorted(ranks) if self.pids and _is_stopped(self.pids[rank])]
        if stopped:
            return f"{self._name(stopped[0])} is stopped: no answer in {seconds:g} seconds"
        names = ", ".join(str(rank) for rank in sorted(ranks))
        return f"rank {names} of {self.size} did not answer in {seconds:g} seconds"

    def _name(self, rank):
        process = f" (process {self.pids[rank]})" if self.pids else ""
        return f"rank {rank} of {self.size}{process}"


def python() -> str:
    """The interpreter for ranks. In an embedded one, as in a server, sys.executable is another
    program; then it is the first python3 on PATH."""
    if Path(sys.executable or "").name.startswith("python"):
        return sys.executable
    found = shutil.which("python3")
    if found is None:
        raise RankDied("there is no python3 on PATH to run the ranks with")
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
