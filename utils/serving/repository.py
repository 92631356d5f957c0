"""Publishes an export into a Triton model repository atomically: no reader sees half of it.

    with building(out) as repository:                # a hidden folder beside `out`, locked
        folder = repository.open_version(2)          # empty, in the hidden folder
        …                                            # filled: code, weights, manifest.json
        repository.publish()                         # to disk, then renamed to out/gpt_engine/2

A version appears by a single rename of a folder whose files are already on disk. A crash leaves
only the hidden folder behind, and the next export removes it.

The code of a version is model.py, which Triton calls, and the engine with the files of this
workshop that it imports, under the same names as here (utils/serving/engine/engine.py). Imports are
found by parsing the files, so there is no list to maintain. A version also needs torch, numpy,
safetensors and tokenizers.
"""

import ast
import fcntl
import functools
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from utils.models.hf_format import to_disk
from utils.paths import ROOT

SOURCE = ROOT / "triton_model_repo"
CODE = "utils/serving/engine"
TRACE = f"{CODE}/trace.py"  # `gpt` has a copy too
STEP = f"{CODE}/step.cpp"  # compiled on the machine that serves it
ENGINE, VLLM = "gpt_engine", "gpt_vllm"
FRONT = ("gpt", "gpt_tokenize", "gpt_detokenize")
TOKENIZING = ("gpt_tokenize", "gpt_detokenize")
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
LIMITS = "limits.json"  # of FRONT: how long a text, or a list of ids, may be
VERSION = re.compile(r"[1-9]\d*")
NUMBERED = re.compile(rf"(?:withdrawn-)?({VERSION.pattern})")  # a version, or one kept aside
LARGEST = 2**63 - 1  # if any number is larger, Triton serves nothing of a repository


class ExportError(ValueError):
    """The export or its destination is refused; the message gives the reason and the fix."""


@contextmanager
def building(out: str | Path, engine: str = ENGINE, last: str = MANIFEST) -> Iterator["Repository"]:
    """A Repository for `out`, locked against other exports.

    engine   the model that gets a version
    last     the file of a version that is written last: a version without it is incomplete
    """
    out = Path(out).expanduser().resolve()
    made = not out.exists()
    _check_place(out)
    beside = out.with_name(f".{out.name}.partial")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out):
            _check_content(out)
            _check_left_over(beside)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            try:
                yield Repository(out, beside, engine, last)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{out} cannot be written: {error}") from None
    finally:
        if made:
            with suppress(OSError):
                out.rmdir()  # succeeds only if it is still empty


@contextmanager
def _locked(folder):
    """Let one process in at a time; the lock ends with the process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(
                f"another export writes to {folder}: wait until it has ended"
            ) from None
        except OSError:
            pass  # a network file system may not lock folders
        yield
    finally:
        os.close(descriptor)


def _check_place(out):
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is a file: name a folder")
    above = next((path for path in out.parents if path.exists()), out)
    for folder in (above, out) if out.exists() else (above,):
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ExportError(
                f"{out} cannot be written: {folder} is not a writable folder, so name another --out"
            )
    if out.exists() and out.stat().st_dev != out.parent.stat().st_dev:
        raise ExportError(
            f"{out} is a volume of its own, so no folder beside it can be renamed into it: name a "
            f"folder in it, such as {out / 'models'}"
        )


def _check_content(out):
    """Refuse an `out` that holds anything but Triton models: it may be someone else's folder."""
    ours = (ENGINE, *FRONT)
    for entry in sorted(out.iterdir()):
        if entry.name.startswith(".") or entry.name in ("README.md", "__pycache__"):
            continue
        if entry.name not in ours and not (entry / "config.pbtxt").is_file():
            raise ExportError(
                f"{out} holds {entry.name}, which is not a Triton model: name a new folder, or one "
                "that holds only models"
            )
    for name in FRONT:
        if (out / name).exists() and not (out / ENGINE).exists():
            raise ExportError(
                f"{out} holds a model {name} that is not ours, because there is no {ENGINE} beside "
                "it: name another folder"
            )


def _check_left_over(beside):
    """Refuse a hidden folder that is not the leftover of a killed export."""
    for path in beside.glob("*"):
        if path.name not in (ENGINE, VLLM, *FRONT):
            raise ExportError(
                f"{beside} holds {path.name}, which no export wrote: move it away"
            )


class Repository:
    """The repository `out`, and the hidden folder `beside` in which a version of it is built."""

    def __init__(self, out: Path, beside: Path, engine: str, last: str):
        self.out, self.beside, self.engine, self.last = out, beside, engine, last
        self.version = None
        self.kept = []  # existing files that differ from those this workshop would write

    def filled(self) -> list[int]:
        """The numbers of the complete versions, in order."""
        return sorted(
            int(folder.name)
            for folder in (self.out / self.engine).glob("*")
            if VERSION.fullmatch(folder.name) and (folder / self.last).is_file()
        )

    def folder_of(self, version: int) -> Path:
        """The folder of a version, existing or not."""
        return self.out / self.engine / str(version)

    def free_version(self, version: int | None = None) -> int:
        """The version to write: the requested one, or one above the highest number here."""
        filled, above = self.filled(), self._highest() + 1
        if version is None:
            version = above
        if type(version) is not int or not 1 <= version <= LARGEST:
            raise ExportError(f"version {version!r} is invalid: versions are 1, 2, 3 … {LARGEST}")
        if version in filled:
            raise ExportError(
                f"version {version} of {self.out} already exists: give another --version, such as "
                f"{above}, or remove {self.folder_of(version)} first"
            )
        return version

    def _highest(self):
        """The highest number of a version, complete or not, served or withdrawn (withdrawn-N); 0 if
        there is none. A number is not reused: it names the weights in answers and metrics."""
        numbers = [
            int(match[1])
            for folder in (self.out / self.engine).glob("*/")
            # an export that was killed can leave an empty folder
            if (match := NUMBERED.fullmatch(folder.name)) and any(folder.iterdir())
        ]
        return max(numbers, default=0)

    def open_version(self, version: int, size: int = 0) -> Path:
        """A new, empty folder beside the repository for a version of about `size` bytes."""
        there = self.folder_of(version)
        for entry in sorted(there.iterdir()) if there.is_dir() else ():
            raise ExportError(
                f"{there} holds {entry.name} but no {self.last}, so it is not one of our versions "
                "and would be lost: move it away"
            )
        free = shutil.disk_usage(self.out).free
        if free < size:
            raise ExportError(
                f"{self.out} has {free / 1e9:,.1f} GB of free space, but the version takes "
                f"{size / 1e9:,.1f} GB: make room, or give another --out"
            )
        self.version = version
        folder = self.beside / self.engine / str(version)
        folder.mkdir(parents=True)
        return folder

    def publish(self) -> Path:
        """Flush everything to disk, then rename it into place; return the version's folder."""
        target = self.folder_of(self.version)
        for path in sorted(self.beside.rglob("*")):
            to_disk(path)
        to_disk(self.beside)
        if not any(self.out.iterdir()):
            self.beside.rename(self.out)
        else:
            self._add_models()
            self._add_version(target)
        for folder in (target, target.parent, self.out, self.out.parent):
            to_disk(folder)
        return target

    def _add_models(self):
        """Add missing models, and the missing files of existing ones; existing files stay, even if
        they were edited."""
        version = self.beside / self.engine / str(self.version)
        for model in sorted(self.beside.iterdir(), key=lambda model: model.name == self.engine):
            if not (self.out / model.name).exists():
                model.rename(self.out / model.name)
                continue
            for file in _files(model):
                there = self.out / file.relative_to(self.beside)
                if version in file.parents:
                    continue
                made = file.name in (TOKENIZER, LIMITS)  # generated
                ours = made or file.as_posix().endswith(TRACE)
                if there.exists() and not ours:
                    if _content(there) != _content(file):
                        self.kept.append(str(there.relative_to(self.out)))
                    continue
                there.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, there)
                to_disk(there.parent)

    def _add_version(self, target):
        folder = self.beside / self.engine / str(self.version)
        if not folder.exists():
            return  # it was moved with the whole model
        folder.rename(target)


# ---- the code


def copy_models(beside: Path) -> None:
    """Copy the hand-written files of all models, except the engine's versions, and TRACE for
    `gpt`."""
    for file in _files(SOURCE):
        parts = file.relative_to(SOURCE).parts
        hand_written = parts[0] in FRONT and parts[1] == "1" and file.suffix != ".json"
        if "utils" in parts:
            continue  # written by an export to SOURCE itself
        if hand_written or (parts[0] in (ENGINE, *FRONT) and parts[1] == "config.pbtxt"):
            _copy(file, beside / file.relative_to(SOURCE))
    _ship([TRACE], beside / FRONT[0] / "1")


def copy_code(folder: Path) -> None:
    """Copy model.py and utils/ of a version: the engine, its imports, and the C++ it compiles."""
    _copy(SOURCE / ENGINE / "model.py", folder / "model.py")
    _ship(shipped(), folder)
    _copy(ROOT / STEP, folder / STEP)


def _ship(names, folder):
    """Copy files of this workshop into `folder`, under the same names."""
    for name in names:
        _copy(ROOT / name, folder / name)
        for package in list(Path(name).parents)[:-1]:
            # Empty, because the engine imports files and never a package's own names.
            (folder / package / "__init__.py").touch()


def shipped(root: Path = ROOT, start: str = CODE) -> list[str]:
    """Files of this workshop that a version gets, relative to `root`, sorted: those of the folder
    `start` and everything that they import, directly or indirectly.

    Raises ExportError for a name that one of them imports from a package and not from a file.
    """
    waiting = [file.relative_to(root) for file in sorted((root / start).glob("*.py"))]
    found = set()
    while waiting:
        file = waiting.pop()
        if file not in found and file.name != "__init__.py":
            found.add(file)
            waiting += imported(root, file)
    return sorted(map(str, found))


def imported(root: Path, file: Path) -> list[Path]:
    """The files under `root` that one of its files imports, at any place in its code."""
    files = []
    for node in _imports((root / file).read_text()):
        if isinstance(node, ast.Import):
            modules = [Path(*alias.name.split(".")) for alias in node.names]
        else:
            above = file.parents[node.level - 1] if node.level else Path()
            module = above.joinpath(*(node.module or "").split("."))
            is_room = (root / module).is_dir()
            modules = [module / alias.name for alias in node.names] if is_room else [module]
        for module in modules:
            if (root / module.with_suffix(".py")).is_file():
                files.append(module.with_suffix(".py"))
            elif module.parts[0] == file.parts[0]:
                raise ExportError(
                    f"{file} imports {'.'.join(module.parts)}, which is not a file, so a version "
                    "would lack it: import it from the file that defines it"
                )
    return files


@functools.cache  # parsing is most of the time of a small model's export
def _imports(code: str) -> list[ast.Import | ast.ImportFrom]:
    """The import statements of a file's text."""
    tree = ast.parse(code)
    return [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


def same_code(one: Path, other: Path) -> bool:
    """Whether two folders of versions hold the same code."""
    return _code(one) == _code(other)


def _code(folder):
    files = [*folder.rglob("*.py"), *folder.rglob("*.cpp")]
    return {file.relative_to(folder): file.read_bytes() for file in files}


def _content(file):
    return file.read_bytes() if file.is_file() else None


def _copy(file, there):
    if file.is_file():
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, there)


def _files(folder):
    return sorted(
        file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    )
