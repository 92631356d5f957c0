"""Reports to the board what the ledger tells, as a process of its own beside JupyterLab.

    python -m utils.classroom.reporter KEY      # of a class in class.json; `make lab CLASS=…`

It looks at the ledger every LOOK seconds, queues what is new in an outbox on disk, and sends it in
order. A board that is away, slow, full or that refuses costs the lab nothing: the reporter waits,
ever longer up to a minute, and goes on. It ends when its standard input does, that is with whoever
started it, in whatever way that ends; what is left is sent the next time. Standard error gets a
line whenever something changes.
"""

import contextlib
import fcntl
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from utils.classroom import reports
from utils.classroom.join import Away, Membership, memberships, outbox_file, read_address
from utils.classroom.outbox import Outbox
from utils.course import ledger

LOOK = 1.0  # seconds between two looks at the ledger
FIRST, LONGEST = 1.0, 60.0  # seconds that it waits after a failure, and after many
STRANGER = 300.0  # seconds, where the board does not know the token: it counts wrong ones


class Reporter:
    """Reports as `member`; the two steps, `look` and `send`, neither wait nor raise."""

    def __init__(self, member: Membership) -> None:
        self.member, self.address = member, read_address(member.address)
        self.outbox: Outbox | None = None
        self.seen: tuple | None = None  # of the ledger, when it was noted last
        self.pause, self.until = FIRST, 0.0
        self.greeted = False  # the board shows who has joined and has nothing to report yet
        self.said = ""

    def look(self) -> None:
        """Queues what is new in the ledger."""
        try:
            now = _signature(ledger.home() / "ledger.json")
            if self.outbox is None:
                self.outbox = Outbox(outbox_file(self.address.key))
            if now != self.seen and (content := ledger.peek()) is not None:
                self.outbox.note(reports.of_ledger(content))
                self.seen = now
        except (sqlite3.Error, OSError, ledger.LedgerError) as error:
            self._say(f"the outbox cannot be written ({error}); trying again")

    def send(self) -> bool:
        """Sends the oldest reports if there are any and it is time; whether more can go at once."""
        if self.outbox is None or time.monotonic() < self.until:
            return False
        try:
            batch = self.outbox.first(reports.AT_ONCE)
            if not batch and self.greeted:
                return False
            status, content, after = self.address.ask("POST", "/report", self._message(batch))
            if status == 200:
                self.greeted, self.pause = True, FIRST
                if batch:
                    self.outbox.drop(batch[-1]["number"])
                self._say("the board has all" if len(batch) < reports.AT_ONCE else "sending")
                return len(batch) == reports.AT_ONCE
            reason = f"the board says {status}: {str(content.get('error', ''))[:200]}"
            if status in (400, 413) and batch:
                return self._refused(batch, reason)
            wait = STRANGER if status == 401 else float(after) if after.isdigit() else 0.0
        except Away as error:
            reason, wait = f"the board is away ({error})", 0.0
        except sqlite3.Error as error:
            reason, wait = f"the outbox cannot be written ({error})", 0.0
        self._say(f"{reason}; reports wait")
        wait = max(min(wait, STRANGER), self.pause * random.uniform(1, 1.5))
        self.until = time.monotonic() + wait
        self.pause = min(2 * self.pause, LONGEST)
        return False

    def _message(self, batch: list[dict]) -> dict:
        return {
            "learner": self.member.learner, "alias": self.member.alias, "outbox": self.outbox.id,
            "now": time.time(), "reports": batch,
        }

    def _refused(self, batch: list[dict], reason: str) -> bool:
        """Sends them one by one and puts aside what the board refuses: the rest must pass.

        Whether it got through all of them.
        """
        for one in batch:
            status, content, _ = self.address.ask("POST", "/report", self._message([one]))
            if status == 200:
                self.outbox.drop(one["number"])
            elif status in (400, 413):
                self.outbox.put_aside(str(content.get("error", reason))[:200])
                self._say(f"{reason}; put aside: {one['name']}")
            else:
                return False
        return True

    def _say(self, text: str) -> None:
        if text != self.said:
            with contextlib.suppress(OSError):  # a full disk
                print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
            self.said = text


def _signature(path: Path) -> tuple:
    """Differs when the file does: every change puts a new file in its place."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


@contextlib.contextmanager
def alone(key: str, stop: threading.Event) -> Iterator[None]:
    """Waits until no other reporter of this ledger serves the class; two labs share the outbox."""
    ledger.home().mkdir(parents=True, exist_ok=True)
    with open(outbox_file(key).with_suffix(".lock"), "w") as file:
        while not stop.is_set():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop.wait(LOOK)
            except OSError:  # some network file systems have no locks
                break
        yield


def watch(member: Membership, stop: threading.Event) -> None:
    """Reports until `stop`, then once more what is new."""
    reporter = Reporter(member)
    while not stop.is_set():
        reporter.look()
        if not reporter.send():
            stop.wait(LOOK)
    reporter.look()
    reporter.until = 0.0
    reporter.send()


def main(words: list[str]) -> int:
    (key,) = words
    found = memberships().get(key)
    if found is None:
        print(f"there is no class {key} in class.json", file=sys.stderr)
        return 2
    stop = threading.Event()

    def listen() -> None:
        with contextlib.suppress(OSError):
            while sys.stdin.buffer.raw.read(1024):
                pass
        stop.set()

    threading.Thread(target=listen, daemon=True).start()
    with alone(key, stop):
        watch(Membership(**found), stop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
