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
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

START = 120.0  # seconds until all ranks must be ready


class Ranks:
    def __init__(self, folder, size, slots, seconds=20.0):
        """seconds: within which an answer must come."""
        self.folder, self.seconds, self.broken = Path(folder), seconds, None
        self.meeting = tempfile.mkdtemp(prefix="lab14-")
        python = shutil.which("python3")  # sys.executable is the server's stub here
        self.processes, self.buffer = [], b""
        for rank in range(size):
            command = [python, str(self.folder / "start_rank.py"), str(rank), str(size)]
            command += [str(slots), self.meeting, str(seconds)]
            with open(self.folder / f"log-{rank}", "wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
                )
            self.processes.append(process)
        (self.folder / "ranks").write_text(" ".join(str(p.pid) for p in self.processes))
        try:
            for rank in range(size):
                self.read(rank, START)  # its first line says that it is ready
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
            for process in self.processes:
                process.stdin.write(json.dumps(command).encode() + b"\n")
                process.stdin.flush()
            answer = json.loads(self.read(0, self.seconds))
        except (OSError, RuntimeError, ValueError) as error:
            ended = [r for r, process in enumerate(self.processes) if process.poll() is not None]
            self.broken = f"rank {ended[0]} has ended. {self.last_words(ended[0])}" if ended else ""
            self.broken = self.broken or str(error)
            raise RuntimeError(self.broken) from None
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["tokens"]

    def read(self, rank, seconds):
        """One line from a rank."""
        pipe, until, line = self.processes[rank].stdout, time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = max(0.0, until - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise RuntimeError(f"no answer from rank {rank} within {seconds:g} s")
            byte = os.read(pipe.fileno(), 1)
            if not byte:
                self.processes[rank].wait(5)
                raise RuntimeError(f"rank {rank} has ended. {self.last_words(rank)}")
            line += byte
        return line

    def last_words(self, rank):
        """What its process said last."""
        said = (self.folder / f"log-{rank}").read_text(errors="replace").strip().splitlines()
        return said[-1] if said else "It said nothing."

    def close(self):
        """The pipes close: that is the ranks' sign to end. Who does not is killed."""
        for process in self.processes:
            process.stdin.close()
        until = time.monotonic() + 3
        for process in self.processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        shutil.rmtree(self.meeting, ignore_errors=True)
