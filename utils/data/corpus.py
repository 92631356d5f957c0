"""Text -> byte tokens -> batches, split over data-parallel ranks.

The embedded text needs no download: it is the Python language reference that ships inside every
CPython (`pydoc_data.topics`, about 466,000 bytes). A token is one byte, so the vocabulary is 256,
unless a tokenizer makes the tokens (utils/models/tokenizer.py).

    from utils.data import corpus
    train, held_out = corpus.split(corpus.load())
    x, y = corpus.batch(train, step=0, batch=32, seq=128)       # both (32, 128)

`batch` is a pure function of (seed, step), with no sampler object and no state to save. Rank r's
rows are a contiguous slice of the global batch, so N ranks see exactly what one rank sees.
"""

import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from utils import untrusted
from utils.data import library as library_text
from utils.shares import share

VOCAB_SIZE = 256  # one token per byte value
HELD_OUT = 0.05  # the last 5 % of a text is never trained on


# ---- 1. text -> tokens


def embedded() -> bytes:
    """The Python language reference, as bytes: every topic of `pydoc_data.topics`, sorted by name.

    The same on every machine with the same Python; 3.11 and 3.12 differ a little.
    """
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics)).encode("utf-8")


def load(path: Path | str | None = None) -> torch.Tensor:
    """The tokens of a text, as a 1-D uint8 tensor.

    path  None: the embedded text; "library": Python's standard library, its source and reference
          pages (utils/data/library.py, about 10 MB); a file: its bytes; a folder: every UTF-8 text
          file in it, in sorted order (hidden files are left out).
    Raises ValueError if there is nothing to read.
    """
    if path is None:
        data = embedded()
    elif is_library(path):
        data = "".join(library_text.split()).encode("utf-8")
    else:
        data = _read(Path(path))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def fingerprint(path: Path | str | None) -> dict:
    """A dict for JSON that identifies a text."""
    data = load(path)
    found = {"bytes": len(data), "crc32": zlib.crc32(data.numpy())}
    if is_library(path):
        found["python"] = "{}.{}.{}".format(*sys.version_info)  # the text depends on the release
    return found


def is_library(path: Path | str | None) -> bool:
    """Whether `path` means the standard library, as no file or folder has that name."""
    return str(path) == "library" and not Path(path).exists()


def load_split(
    path: Path | str | None = None, tokenizer: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, held_out): the tokens of a text's first 95 % and last 5 %, split by bytes.

    The standard library is split at the start of a module. tokenizer: None, or a `Tokenizer`: then
    the tokens are its ids, int32, and the two parts are encoded separately. Raises ValueError if
    there is nothing to read, or if a tokenizer is given text that is not UTF-8.
    """
    data = load(path)
    if is_library(path):
        cut = len(library_text.split()[0].encode("utf-8"))
        parts = data[:cut], data[cut:]
    else:
        parts = split(data)
    if tokenizer is None or tokenizer.model is None:
        return parts
    return tuple(_encoded(part, tokenizer, path) for part in _whole_characters(*parts))


def _whole_characters(train, held_out):
    """The two parts as bytes; a character across the split belongs to the first part."""
    train, held_out = train.numpy().tobytes(), held_out.numpy().tobytes()
    rest = next((n for n, byte in enumerate(held_out[:4]) if byte & 0xC0 != 0x80), 0)
    return train + held_out[:rest], held_out[rest:]


def _encoded(data, tokenizer, path):
    try:
        return torch.tensor(tokenizer.encode(data.decode("utf-8")), dtype=torch.int32)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text {path} is not UTF-8 (byte {error.start}), which a tokenizer needs: convert it, "
            "or train on bytes"
        ) from None


def _read(path):
    try:
        if not path.exists():
            raise ValueError(f"text {path} does not exist: give a file, a folder or 'library'")
        is_folder = path.is_dir()
        data = _read_folder(path, "*") if is_folder else untrusted.regular(path).read_bytes()
    except OSError as error:
        raise ValueError(f"text {path} cannot be read: {error.strerror}") from None
    if not data:
        what = "holds no text file (UTF-8)" if path.is_dir() else "is empty"
        raise ValueError(f"text {path} {what}: give a file or a folder with text in it")
    return data


def _read_folder(folder, pattern):
    texts = []
    for file in sorted(folder.rglob(pattern)):
        parts = file.relative_to(folder).parts
        hidden = any(part.startswith(".") or part in SKIPPED for part in parts)
        if hidden or not file.is_file():
            continue
        data = file.read_bytes()
        if _is_text(data):
            texts.append(data)
    return b"\n".join(texts)


SKIPPED = {"__pycache__", "site-packages", "dist-packages"}  # installed, not part of the text


def _is_text(data):
    if not data or b"\0" in data:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def encode(text: str) -> torch.Tensor:
    """A string -> its UTF-8 bytes as a 1-D int64 tensor, ready for the model."""
    return torch.tensor(list(text.encode("utf-8")), dtype=torch.long)


def decode(tokens: torch.Tensor | Sequence[int]) -> str:
    """1-D tokens (a tensor or a list of ints below 256) -> a string; invalid UTF-8 becomes �."""
    values = tokens.tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
    outside = [value for value in values if not 0 <= value < VOCAB_SIZE]
    if outside:
        raise ValueError(f"token {outside[0]} is not a byte: decode takes values from 0 to 255")
    return bytes(values).decode("utf-8", errors="replace")


def split(tokens: torch.Tensor, held_out: float = HELD_OUT) -> tuple[torch.Tensor, torch.Tensor]:
    """(train, held_out): the first 95 % and the last 5 % of the tokens. Neither is a copy."""
    cut = len(tokens) - int(len(tokens) * held_out)
    return tokens[:cut], tokens[cut:]


# ---- 2. tokens -> batches


def share_of_batch(batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """The `share` of a batch of which every rank must have at least one row."""
    if batch < world_size:
        raise ValueError(
            f"batch {batch} leaves some of {world_size} ranks without a row: "
            f"raise the batch to {world_size} or more"
        )
    return share(batch, rank, world_size)


def batch(
    tokens: torch.Tensor,
    step: int,
    batch: int = 32,
    seq: int = 128,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's rows of global batch number `step`: (x, y), both int64 of shape (batch_local, seq).

    `batch` is the global batch size; y is x shifted by one token. The rows are drawn for every
    (seed, step), the same on every rank, before each rank keeps its own.
    """
    check_length(tokens, seq)
    first, last = share_of_batch(batch, rank, world_size)
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - seq, size=batch)
    return _windows(tokens, starts[first:last], seq)


def held_out_batches(
    tokens: torch.Tensor,
    seq: int = 128,
    batch: int = 32,
    limit: int = 256,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A rank's batches (x, y) of the held-out text: always the same rows, in the same order.

    The text is divided into non-overlapping sequences; at most `limit` of them are kept, evenly
    spread. A rank may get none if there are fewer sequences than ranks.
    """
    check_length(tokens, seq)
    sequences = (len(tokens) - 1) // seq
    kept = np.linspace(0, sequences - 1, min(limit, sequences)).astype(int)
    first, last = share(len(kept), rank, world_size)
    starts = kept[first:last] * seq
    for row in range(0, len(starts), batch):
        yield _windows(tokens, starts[row : row + batch], seq)


def check_length(tokens: torch.Tensor, seq: int, name: str = "the text") -> None:
    """Raise ValueError unless the tokens hold one sequence and the token after it."""
    if len(tokens) < seq + 1:
        raise ValueError(
            f"{name} has {len(tokens)} tokens, too short for one sequence of {seq}: "
            f"give at least {seq + 1} tokens, or choose shorter sequences"
        )


def _windows(tokens, starts, seq):
    positions = torch.from_numpy(np.asarray(starts))[:, None] + torch.arange(seq + 1)
    rows = tokens[positions].long()  # (batch_local, seq + 1)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
