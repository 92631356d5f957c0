"""Given: the leader's side of the ranks: N processes, a pipe to each, answers from rank 0.

    ranks = Ranks(folder, size=2, slots=4)
    token = ranks.prefill(0, [312, 7, 90])        # what a Shard has, computed by all ranks
    ranks.close()

A command is one line of JSON, the same for every rank:

    {"do": "prefill", "slot": 0, "tokens": [312, 7, 90]}
    {"do": "decode", "slots": [0, 3], "tokens": [4, 11]}

and the answer one line of rank 0: {"tokens": [4]}, or {"error": "..."} where the shard refused.
"""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

START = 60.0  # seconds until all ranks must be ready


class Ranks:
    def __init__(self, folder, size, slots, seconds=20.0):
        """seconds: within which an answer must come."""
        self.folder, self.seconds, self.broken = Path(folder), seconds, None
        meeting, self.ranks = f"{folder}/meeting-{os.getpid()}", []
        given = {"size": size, "slots": slots, "meeting": meeting, "seconds": seconds}
        try:
            for rank in range(size):
                self.ranks.append(Rank(self.folder, rank, **given))
            pids = [str(rank.pid) for rank in self.ranks]
            (self.folder / "ranks").write_text(" ".join(pids))  # for the checks
            for rank in self.ranks:
                rank.read(START)  # it is ready
        except BaseException:
            self.close()
            raise

    def prefill(self, slot, tokens):
        return self.ask({"do": "prefill", "slot": slot, "tokens": tokens})[0]

    def decode(self, slots, tokens):
        return self.ask({"do": "decode", "slots": slots, "tokens": tokens})

    def ask(self, command):
        """The command to every rank, the answer from rank 0."""
        if self.broken:
            raise RuntimeError(self.broken)
        try:
            for rank in self.ranks:
                rank.write(command)
            answer = json.loads(self.ranks[0].read(self.seconds))
        except (OSError, RuntimeError, ValueError) as error:
            ended = [rank for rank in self.ranks if rank.has_ended()]
            self.broken = ended[0].last_words() if ended else str(error)
            raise RuntimeError(self.broken) from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["tokens"]

    def close(self):
        """The pipes close: that is the ranks' sign to end. Who does not is killed."""
        for rank in self.ranks:
            rank.hang_up()
        until = time.monotonic() + 3
        for rank in self.ranks:
            while not rank.has_ended() and time.monotonic() < until:
                time.sleep(0.01)
            rank.end()


class Rank:
    """A new rank's process, and the leader's end of its pipe."""

    def __init__(self, folder, number, **given):
        self.folder, self.number = folder, number
        self.pipe = socket.socket(socket.AF_UNIX)
        self.pipe.connect(str(folder / "forkserver"))  # see start_rank.py
        self.lines = self.pipe.makefile("rb")
        self.write({"folder": str(folder), "rank": number, **given})
        self.pid = int(self.read(START))

    def write(self, command):
        self.pipe.sendall(json.dumps(command).encode() + b"\n")

    def read(self, seconds):
        """One line. Raises RuntimeError."""
        self.pipe.settimeout(seconds)
        try:
            line = self.lines.readline()
        except TimeoutError:
            raise RuntimeError(f"no answer from rank {self.number} within {seconds:g} s") from None
        if not line.endswith(b"\n"):
            raise RuntimeError(self.last_words())
        return line

    def has_ended(self):
        """Whether its process has, which alone holds the other end of the pipe."""
        self.pipe.settimeout(0)
        try:
            return not self.pipe.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def last_words(self):
        """What its process said last."""
        log = self.folder / f"log-{self.number}"
        said = log.read_text(errors="replace").strip().splitlines()
        return f"rank {self.number} has ended. {said[-1] if said else 'It said nothing.'}"

    def hang_up(self):
        with suppress(OSError):
            self.pipe.shutdown(socket.SHUT_WR)

    def end(self):
        if not self.has_ended():
            os.kill(self.pid, signal.SIGKILL)
        self.lines.close()
        self.pipe.close()
