"""Cuts a Hugging Face checkpoint into safetensors files for each rank, and joins such files again.

    split(headers, config, tp=2, dtype="BF16", folder=folder)    # rank-0-of-2.safetensors, …
    join([files of rank 0, files of rank 1], config, "BF16", folder)      # model.safetensors

The cuts are those of training, from the one table utils/models/tp_plan.py. Norms are on every rank;
the biases of o and down on rank 0 only, because partial results are summed.

A model may be larger than memory, and safetensors' writer wants all tensors of a file at once. So a
rank's part that is larger than FILE_BYTES becomes several files, as large models of Hugging Face
are: rank-0-of-2-00001-of-00003.safetensors. Memory holds the tensors of one file, and of the
checkpoint one tensor, which is the one whose part is read.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

from utils.models import hf_format
from utils.models.config import GPTConfig
from utils.models.tp_plan import rank_shapes, tp_cuts

FILE_BYTES = 2**30  # of a file at most; a tensor that is larger has a file of its own
WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}  # bytes of a number, by safetensors' names
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def split(
    headers: hf_format.Headers, config: GPTConfig, tp: int, dtype: str, folder: Path | str
) -> None:
    """Writes every rank's files into `folder`.

    headers   {name: (file, shape)} of the source, with the names of config.parameter_shapes()
    dtype     of all tensors, by safetensors' name
    """
    cuts = tp_cuts(config, tp)

    def part(rank, name):
        with safe_open(str(headers[name][0]), framework="pt") as data:
            return cuts[name].part(rank, data.get_slice(name))

    for rank in range(tp):
        sizes = _sizes(rank_shapes(config, rank, tp), dtype)
        stem = f"rank-{rank}-of-{tp}"
        hf_format.write_shards(folder, stem, sizes, partial(part, rank), FILE_BYTES)


def join(
    shards: Sequence[Sequence[Path]], config: GPTConfig, dtype: str, folder: Path | str
) -> None:
    """The inverse: the weights of a Hugging Face folder, from the files of each rank, in order."""
    cuts = tp_cuts(config, len(shards))
    places = [
        {name: file for file in files for name in hf_format.file_shapes(file)} for files in shards
    ]

    def whole(name):
        parts = []
        for file in (held[name] for held in places if name in held):
            with safe_open(str(file), framework="pt") as data:
                parts.append(data.get_tensor(name))
        return parts[0] if cuts[name].dim is None else torch.cat(parts, cuts[name].dim)

    hf_format.write_model(folder, _sizes(config.parameter_shapes(), dtype), whole, FILE_BYTES)


def _sizes(shapes, dtype):
    """{name: bytes}"""
    return {name: torch.Size(shape).numel() * WIDTHS[dtype] for name, shape in shapes.items()}
