"""The one file that records a learner's predictions and checks, for all lessons and labs.

It is `ledger.json` in the folder named by the environment variable KINTSUGI_HOME, by default
`.kintsugi/` at the root of the repository (git ignores it):

    {"numbering": 3, "predictions": {name: {...}}, "checks": {name: true or false},
     "tries": {name: {"count": 3, "at": seconds since 1970, "symptom": "…"}}, "help": {...}}

`tries` counts runs of checks: `at` is the time of the last symptom, or when the answer became
right. `help` is the learner's request (`utils/course/hand.py`).

Names begin with a lesson's number. Lessons have been renumbered twice: 07 to 14, then 16, which
became 16 and 17. A file of an earlier numbering (the first has none) is read with the new names.

Several notebooks may write at once: a change locks, reads, edits and writes the whole file, and the
new file replaces the old one atomically, so a reader never sees half of it.
"""

import contextlib
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from utils.paths import ROOT

CLASS = "KINTSUGI_CLASS"  # environment variable of a kernel: its alias in the class
PARTS = ("predictions", "checks", "tries", "help")
NUMBERING = 4
RENUMBERED = {"07": "08", "08": "09", "09": "10", "12": "14", "14": "16"}  # 1 to 2
RENAMED = {  # 2 to 3; "lab 16 …" and "16 …" otherwise keep their names
    "lab 16a config.pbtxt": "lab 17a config.pbtxt",
    "lab 16b a model of your own": "lab 17b a model of your own",
    "lab 16b its client": "lab 17b its client",
    "lab 16c loop of a rank": "lab 16a loop of a rank",
    "lab 16d continuous batching": "lab 16b continuous batching",
    "lab 16e goal": "lab 17c goal",
    "lab 16 throughput of eight clients": "lab 17 throughput of eight clients",
    "16 tokens a second, 16 clients over 1": "17 tokens per second, 16 clients over 1",
    "16 in flight at half of the rate": "17 in flight at half of the rate",
    # 3 to 4, with the units
    "06 numbers a token for the loss": "06 elements per token for the loss",
    "14 numbers in a prompt": "14 elements in a prompt",
}
UNITS = re.compile(r"\b(bits|bytes|tokens|FLOPs|ms) a (?=byte|parameter|second|step)")  # 3 to 4


class LedgerError(RuntimeError):
    """The ledger's folder cannot be used. The message names it and the fix."""


def home() -> Path:
    """The folder of the ledger; it need not exist yet."""
    return Path(os.environ.get("KINTSUGI_HOME") or ROOT / ".kintsugi").expanduser()


def alias() -> str | None:
    """The learner's alias in the class that this lab reports to; None without a class.

    A kernel of `make lab CLASS=…` has it in its environment. In a seat of a hub, a terminal
    reports; while it does, it keeps the alias in a locked file.
    """
    with contextlib.suppress(OSError), (home() / "alias").open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or None
    return os.environ.get(CLASS)


def read() -> dict:
    """The ledger's content. A file that cannot be read is renamed, with a message."""
    content = peek()
    if content is None:
        _keep_aside(home() / "ledger.json")
        return _whole({})
    return content


def peek() -> dict | None:
    """As `read`, without changing anything: None for a file that cannot be read."""
    try:
        return _whole(json.loads((home() / "ledger.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return _whole({})
    except (ValueError, AttributeError):
        return None
    except OSError as error:
        raise LedgerError(_unusable(error)) from None


def counts(entry: dict) -> bool:
    """Whether an entry of "predictions" counts: a number entered before its reveal."""
    return entry.get("value") is not None and not entry.get("late", False)


def note_check(content: dict, name: str, passed: bool, symptom: str) -> None:
    """Record the result of a check in a ledger's content; for `change`."""
    before = content["tries"].get(name, {})
    again = passed and content["checks"].get(name)  # it was right before
    content["checks"][name] = passed
    content["tries"][name] = {
        "count": before.get("count", 0) + 1,
        "at": before.get("at", time.time()) if again else time.time(),
        "symptom": "" if passed else symptom,
    }


def change(edit: Callable[[dict], None]) -> None:
    """Call `edit` on the content and write it; no other notebook can write in between."""
    try:
        home().mkdir(parents=True, exist_ok=True)
        with _lock(home() / "ledger.lock"):
            content = read()
            edit(content)
            content["numbering"] = NUMBERING
            _replace(home() / "ledger.json", content)
    except OSError as error:
        raise LedgerError(_unusable(error)) from None


def _whole(content: dict) -> dict:
    """The content with all of its parts. Raises ValueError if it does not have a ledger's form."""
    parts = [content.setdefault(part, {}) for part in PARTS]
    inner = [entry for part in ("predictions", "tries") for entry in content[part].values()]
    if not all(isinstance(entry, dict) for entry in [*parts, *inner]):
        raise ValueError("not the form of a ledger")
    return _renumbered(content)


def _renumbered(content: dict) -> dict:
    """The content with entries under earlier names moved to their current names."""
    numbering = content.get("numbering", 1)

    def new(name: str) -> str:
        known = re.match(r"(?:lab )?(\d\d)", name)
        if numbering == 1 and known:
            name = name.replace(known[1], RENUMBERED.get(known[1], known[1]), 1)
        return UNITS.sub(r"\1 per ", RENAMED.get(name, name))

    if numbering != NUMBERING:
        for part in PARTS:
            content[part] = {new(name): entry for name, entry in content[part].items()}
    return content


def _replace(path: Path, content: dict) -> None:
    """Write a temporary file, then rename it: a reader finds the old file or the new one."""
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _keep_aside(path: Path) -> None:
    number = 1
    while (aside := path.with_name(f"ledger-unreadable-{number}.json")).exists():
        number += 1
    with contextlib.suppress(FileNotFoundError):  # another notebook was faster
        path.rename(aside)
        print(f"The ledger could not be read. It is kept as {aside}, and a new one begins.")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        with contextlib.suppress(OSError):  # some network file systems have no locks: continue
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _unusable(error: OSError) -> str:
    reason = error.strerror or error
    return f"the ledger's folder {home()} cannot be used ({reason}): set KINTSUGI_HOME to another"
