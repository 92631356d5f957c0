"""Reports the ledger to the board, in its own process next to JupyterLab.

    python -m utils.classroom.reporter KEY      # of a class in class.json; `make lab CLASS=…`

It looks at the ledger every LOOK seconds and sends all of it when it has changed: a ledger is
small, and is on the learner's disk. A board that is down, slow, full or refuses costs the lab
nothing: the reporter waits, longer each time, up to a minute, and then sends the ledger as it is.
It ends when its standard input closes, that is, with the process that started it, however that
ends. It prints a line to standard error whenever something changes.
"""

import contextlib
import random
import sys
import threading
import time
from pathlib import Path

from utils.classroom import reports
from utils.classroom.join import Away, Membership, memberships, read_address
from utils.course import ledger

LOOK = 1.0  # seconds between two looks at the ledger
FIRST, LONGEST = 1.0, 60.0  # seconds that it waits after a failure, and after many
STRANGER = 300.0  # seconds, if the board does not know the token: it counts wrong ones


class Reporter:
    """Reports as `member`; `send` neither waits nor raises."""

    def __init__(self, member: Membership) -> None:
        self.member, self.address = member, read_address(member.address)
        self.sent: tuple | None = None  # of the ledger that the board has
        self.pause, self.until = FIRST, 0.0
        self.said = ""

    def send(self) -> None:
        """Send the ledger if the board does not have it and the wait is over."""
        if time.monotonic() < self.until:
            return
        try:
            now = _signature(ledger.home() / "ledger.json")
            if now == self.sent:
                return
            found = ledger.peek()
            told = [] if found is None else reports.of_ledger(found)
            status, content, after = self.address.ask("POST", "/report", self._message(told))
            if status == 200:
                self.sent, self.pause = now, FIRST
                self._say("the board has everything")
                return
            reason = f"the board says {status}: {str(content.get('error', ''))[:200]}"
            wait = STRANGER if status == 401 else float(after) if after.isdigit() else 0.0
        except Away as error:
            reason, wait = f"the board does not answer ({error})", 0.0
        except (OSError, ledger.LedgerError) as error:
            reason, wait = f"the ledger cannot be read ({error})", 0.0
        self._say(f"{reason}; trying again")
        wait = max(min(wait, STRANGER), self.pause * random.uniform(1, 1.5))
        self.until = time.monotonic() + wait
        self.pause = min(2 * self.pause, LONGEST)

    def _message(self, told: list[dict]) -> dict:
        return {
            "learner": self.member.learner, "alias": self.member.alias, "now": time.time(),
            "reports": told,
        }

    def _say(self, text: str) -> None:
        if text != self.said:
            with contextlib.suppress(OSError):  # a full disk
                print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)
            self.said = text


def _signature(path: Path) -> tuple:
    """Differs whenever the file does: every change replaces the file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def watch(member: Membership, stop: threading.Event) -> None:
    """Report until `stop`, then once more."""
    reporter = Reporter(member)
    while not stop.is_set():
        reporter.send()
        stop.wait(LOOK)
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
    watch(Membership(**found), stop)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
