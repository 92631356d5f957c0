"""Cuts a Hugging Face checkpoint into one safetensors file per rank, and joins such files again.

    plan = Plan(config, tp=2)                           # what each rank gets of each tensor
    facts = split(headers, plan, "BF16", folder)        # rank-0-of-2.safetensors, rank-1-of-2…
    join(plan, "BF16", shards, "model.safetensors")     # the whole checkpoint, bit for bit

The cuts are those of training, from the one table utils/models/tp_plan.py. Norms are on every rank;
the biases of o and down on rank 0 only, because partial results are summed.

A model may be larger than memory, so the source is read once, BLOCK bytes of one tensor's rows at a
time, and each block goes to the files of all ranks at once. That works because a safetensors file
is plain: 8 bytes with the header's length, a JSON header with each tensor's place, then the numbers
(https://huggingface.co/docs/safetensors, section "Format").
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from utils.models.config import GPTConfig
from utils.models.fingerprint import Fingerprint
from utils.models.tp_plan import rank_shapes, tp_cuts

BLOCK = 4 * 2**20  # bytes that are read at once (or one row, where that is longer)
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of a number, by safetensors' names
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


# ---- 1. what each rank gets


def shapes_of(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every tensor of a model, in the order of the names."""
    return dict(sorted(config.parameter_shapes().items()))


class Plan:
    """`cuts` and whole `shapes` by tensor name, for a model of this config on `tp` ranks.

    Raises ValueError where so many ranks cannot share it.
    """

    def __init__(self, config: GPTConfig, tp: int):
        self.tp, self.config, self.shapes = tp, config, shapes_of(config)
        self.cuts = dict(sorted(tp_cuts(config, tp).items()))

    def rank_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """{name: shape} of what this rank holds."""
        return rank_shapes(self.config, rank, self.tp)


def shard_name(rank: int, tp: int) -> str:
    return f"rank-{rank}-of-{tp}.safetensors"


# ---- 2. reading and writing in blocks


class Writer:
    """A safetensors file, written in the order of its header: sorted names, all of one type.

    with Writer(file, {name: shape}, "BF16") as writer:
        writer.put(tensor)                       # rows of the first name, then of the next …
    writer.bytes, writer.sha256
    """

    def __init__(self, file: Path | str, shapes: dict[str, Sequence[int]], dtype: str):
        header, end = {"__metadata__": {"format": "pt"}}, 0
        for name, shape in sorted(shapes.items()):
            start, end = end, end + math.prod(shape) * WIDTHS[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the numbers begin at a multiple of 8 bytes
        self.file, self.bytes, self._promised = Path(file), 0, 8 + len(text) + end
        self._hash = hashlib.sha256()
        self._stream = open(self.file, "wb")  # noqa: SIM115 (closed in __exit__)
        self._write(len(text).to_bytes(8, "little") + text)

    def put(self, tensor: torch.Tensor) -> None:
        """The next rows; of a tensor that is cut by columns, this file's columns of them."""
        self._write(memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy()))

    def _write(self, data):
        self._stream.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        with self._stream as stream:
            if kind is None:
                stream.flush()
                os.fsync(stream.fileno())
        if kind is None and self.bytes != self._promised:
            raise RuntimeError(f"{self.file}: {self.bytes} bytes, not {self._promised}")
        self.sha256 = self._hash.hexdigest()


def blocks(
    file: Path | str, name: str, rows: int | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (number of the first row, rows) of a tensor, so many at once as BLOCK bytes hold.

    Each block opens the file anew: what was read stays in memory for as long as it is open.
    rows   how many at once instead
    """
    first, end = 0, 1
    while first < end:
        with safe_open(str(file), framework="pt") as data:
            part = data.get_slice(name)
            end, *rest = part.get_shape()
            step = rows or rows_at_once(math.prod(rest), part.get_dtype())
            yield first, part[first : min(first + step, end)]
        first += step


def rows_at_once(numbers: int, dtype: str) -> int:
    """How many rows of so many numbers a block has."""
    return max(1, BLOCK // (numbers * WIDTHS[dtype]))


# ---- 3. a whole checkpoint


@dataclass(frozen=True)
class SplitFacts:
    """What splitting found: {file name: {"bytes", "sha256"}}, and the source's fingerprint."""

    files: dict
    fingerprint: str


def split(headers: dict[str, tuple], plan: Plan, dtype: str, folder: Path | str) -> SplitFacts:
    """Writes every rank's file into `folder` and reads the source once. Returns SplitFacts.

    headers   {name: (file, shape)} of the source, with the names of plan.shapes
    """
    fingerprint = Fingerprint()
    with ExitStack() as files:
        writers = [
            files.enter_context(
                Writer(Path(folder) / shard_name(rank, plan.tp), plan.rank_shapes(rank), dtype)
            )
            for rank in range(plan.tp)
        ]
        for name, shape in plan.shapes.items():
            rows = _hand_out(blocks(headers[name][0], name), plan.cuts[name], writers)
            fingerprint.add(name, shape, rows)
    written = {w.file.name: {"bytes": w.bytes, "sha256": w.sha256} for w in writers}
    return SplitFacts(written, fingerprint.hexdigest())


def _hand_out(numbered_rows, cut, writers):
    """Passes rows on, and on the way gives each rank's writer its part."""
    for first, rows in numbered_rows:
        for rank, writer in enumerate(writers):
            part = cut.part(rank, first, rows)
            if part is not None:
                writer.put(part)
        yield rows


def join(plan: Plan, dtype: str, shards: Sequence[Path], file: Path | str) -> None:
    """The inverse: one safetensors file of the whole model from those of the ranks, in order."""
    with Writer(file, plan.shapes, dtype) as writer:
        for name, cut in plan.cuts.items():
            if cut.dim == 1:  # the same rows of all ranks, side by side
                step = rows_at_once(plan.shapes[name][1], dtype)
                for parts in zip(*(blocks(shard, name, step) for shard in shards)):
                    writer.put(torch.cat([rows for _, rows in parts], dim=1))
                continue
            for shard in shards if cut.dim == 0 else shards[:1]:
                for _, rows in blocks(shard, name):
                    writer.put(rows)
