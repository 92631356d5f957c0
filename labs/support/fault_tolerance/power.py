"""Given: calls that `save` makes, seen one by one, and what a power cut at each would leave.

`Watch` tells of each call that changes a folder, before it happens; nothing is really synced while
it watches, so that many saves take no time. `Cuts` notes what is on the disk for certain: of a file
what it held when it was synced, of a folder the names that it had then.
"""

import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
FILLS = ("zeros", "nothing")  # what stands in a file that was not synced


class Watch:
    """In this process, until it ends: called(words) before each call that changes `folder`,
    synced(what) after an `os.fsync` of it, a path, None for `os.sync`."""

    def __init__(
        self,
        folder: Path,
        called: Callable[[str], None] = lambda words: None,
        synced: Callable[[os.stat_result | None], None] = lambda what: None,
    ):
        self._folder, self._called, self._synced = str(folder), called, synced
        self.busy = False  # True: nobody is told
        os.fsync = os.fdatasync = self._fsync
        os.sync = self._sync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, given: tuple) -> None:
        if self.busy or (event != "open" and event not in CHANGES):
            return
        if event == "open":
            path, _, flags = given
            if isinstance(path, int) or not (flags or 0) & WRITES:
                return
            if not os.path.abspath(os.fsdecode(path)).startswith(self._folder):
                return
        self._quietly(self._called, f"{event.removeprefix('os.')} {_name(given[0])}")

    def _fsync(self, file: Any) -> None:
        found = os.fstat(file if isinstance(file, int) else file.fileno())
        self._quietly(self._called, "fsync")
        self._quietly(self._synced, found)

    def _sync(self) -> None:
        self._quietly(self._called, "sync")
        self._quietly(self._synced, None)

    def _quietly(self, function: Callable, given: Any) -> None:
        before, self.busy = self.busy, True
        try:
            function(given)
        finally:
            self.busy = before


@dataclass(frozen=True)
class Entry:
    """What a name stands for. kind: "file", "folder" or "link"; number: of its inode."""

    kind: str
    number: int
    size: int
    target: str = ""


@dataclass(frozen=True)
class Cut:
    """A moment at which the power may be cut. begun, returned: steps of saves; names: {number of a
    folder: {name: Entry}}, those that are there and those that are certain; contents: {number of a
    file: its bytes}, certain ones."""

    when: str
    begun: int
    returned: int
    names: dict[int, dict[str, Entry]]
    certain: dict[int, dict[str, Entry]]
    contents: dict[int, bytes]

    def left(self, place: Path, root: int, names: str, fill: str) -> None:
        """Makes in `place` what is left. names: "all" that were there, or the "certain" ones;
        fill: one of FILLS."""
        place.mkdir()
        there = self.names if names == "all" else self.certain
        for name, entry in there.get(root, {}).items():
            path = place / name
            if entry.kind == "link":
                path.symlink_to(entry.target)
            elif entry.kind == "folder":
                self.left(path, entry.number, names, fill)
            else:
                unsynced = bytes(entry.size if fill == "zeros" else 0)
                path.write_bytes(self.contents.get(entry.number, unsynced))


class Cuts:
    """The cuts while `save` runs on `folder`: `begun` and `returned` are told to it."""

    def __init__(self, folder: Path):
        self._folder, self.root = folder, folder.stat().st_ino
        self._held: dict[int, int] = {}  # open files, so that no number is given twice
        self._certain, self._contents = {}, {}
        self.cuts: list[Cut] = []
        self.begun = self.returned = 0
        self._synced(None)
        self._watch = Watch(folder, self.note, self._synced)

    def note(self, when: str) -> None:
        """The power may be cut here."""
        self.cuts.append(
            Cut(when, self.begun, self.returned, self._now(), dict(self._certain),
                dict(self._contents))
        )

    def end(self) -> list[Cut]:
        """All cuts; from now on nothing is watched."""
        self._watch.busy = True
        return self.cuts

    def _synced(self, what: os.stat_result | None) -> None:
        now = self._now()
        for number in [*now, *self._held] if what is None else [what.st_ino]:
            if number in now:
                self._certain[number] = now[number]
            elif number in self._held:
                about = os.fstat(self._held[number])
                if stat.S_ISREG(about.st_mode):
                    self._contents[number] = os.pread(self._held[number], about.st_size, 0)

    def _now(self) -> dict[int, dict[str, Entry]]:
        """The names of each folder."""
        found, folders = {}, [str(self._folder)]
        while folders:
            folder = folders.pop()
            names = found[os.stat(folder).st_ino] = {}
            for one in os.scandir(folder):
                about = one.stat(follow_symlinks=False)
                if one.is_symlink():
                    names[one.name] = Entry("link", about.st_ino, 0, os.readlink(one.path))
                    continue
                kind = "folder" if one.is_dir() else "file"
                names[one.name] = Entry(kind, about.st_ino, about.st_size)
                if kind == "folder":
                    folders.append(one.path)
                if about.st_ino not in self._held:
                    self._held[about.st_ino] = os.open(one.path, os.O_RDONLY)
        return found


def _name(path: Any) -> str:
    return Path(os.fsdecode(path)).name if not isinstance(path, int) else ""
