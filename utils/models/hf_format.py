"""A Hugging Face checkpoint folder: config.json and one or more safetensors files.

This file knows nothing about the model. It reads and writes

    folder/config.json                          the model's description
    folder/model.safetensors                    all tensors in one file, or
    folder/model.safetensors.index.json         which tensor is in which shard, with
    folder/model-00001-of-00003.safetensors     the shards
    folder/tokenizer.json                       how text becomes tokens (utils/models/tokenizer.py)

Only safetensors: a pickle checkpoint (*.bin, *.pt) can run code when it is read, and is refused.
A folder is written next to its final place and then renamed, so it is never seen half-written.
Format: https://huggingface.co/docs/safetensors, section "Format".
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from utils import untrusted

Headers = dict[str, tuple[Path, tuple[int, ...]]]  # name -> (file, shape)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NEWEST = "newest"  # in a run's folder, a link to its newest checkpoint
TRAINING = "training.json"  # of a training run's checkpoint
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# the files of a checkpoint folder; anything else is foreign and is never replaced
OURS = re.compile(
    r"(config|generation_config|training)\.json|model\.safetensors\.index\.json|SHA256SUMS"
    r"|(model|optimizer)(-\d+-of-\d+|-rank-\d+)?\.safetensors"
    r"|tokenizer(_config)?\.json|special_tokens_map\.json"
)
# temporary files of safetensors, and those that NFS keeps while they are still being read
UNFINISHED = re.compile(r"\.tmp\w{6}|\.nfs\w+")


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be used; the message names the file and the fix."""


# ---- 1. reading


def read_json(path: str | Path) -> dict:
    """The JSON object in a file, as a dict."""
    path = Path(path)
    try:
        return untrusted.read_json(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: is {path.parent} a checkpoint folder?") from None
    except NotADirectoryError:
        raise CheckpointError(f"{path.parent} is a file: give the checkpoint's folder") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None


def read_config(folder: str | Path) -> dict:
    """config.json of a checkpoint folder, as a dict."""
    folder = recover(folder)
    if not folder.exists():
        raise CheckpointError(f"checkpoint folder {folder} does not exist")
    return read_json(folder / CONFIG)


def read_headers(folder: str | Path) -> Headers:
    """The folder's tensors, without reading their values: {name: (file, shape)}."""
    folder = recover(folder)
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map from tensors to files")
        return _read_sharded_headers(folder, weight_map)
    if (folder / WEIGHTS).exists():
        shapes = file_shapes(folder / WEIGHTS)
        return {name: (folder / WEIGHTS, shape) for name, shape in shapes.items()}
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for file in entries:
        if file.suffix in PICKLES:
            raise CheckpointError(
                f"{file} is a pickle checkpoint, which can run code when it is read: only "
                "safetensors are read, so convert it with transformers' save_pretrained first"
            )
    if any(file.name.startswith("model-rank-") for file in entries):
        raise CheckpointError(
            f"{folder} holds one file per rank: python -m utils.training.join {folder} WHOLE "
            "makes a folder of whole tensors"
        )
    raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")


def _read_sharded_headers(folder, weight_map):
    weight_map, shapes = {name: str(shard) for name, shard in weight_map.items()}, {}
    for shard in sorted(set(weight_map.values())):
        try:
            file = untrusted.inside(folder, shard) if shard.endswith(".safetensors") else None
        except (OSError, ValueError):
            file = None
        if file is None:
            raise CheckpointError(
                f"{folder / INDEX} names {shard!r:.60}, which is not a safetensors "
                "file in the same folder"
            )
        if not file.exists():
            raise CheckpointError(f"{folder / INDEX} names the shard {shard}, which is missing")
        shapes[shard] = file_shapes(file)
    headers = {}
    for name, shard in weight_map.items():
        if name not in shapes[shard]:
            raise CheckpointError(f"{folder / INDEX} says that {name} is in {shard}, but it is not")
        headers[name] = (folder / shard, shapes[shard][name])
    return headers


def check_shapes(headers: Headers, expected: dict[str, tuple[int, ...]], where: str | Path) -> None:
    """Raise CheckpointError unless the headers hold exactly the expected {name: shape}."""
    missing = [name for name in expected if name not in headers]
    extra = [name for name in headers if name not in expected]
    if missing:
        raise CheckpointError(f"{where} lacks {_listed(missing)}")
    if extra:
        raise CheckpointError(f"{where} holds {_listed(extra)}, which this model does not have")
    for name, shape in expected.items():
        if tuple(headers[name][1]) != tuple(shape):
            raise CheckpointError(
                f"{where}: {name} has shape {list(headers[name][1])}, "
                f"but the model needs {list(shape)}"
            )


def read_tensors(
    headers: Headers, names: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the named tensors (default: all), file by file, on the CPU."""
    wanted = headers if names is None else names
    by_file = {}
    for name in wanted:
        by_file.setdefault(headers[name][0], []).append(name)
    for file, members in by_file.items():
        with opened(file) as data:
            for name in members:
                # not named here, so that the caller can free a tensor's memory
                yield name, floating(data.get_tensor(name), name, file)


def floating(tensor: Tensor, name: str, where: str | Path) -> Tensor:
    """The tensor, or CheckpointError if it has no floating-point type."""
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{where}: {name} is {kind}, not a floating-point tensor")
    return tensor


def file_shapes(file: str | Path) -> dict[str, tuple[int, ...]]:
    """{name: shape} of one safetensors file, read from its header."""
    with opened(file) as data:
        return {name: tuple(data.get_slice(name).get_shape()) for name in data.keys()}  # noqa: SIM118 (not a dict)


@contextmanager
def opened(file: str | Path) -> Iterator:
    """A safetensors file, open for reading; CheckpointError for any other file."""
    try:
        handle = safe_open(str(untrusted.regular(file)), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is not a readable safetensors file ({error}): it is "
            "truncated or damaged, so copy it again"
        ) from None
    with handle as data:
        yield data


def _listed(names):
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


# ---- 2. writing


def write_weights(
    folder: str | Path, tensors: dict[str, Tensor], max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write {name: tensor} into a folder as one file, or as shards with an index."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    write_model(folder, sizes, tensors.__getitem__, max_shard_bytes)


def write_model(
    folder: str | Path, sizes: dict[str, int], read: Callable[[str], Tensor], max_shard_bytes: int
) -> None:
    """Write weights like `write_weights`, reading each tensor when its file is written: see
    `write_shards`."""
    weight_map = write_shards(folder, "model", sizes, read, max_shard_bytes)
    if WEIGHTS not in weight_map.values():
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_json(Path(folder) / INDEX, index)


def write_shards(
    folder: str | Path,
    stem: str,
    sizes: dict[str, int],
    read: Callable[[str], Tensor],
    max_shard_bytes: int,
) -> dict[str, str]:
    """Write tensors as STEM.safetensors or, if they exceed `max_shard_bytes`, as
    STEM-00001-of-00003.safetensors and so on. Return {name: file}.

    sizes   {name: bytes}, in the order in which files are filled
    read    returns a tensor by name; memory holds the tensors of one file at a time

    A tensor larger than `max_shard_bytes` gets its own file, and is held in memory as a whole.
    """
    shards, size = [[]], 0
    for name, nbytes in sizes.items():
        if shards[-1] and size + nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        count = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        file = f"{stem}{count}.safetensors"
        # tensors are not named here, so that they are freed before the next file's are read
        _save({name: read(name).detach().contiguous().cpu() for name in names}, Path(folder) / file)
        weight_map.update(dict.fromkeys(names, file))
    return weight_map


def _save(tensors, file):
    try:
        save_file(tensors, str(file), metadata={"format": "pt"})
    except (SafetensorError, OSError) as error:  # most likely a full disk
        raise CheckpointError(f"{file} could not be written: {error}") from None


def write_json(path: str | Path, data: dict) -> None:
    """Write a JSON object in a form that people can read."""
    Path(path).write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_tokenizer(source: str | Path, folder: str | Path) -> None:
    """Copy the tokenizer's files, if there are any, from one checkpoint folder to another."""
    for name in (TOKENIZER, TOKENIZER_CONFIG):
        if (Path(source) / name).exists():
            shutil.copyfile(Path(source) / name, Path(folder) / name)


@contextmanager
def replacing(folder: str | Path) -> Iterator[Path]:
    """A new, empty folder next to `folder`, which it replaces when the block ends without error.

    After an error nothing has changed. The old folder is moved aside, not deleted, until the new
    one is in place; if the machine stops in between, `recover` restores it.
    """
    folder = recover(folder)
    check_replaceable(folder)
    if (folder / TRAINING).exists():
        raise CheckpointError(f"{folder} holds a training run's checkpoint: choose another folder")
    beside, old = _beside(folder, "partial"), _beside(folder, "old")
    for left_over in (beside, old):
        check_replaceable(left_over, also=UNFINISHED)
    shutil.rmtree(beside, ignore_errors=True)
    try:
        beside.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{beside.parent} cannot be written to: {error.strerror}") from None
    try:
        yield beside
        for file in beside.iterdir():
            to_disk(file)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    while True:
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        try:
            beside.rename(folder)
            break
        except OSError as error:  # a reader has restored the old folder between the two
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    to_disk(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: str | Path) -> Path:
    """The folder as a Path, restored first if a write stopped between its two renames."""
    try:
        folder = Path(folder).expanduser().resolve()
        if not folder.exists():
            with suppress(OSError):  # usually there is none; or another process was first
                _beside(folder, "old").rename(folder)
        with suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(folder).close()  # check that it can be read
    except (OSError, RuntimeError) as error:  # a name too long, a link to itself
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"folder {folder!s:.60} cannot be read: {reason}") from None
    return folder


def one_checkpoint(folder: str | Path) -> Path:
    """The folder, or the newest checkpoint of a run's folder (utils/training/run_folder.py), whose
    files all belong to one step, whatever the run writes meanwhile."""
    folder = recover(folder)
    newest = folder / NEWEST
    return newest.resolve() if newest.is_symlink() and newest.exists() else folder


def check_replaceable(folder: str | Path, also: re.Pattern | None = None) -> None:
    """Raise CheckpointError if `folder` cannot be written, or if that would delete a file that is
    not part of a checkpoint.

    also   a pattern of other names that may be there
    """
    folder = Path(folder)
    above = next((path for path in folder.absolute().parents if path.exists()), folder)
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written: {above} is not a writable folder")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: name a folder")
    for entry in sorted(folder.iterdir()) if folder.exists() else []:
        if not OURS.fullmatch(entry.name) and not (also and also.fullmatch(entry.name)):
            raise CheckpointError(
                f"{folder} holds {entry.name}, which is not part of a "
                "checkpoint and would be lost: choose another folder"
            )


def _beside(folder, word):
    return folder.with_name(f".{folder.name}.{word}")


def to_disk(path: Path) -> None:
    """Flush a file, or a folder's list of entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
