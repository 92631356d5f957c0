"""The board of a class under load: many learners report, as their labs would, to a real board.

    python -m tests.bench.bench_class           # 200 learners, 10 reports per second, 5 minutes
    python -m tests.bench.bench_class --kill    # the board is killed halfway and restarted

Reports arrive at random moments (Poisson), whatever the board is doing; the lab's own client sends
each over its own connection, and again until the board accepts it. The instructor's page listens.
In the end, the board's file must hold every report once.
"""

import argparse
import http.client
import os
import random
import sqlite3
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from tests.classroom.boards import RunningBoard, check, message, prediction
from utils.classroom.join import Away, read_address
from utils.course.progress import parts
from utils.serving import load

CONNECTIONS = 32  # in flight, at most
AGAIN = 0.2  # seconds until a report is sent again


class Learners:
    """Send reports of learner `i % count`; each learner numbers its reports in order."""

    def __init__(self, address: str, count: int) -> None:
        self.address, self.count = read_address(address), count
        self.checks = [name for part in parts() for name in part.checks]
        self.guesses = [name for part in parts() for name in part.predictions]
        self.locks = [threading.Lock() for _ in range(count)]
        self.numbers = defaultdict(int)
        self.answers: list[float] = []  # seconds of each answered request
        self.again = 0

    def send(self, i: int) -> str:
        learner, draw = i % self.count, random.Random(i)
        with self.locks[learner]:
            self.numbers[learner] += 1
            number = self.numbers[learner]
            if draw.random() < 0.3:
                value = draw.lognormvariate(2, 1)
                one = prediction(number, value, draw.choice(self.guesses), measured=value * 1.1)
            else:
                done = draw.random() < 0.4
                symptom = "" if done else f"with {i % 6 + 1} ranks: rank 0 says {i}, not 42"
                one = check(number, draw.choice(self.checks), done=done, symptom=symptom)
            content = message(one, alias=f"learner {learner}", learner=f"{learner:032x}")
            while True:
                begin = time.perf_counter()
                try:
                    status, said, _ = self.address.ask("POST", "/report", content)
                    self.answers.append(time.perf_counter() - begin)
                    if status == 200:
                        return ""
                    raise RuntimeError(f"{status} {said}")
                except Away:
                    self.again += 1
                    time.sleep(AGAIN)


def look_on(board: RunningBoard, events: list[int], stop: threading.Event) -> None:
    """The instructor's page: count the bytes of events, and reconnect after a restart."""
    while not stop.is_set():
        try:
            connection = http.client.HTTPConnection("127.0.0.1", board.port, timeout=15)
            connection.request("GET", "/events", headers={"Cookie": board.enter()})
            answer = connection.getresponse()
            while (line := answer.readline()) and not stop.is_set():
                events[0] += len(line)
        except (OSError, http.client.HTTPException):
            time.sleep(AGAIN)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--learners", type=int, default=200)
    parser.add_argument("--rate", type=float, default=10.0, help="reports a second of them all")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kill", action="store_true", help="SIGKILL in the middle, then restart")
    options = parser.parse_args()
    stop, events = threading.Event(), [0]
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningBoard(Path(folder) / "board.sqlite", "--minutes", "90") as board,
    ):
        learners = Learners(board.join, options.learners)
        page = threading.Thread(target=look_on, args=(board, events, stop))
        page.start()

        def kill() -> None:
            board.kill()
            board.start()

        timer = threading.Timer(options.seconds / 2, kill)
        if options.kill:
            timer.start()
        found = load.run(
            learners.send, CONNECTIONS, seconds=options.seconds, rate=options.rate,
            limit=options.seconds + 60, count=len,
        )
        timer.cancel()
        stop.set()
        shown = sum(len(row["checks"]) for row in board.learners().values())
        board.kill()
        page.join()
        with sqlite3.connect(board.file) as file:
            kept = file.execute("select sum(reports), count(*) from learners").fetchone()
            states = file.execute("select count(*) from states where kind = 'check'").fetchone()[0]
        sent = sum(learners.numbers.values())
    s, times = found.summary, sorted(1e3 * one for one in learners.answers)
    per = {p: times[min(len(times) - 1, int(p / 100 * len(times)))] for p in (50, 95, 99)}
    print(f"machine: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} processes")
    print(f"{sent:,} reports of {kept[1]} learners in {found.seconds:.0f} s, {s['errors']} failed")
    print("answer: " + ", ".join(f"{ms:.1f} ms (p{p})" for p, ms in per.items()), end="")
    print(f", {times[-1]:.0f} ms at most; sent again: {learners.again}")
    print(f"from arrival to taken: {1e3 * s['latency_p50']:.1f} ms (p50), ", end="")
    print(f"{1e3 * s['latency_p99']:.1f} ms (p99); events for the page: {events[0] / 1e6:.1f} MB")
    right = kept[0] == sent and not s["errors"] and shown == states
    print("nothing is lost, each counts once" if right else f"WRONG: {kept[0]} of {sent} are kept")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
