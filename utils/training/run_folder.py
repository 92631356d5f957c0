"""The folder of a training run: its last checkpoints, each of which is complete or absent.

    run/checkpoint-200/        a checkpoint (checkpoint.py), with SHA256SUMS of its files
    run/checkpoint-100/        the one before, in case the newest is damaged
    run/newest                 a link to the newest
    run/config.json, …         links to its files, so `run` itself opens as a model
    run/.lock                  held by the run that writes; a second run is refused

A checkpoint is written under another name, synced and renamed. `sha256sum -c SHA256SUMS` inside it
checks that its bytes are still those that were written.
"""

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from utils import untrusted
from utils.models import hf_format
from utils.models.hf_format import NEWEST, CheckpointError

SUMS = "SHA256SUMS"
_LOCK = ".lock"
_NAME = re.compile(r"checkpoint-(\d+)")
_LEFT_OVER = re.compile(r"\.checkpoint-\d+\.(partial|gone)")
# in a .partial folder: the unfinished files of one rank
_RANK = re.compile(rf"rank-\d+|{hf_format.UNFINISHED.pattern}")
_LINK = re.compile(rf"\.({NEWEST}|{hf_format.OURS.pattern})\.link")
_OWN = re.compile(
    rf"{_NAME.pattern}|{_LEFT_OVER.pattern}|{_LINK.pattern}|{NEWEST}|{re.escape(_LOCK)}"
)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)  # on a file system without links


# ---- 1. reading


def checkpoints(folder: Path | str) -> list[Path]:
    """The checkpoints in a run's folder, the newest first."""
    folder = Path(folder)
    found = folder.iterdir() if folder.is_dir() else ()
    found = [path for path in found if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step, reverse=True)


def newest(folder: Path | str) -> Path:
    """The newest undamaged checkpoint of a run; damaged ones are named on stderr.

    A folder that is itself a checkpoint is returned if it is undamaged, else CheckpointError.
    """
    folder = hf_format.recover(folder)
    if not folder.exists():
        raise CheckpointError(f"checkpoint folder {folder} does not exist")
    damages = []
    for one in checkpoints(folder) or [folder]:
        damage = damaged(one)
        if damage and not one.exists():
            return newest(folder)  # a run that writes there has moved on and removed it
        if not damage:
            if damages and os.environ.get("RANK", "0") == "0":
                print(f"utils.train: {'; '.join(damages)}: using {one.name}", file=sys.stderr)
            return one
        damages.append(damage)
    raise CheckpointError(f"no checkpoint is left to use: {'; '.join(damages)}")


def damaged(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, in half a sentence; None: nothing.

    A checkpoint from elsewhere, without SHA256SUMS, cannot be checked: None.
    """
    sums = checkpoint / SUMS
    if not sums.exists() and not sums.is_symlink():
        return f"{checkpoint} has no {SUMS}" if _NAME.fullmatch(checkpoint.name) else None
    try:
        lines = [line.split("  ", 1) for line in untrusted.read_text(sums).splitlines()]
        for expected, name in lines:
            if not hf_format.OURS.fullmatch(name) or (checkpoint / name).is_symlink():
                return f"{sums} names {name!r:.60}, which no save wrote"
            if not untrusted.regular(checkpoint / name).exists():
                return f"{checkpoint / name} is missing"
            if _sha256(checkpoint / name) != expected:
                return f"{checkpoint / name} is damaged: its bytes do not match {SUMS}"
        there = {path.name for path in checkpoint.iterdir() if hf_format.OURS.fullmatch(path.name)}
        left_out = sorted(there - {SUMS} - {name for _, name in lines})
        if left_out or not lines:
            return f"{sums} is cut short: it lacks {', '.join(left_out) or 'any line'}"
    except (OSError, ValueError) as error:
        return f"{sums} cannot be read: {error}"
    return None


def run_of(checkpoint: Path | str) -> Path:
    """The folder of the run to which a checkpoint belongs, or the checkpoint itself."""
    checkpoint = Path(checkpoint)
    return checkpoint.parent if _NAME.fullmatch(checkpoint.name) else checkpoint


def holds_checkpoint(folder: Path | str) -> bool:
    """Whether the folder holds something to resume, or something that must not be replaced."""
    folder = hf_format.recover(folder)
    return bool(checkpoints(folder)) or (folder / hf_format.CONFIG).exists()


def check_new(folder: Path | str, metrics: str | None = None) -> None:
    """Raise CheckpointError if a new run cannot write its checkpoints here.

    metrics   file that may already be in the folder, from this run, killed before its first save
    """
    metrics = Path(metrics or "-").expanduser().absolute()
    own = re.escape(metrics.name) if metrics.parent.resolve() == folder else _LOCK
    hf_format.check_replaceable(folder, also=re.compile(f"{_OWN.pattern}|{own}"))


def check_own(folder: Path) -> None:
    """Raise CheckpointError if a foreign file has a name that a save would replace or remove."""
    for path in folder.iterdir() if folder.is_dir() else ():
        named = _NAME.fullmatch(path.name) or _LEFT_OVER.fullmatch(path.name)
        if named and (reason := _strange(path)):
            raise CheckpointError(f"{path} {reason}: move it away, or choose another folder")


def _strange(path):
    """Why a path with such a name does not come from a save, in half a sentence; None: it does."""
    if path.is_symlink() or not path.is_dir():
        return "is not a folder"
    for entry in path.rglob("*"):
        if not (hf_format.OURS.fullmatch(entry.name) or _RANK.fullmatch(entry.name)):
            return f"holds {entry.name}, which is not part of a checkpoint and would be lost"
    marks = (SUMS, hf_format.TRAINING)
    if _NAME.fullmatch(path.name) and not any((path / name).exists() for name in marks):
        return f"has no {' and no '.join(marks)}, so it is not a run's checkpoint"
    return None


def _step(path):
    return int(_NAME.fullmatch(path.name)[1])


def _sha256(file):
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


# ---- 2. writing


class RunFolder:
    """The folder for a run's checkpoints; every rank creates this object and calls its methods.

    folder      on a file system that every writing rank sees; None: nothing will be saved
    keep        number of checkpoints that stay
    rank        of this process; rank 0 puts the checkpoints in place
    background  whether files are written while training continues
    """

    def __init__(self, folder: str | None, keep: int, rank: int, background: bool = False):
        self.folder = None if folder is None else hf_format.recover(folder)
        self.keep, self.rank, self.background = keep, rank, background
        self.saving: Thread | None = None
        self.found = [] if folder is None else checkpoints(self.folder)

    @contextmanager
    def opened(self, began: int = -1) -> Iterator["RunFolder"]:
        """Hold the folder's lock, on rank 0. Raises ValueError if another run holds it, or has
        held it since this RunFolder was made.

        began   step of the checkpoint from which the run continues; -1: none
        """
        self.step, self.kept = began, {began}
        if self.folder is None or self.rank:
            yield self
            return
        with self._locked():
            if checkpoints(self.folder) != self.found:
                raise ValueError(f"another run has written to {self.folder} meanwhile: start again")
            self._clear()
            if self.found and _step(self.found[0]) == began:  # its save may have been killed
                try:
                    self._link()
                    self._forget()
                except OSError as error:
                    raise CheckpointError(f"{self.folder} cannot be written to: {error}") from None
            try:
                yield self
            finally:
                if self.saving:
                    self.saving.join()
                self._clear()
                if not checkpoints(self.folder):
                    (self.folder / _LOCK).unlink(missing_ok=True)
                    with suppress(OSError):  # it holds foreign files
                        self.folder.rmdir()

    @contextmanager
    def _locked(self):
        path = self.folder / _LOCK
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                file = untrusted.regular(path).open("a")
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise CheckpointError(f"{self.folder} cannot be written to: {reason}") from None
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                raise ValueError(
                    f"another run is writing to {self.folder}: choose another --out"
                ) from None
            except OSError:
                pass  # a file system without locks
            with suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                    break  # else the previous run has just removed its empty folder
            file.close()
        with file:
            yield

    def save(self, step: int, write: Callable[[Path], None] | None) -> None:
        """Begin a checkpoint: write(an empty folder) writes this rank's files, if it has any, at
        once or in the background, and must not communicate. All ranks call it. A checkpoint that
        is still being written is completed first."""
        self.settle()
        self.step, self.sums, self.error = step, {}, None
        saving = Thread(target=self._write, args=(write,))
        saving.start()
        self.saving = saving  # a second Ctrl-C may come first, and an unstarted thread has no join
        if not self.background:
            self.settle()

    def _write(self, write):
        """Write in the thread. Ranks share the folder: each syncs and hashes its own files."""
        if write is None:
            return
        beside = self._beside("partial")
        mine = beside / f"rank-{self.rank}"
        try:
            if self.rank or self.folder.exists():  # else it was removed, with its lock
                beside.mkdir(parents=True, exist_ok=True)
            mine.mkdir()
            write(mine)
            for file in sorted(mine.iterdir()):
                hf_format.to_disk(file)
                self.sums[file.name] = _sha256(file)
                file.rename(beside / file.name)
            mine.rmdir()
        except Exception as error:  # most likely a full disk; all ranks must hear of it
            self.error = f"checkpoint {self._place()} could not be written: {error}"

    def written(self) -> bool:
        """Whether this rank has nothing left to write, so `settle` would not make it wait."""
        return self.saving is None or not self.saving.is_alive()

    def settle(self) -> None:
        """Wait for every rank's files and put the checkpoint in place; all ranks call it.

        Raises CheckpointError on all ranks if one could not write; earlier checkpoints remain.
        """
        if self.saving is None:
            return
        self.saving.join()
        self.saving = None
        results = [None] * (dist.get_world_size() if dist.is_initialized() else 1)
        if len(results) > 1:
            dist.all_gather_object(results, (self.sums, self.error))
        else:
            results = [(self.sums, self.error)]
        outcome = [next((error for _, error in results if error), None)]
        if self.rank == 0 and not outcome[0]:
            outcome = [self._put_in_place({k: v for sums, _ in results for k, v in sums.items()})]
        if len(results) > 1:
            dist.broadcast_object_list(outcome)
        if outcome[0]:
            raise CheckpointError(outcome[0])

    def _put_in_place(self, sums):
        """Put the checkpoint in place; return what went wrong, or None."""
        beside, place = self._beside("partial"), self._place()
        try:
            for name in sums:
                if not (beside / name).exists():
                    return (
                        f"rank 0 does not see {name}, which another rank wrote to {beside}: "
                        "put --out on a file system that all nodes share, or take "
                        "--save-format whole"
                    )
            lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
            (beside / SUMS).write_text("".join(lines))
            hf_format.to_disk(beside / SUMS)
            hf_format.to_disk(beside)
            if not (place.exists() and _exchanged(beside, place)):
                if place.exists():
                    place.rename(self._beside("gone"))
                beside.rename(place)
            hf_format.to_disk(self.folder)
            self._link()
            self.kept.add(self.step)
            self._forget()
        except OSError as error:
            return f"checkpoint {place} could not be written: {error}"
        return None

    def _link(self):
        """Link from the run's folder into the newest checkpoint, if the file system has links."""
        names = sorted(path.name for path in self._place().iterdir())
        for name, target in ((NEWEST, self._place().name), *((n, f"{NEWEST}/{n}") for n in names)):
            link = self.folder / f".{name}.link"
            link.unlink(missing_ok=True)
            try:
                link.symlink_to(target)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return
            link.replace(self.folder / name)
        for path in self.folder.iterdir():
            if path.is_symlink() and not path.exists() and path.readlink().parent.name == NEWEST:
                path.unlink()  # its file is not in this checkpoint

    def _forget(self):
        """Remove checkpoints older than the last `keep`, and those of an earlier attempt beyond the
        step at which this run began: a run that goes back has abandoned them."""
        found = [path for path in checkpoints(self.folder) if not _strange(path)]
        began = min(self.kept)
        left = [path for path in found if _step(path) > began and _step(path) not in self.kept]
        # the newest last: if the run dies meanwhile, one attempt's last checkpoint is still there
        for path in left[::-1] + [path for path in found if path not in left][self.keep :]:
            # never seen half deleted; renamed so that `recover` restores nothing
            path.rename(path.with_name(f".{path.name}.gone"))
            hf_format.to_disk(self.folder)  # keeps this order even after a power cut
        self._clear()

    def _clear(self):
        """Remove what a killed run left behind."""
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if path.is_symlink() and _LINK.fullmatch(path.name):
                path.unlink()
            elif _LEFT_OVER.fullmatch(path.name) and not _strange(path):
                shutil.rmtree(path, ignore_errors=True)

    def _place(self):
        return self.folder / f"checkpoint-{self.step}"

    def _beside(self, word):
        return self.folder / f".checkpoint-{self.step}.{word}"


def _exchanged(one, other):
    """Swap the names of two folders at once, so that both always exist; return whether it worked.

    Needed when a run that has gone back reaches the step of an old checkpoint. Linux: rename(2).
    """
    try:
        rename = ctypes.CDLL(None).renameat2
    except (OSError, AttributeError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
