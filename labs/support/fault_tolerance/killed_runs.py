"""Given: processes that are killed while they save, and what a power cut leaves of their files.

    apart(function, *args)     # in a fork of this process: its result, None if it was killed
    KillAt(byte=100).arm()     # this process dies when a file is about to become longer
    disk = Disk(folder); …; disk.after_a_power_cut(place)
"""

import linecache
import os
import pickle
import resource
import select
import signal
import stat
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from utils.course.assertions import Wrong, bitwise_equal, described
from utils.course.runner import load_answer

SECONDS = 10  # until a fork is ended
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def difference(right: dict, found: Any) -> str | None:
    """How a loaded state differs from the one that was saved; None: not at all."""
    if not isinstance(found, dict):
        return f"the state is {described(found)}, not a dict"
    for name in [*right, *found]:
        if name not in found or name not in right:
            return f"{described(name)} is {'missing' if name in right else 'not of this state'}"
        was, now = right[name], found[name]
        if not isinstance(was, torch.Tensor):
            if type(was) is not type(now) or repr(was) != repr(now):
                return f"{described(name)} is {described(now)}, and {described(was)} was saved"
        elif not isinstance(now, torch.Tensor):
            return f"{described(name)} is {described(now)}, not a tensor"
        elif (was.dtype, was.shape) != (now.dtype, now.shape):
            kinds = [f"{t.dtype} of shape {tuple(t.shape)}" for t in (now, was)]
            return f"{described(name)} is {kinds[0]}, and {kinds[1]} was saved"
        elif not bitwise_equal(was, now):
            return f"{described(name)} does not have the bits that were saved"
    return None


def loaded(answer: Any, folder: Path, states: dict[int, dict]) -> int:
    """The step that `load` gives, 0 where it gives None: with the state of that step, all its bits,
    or Wrong."""
    found = answer.load(folder)
    if found is None:
        return 0
    if not isinstance(found, tuple | list) or len(found) != 2 or type(found[0]) is not int:
        raise Wrong(f"load gives {described(found)}, and (step, state) or None is asked for.")
    step, state = found
    if step not in states:
        raise Wrong(f"load gives step {step}, which was never saved.")
    if wrong := difference(states[step], state):
        raise Wrong(f"load gives a state of step {step} that was never saved: {wrong}.")
    return step


# ---- a process of its own


def apart(function: Callable, *args: Any) -> Any:
    """function(*args) in a fork of this process: its result, None where it was killed; Wrong with
    what went wrong there."""
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child does not use them
        pid = os.fork()
    if not pid:
        try:
            said = outcome(function, args)
            with os.fdopen(sending, "wb") as pipe:
                pipe.write(said)
        finally:
            os._exit(0)
    os.close(sending)
    if not select.select([receiving], [], [], SECONDS)[0]:
        os.kill(pid, signal.SIGKILL)
        raise Wrong(f"no end after {SECONDS} s: an endless loop?")
    with os.fdopen(receiving, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    right, value = pickle.loads(said) if said else (True, None)
    if not right:
        raise Wrong(value)
    return value


def outcome(function: Callable, args: tuple) -> bytes:
    """(True, its result) or (False, what went wrong), pickled."""
    try:
        return pickle.dumps((True, function(*args)))
    except Wrong as error:
        return pickle.dumps((False, str(error)))
    except BaseException as error:
        place, frames = "", traceback.extract_tb(error.__traceback__)
        if own := [frame for frame in frames if Path(frame.filename).name == "checkpoint.py"]:
            line = linecache.getline(own[-1].filename, own[-1].lineno).strip()
            place = f" in {Path(own[-1].filename).name} line {own[-1].lineno} (`{line}`)"
        return pickle.dumps((False, f"{type(error).__name__}{place}: {error}"))


# ---- kills


def watch(called: Callable[[str], None]) -> None:
    """In this process, until it ends: called("rename step-7.partial") before each call that changes
    a folder or opens a file to write."""

    def audit(event: str, given: tuple) -> None:
        writes = event == "open" and not isinstance(given[0], int) and (given[2] or 0) & WRITES
        if writes or event in CHANGES:
            name = "" if isinstance(given[0], int) else Path(os.fsdecode(given[0])).name
            called(f"{event.removeprefix('os.')} {name}")

    sys.addaudithook(audit)


def calls_of_a_save(file: Path, folder: Path, states: dict[int, dict]) -> list[str]:
    """In a fork: the calls that change something in the last save of these states."""
    calls, answer = [], load_answer(file)
    watch(calls.append)
    for step, state in states.items():
        calls.clear()
        answer.save(folder, state, step)
    return list(calls)


@dataclass(frozen=True)
class KillAt:
    """When this process dies, as by `kill -9`: before call number `call` that changes the disk, or
    when a file is about to become longer than `byte` bytes."""

    call: int = 0
    byte: int = -1
    words: str = ""

    def __str__(self) -> str:
        if self.call:
            return f"killed in a save, before its call {self.call} ({self.words})"
        return f"killed when a file had {self.byte:,} bytes"

    def arm(self) -> None:
        if self.byte >= 0:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.byte, self.byte))
            return
        calls = iter(range(1, self.call))
        watch(lambda _: None if next(calls, None) else os.kill(os.getpid(), signal.SIGKILL))


# ---- power cuts


class Disk:
    """In this process, until it ends: what is on the disk for certain, below `folder`. Of a file
    that is what it held when it was synced, of a folder the names of then."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._names: dict[int, list] = {}  # of a folder's inode: (name, kind, inode, size or link)
        self._contents: dict[int, bytes] = {}  # of a file's inode
        self._held: list[int] = []  # open files: their inodes' numbers are not used again
        os.fsync = os.fdatasync = self._fsync
        os.sync = self._sync
        self._sync()

    def after_a_power_cut(self, place: Path, inode: int | None = None) -> None:
        """Makes in `place` what is left; a file that was not synced holds zeros."""
        place.mkdir()
        for name, kind, number, about in self._names.get(inode or self._folder.stat().st_ino, ()):
            if kind == "folder":
                self.after_a_power_cut(place / name, number)
            elif kind == "link":
                (place / name).symlink_to(about)
            else:
                (place / name).write_bytes(self._contents.get(number, bytes(about)))

    def _fsync(self, file: Any) -> None:
        self._certain(os.dup(file if isinstance(file, int) else file.fileno()))

    def _sync(self) -> None:
        for path in (self._folder, *self._folder.rglob("*")):
            self._certain(os.open(path, os.O_RDONLY))

    def _certain(self, opened: int) -> None:
        self._held.append(opened)
        about = os.fstat(opened)
        if not stat.S_ISDIR(about.st_mode):
            self._contents[about.st_ino] = Path(f"/proc/self/fd/{opened}").read_bytes()
            return
        names = self._names[about.st_ino] = []
        for one in os.scandir(opened):
            if one.is_symlink():
                names.append((one.name, "link", 0, os.readlink(one.name, dir_fd=opened)))
            else:
                kind = "folder" if one.is_dir() else "file"
                names.append((one.name, kind, one.inode(), one.stat().st_size))
