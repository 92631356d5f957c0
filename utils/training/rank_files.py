"""Checkpoints of one file per rank: each rank writes the shards it holds, and nothing is sent.

    model-rank-00000.safetensors, model-rank-00001.safetensors, …      of the weights
    optimizer-rank-00000.safetensors, …                                of the optimizer's state

A file's header says where each shard begins in its whole tensor, in the format of
`torch.distributed.checkpoint.HuggingFaceStorageWriter`, so that torch's reader and its
`consolidate_safetensors_files` can open these files too. A reader assembles the shards one tensor
at a time, so any number of ranks can continue from them, however they split the model.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from utils import untrusted
from utils.models.hf_format import CheckpointError, Headers, floating, opened

Offset = tuple[int, ...]
Pieces = dict[str, tuple[torch.Tensor, Offset]]  # name -> (shard, its offset in the whole tensor)

_HEADER, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def write(file: Path, pieces: Pieces) -> None:
    """Write a rank's shards (tensors in host memory) into one file."""
    offsets = {name: {_OFFSETS: list(offset)} for name, (_, offset) in pieces.items()}
    tensors = {name: tensor for name, (tensor, _) in pieces.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", _HEADER: json.dumps(offsets)}
    save_file(tensors, str(file), metadata=metadata)


class RankFiles:
    """The files of one `stem`, "model" or "optimizer", in a checkpoint folder.

    Raises CheckpointError if a shard is missing.
    """

    def __init__(self, folder: Path, stem: str):
        self.folder, self.stem = folder, stem
        self.pieces: dict[str, list[tuple[Path, Offset, tuple[int, ...]]]] = {}
        for file in self.files(folder, stem):
            with opened(file) as data:
                offsets = self._offsets(file, data)
                for name in data.keys():  # noqa: SIM118 (not a dict)
                    piece = data.get_slice(name)
                    offset, size = offsets.get(name, ()), tuple(piece.get_shape())
                    places = self.pieces.setdefault(name, [])
                    places.append((file, offset, size))
                    if not len(offset) == len(size) == len(places[0][1]):
                        raise CheckpointError(f"{file} does not say where its {name} belongs")
        for name, shape in self.shapes().items():
            if not _filled(shape, self.pieces[name]):
                raise CheckpointError(f"{folder} lacks a part of {name}: copy every rank's file")

    @staticmethod
    def files(folder: Path, stem: str) -> list[Path]:
        return sorted(folder.glob(f"{stem}-rank-*.safetensors"))

    @staticmethod
    def name(stem: str, rank: int) -> str:
        """The name of a rank's file."""
        return f"{stem}-rank-{rank:05d}.safetensors"

    @staticmethod
    def _offsets(file, data):
        try:
            header = untrusted.parse_json(data.metadata()[_HEADER], {str: {_OFFSETS: [int]}})
            return {name: tuple(entry[_OFFSETS]) for name, entry in header.items()}
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{file} does not say where its shards belong") from None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape of the whole tensor}, as far as its furthest shard reaches."""
        return {
            name: tuple(
                max(offset[dim] + size[dim] for _, offset, size in places)
                for dim in range(len(places[0][1]))
            )
            for name, places in self.pieces.items()
        }

    def headers(self) -> Headers:
        """{name: (the file of its first shard, shape)}, as `hf_format.read_headers` returns it."""
        return {n: (self.pieces[n][0][0], shape) for n, shape in self.shapes().items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor), one at a time, on the CPU."""
        for name, shape in self.shapes().items():
            yield name, self.tensor(name, shape)

    def nbytes(self, name: str, shape: tuple[int, ...]) -> int:
        """Bytes of a whole tensor."""
        with opened(self.pieces[name][0][0]) as data:
            return torch.Size(shape).numel() * data.get_slice(name)[:0].element_size()

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One whole tensor, assembled from its shards."""
        whole = None
        for file, offset, size in self.pieces[name]:
            with opened(file) as data:
                piece = floating(data.get_tensor(name), name, file)
            if whole is None:
                whole = piece.new_empty(shape)
            whole[tuple(slice(o, o + n) for o, n in zip(offset, size))] = piece
        return whole


def _filled(shape, places):
    """Whether shards fill a tensor of this shape."""
    ends = [
        {0, *(offset[dim] + part for _, offset, size in places for part in (0, size[dim]))}
        for dim in range(len(shape))
    ]
    if any(min(each) < 0 for each in ends):
        return False
    # a shard covers each cell between two ends entirely or not at all
    at = [{end: number for number, end in enumerate(sorted(each))} for each in ends]
    cells = np.zeros([len(each) - 1 for each in at], bool)
    for _, offset, size in places:
        cells[tuple(slice(each[o], each[o + n]) for each, o, n in zip(at, offset, size))] = True
    return bool(cells.all())
