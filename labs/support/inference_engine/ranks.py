"""Given: the leader's side of the ranks: N processes, a pipe to each, answers from rank 0.

    ranks = Ranks(folder, size=2, slots=4)
    token = ranks.prefill(0, [312, 7, 90])        # as in a Shard, computed by all ranks
    ranks.close()

A command is one line of JSON, the same for every rank:

    {"do": "prefill", "slot": 0, "tokens": [312, 7, 90]}
    {"do": "decode", "slots": [0, 3], "tokens": [4, 11]}

and the answer is one line from rank 0: {"tokens": [4]}, or {"error": "..."} if the shard refuses.
"""

import json
import os

from utils.ranks.supervise import Child, end
from utils.serving.engine.ranks import python

START = 60.0  # seconds until all ranks must be ready


class Ranks:
    def __init__(self, folder, size, slots, seconds=20.0):
        """seconds: time within which an answer must arrive."""
        self.seconds, self.broken, self.ranks = seconds, None, []
        meeting = f"{folder}/meeting-{os.getpid()}"
        given = {"folder": str(folder), "size": size, "slots": slots, "meeting": meeting}
        for rank in range(size):
            words = json.dumps({**given, "rank": rank, "seconds": seconds})
            self.ranks.append(Child([python(), f"{folder}/start_rank.py", words]))
        try:
            for number in range(size):
                self.read(number, START)  # it says "ready"
        except RuntimeError:
            self.close()
            raise

    def prefill(self, slot, tokens):
        return self.ask({"do": "prefill", "slot": slot, "tokens": tokens})[0]

    def decode(self, slots, tokens):
        return self.ask({"do": "decode", "slots": slots, "tokens": tokens})

    def ask(self, command):
        """Send the command to every rank; return the answer of rank 0."""
        if self.broken:
            raise RuntimeError(self.broken)
        answer = json.loads(self.read(0, self.seconds, json.dumps(command).encode()))
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["tokens"]

    def read(self, number, seconds, command=b""):
        """Send a command to all ranks and read a line from one. Raises RuntimeError."""
        try:
            for rank in self.ranks:
                if command:
                    rank.write_line(command)
            return self.ranks[number].answer(seconds)
        except (OSError, RuntimeError):
            self.broken = f"no answer from rank {number} within {seconds:g} s"
            for rank, process in enumerate(self.ranks):
                if process.wait(0.5):
                    self.broken = f"rank {rank} has ended. {process.last_words()}"
                    break
            raise RuntimeError(self.broken) from None

    def close(self):
        """Close the pipes, which tells the ranks to end; kill those that do not."""
        end(self.ranks, 3.0)
