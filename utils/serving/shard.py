"""Cuts a Hugging Face checkpoint into safetensors files for each rank, and joins such files again.

    split(headers, config, tp=2, dtype="float32", folder=folder)  # rank-0-of-2.safetensors, …
    split(headers, config, 2, "float32", folder, "int8")          # the blocks' matrices in 8 bits
    join([files of rank 0, files of rank 1], config, "float32", folder)   # model.safetensors

The cuts are those of training, from the one table utils/models/tp_plan.py. Norms are on every rank;
the biases of o and down on rank 0 only, because partial results are summed. Matrices become whole
numbers before they are cut, so the ranks have the numbers of the whole, whatever tp is.

A model may be larger than memory, and safetensors' writer wants all tensors of a file at once. So a
rank's part that is larger than FILE_BYTES becomes several files, as large models of Hugging Face
are: rank-0-of-2-00001-of-00003.safetensors. Memory holds the tensors of one file, and of the
checkpoint one tensor, which is the one whose part is read; of one that becomes whole numbers,
NUMBERS at a time.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn import functional as F

from utils.compression.quantize import pack, quantize
from utils.compression.scheme import SCHEMES
from utils.models import hf_format
from utils.models.config import GPTConfig
from utils.models.tp_plan import Cut, tp_cuts
from utils.serving.engine.stored import PACKED, SCALE, WIDTHS, inputs, rank_tensors
from utils.serving.repository import ExportError

FILE_BYTES = 2**30  # of a file at most; a tensor that is larger has a file of its own
NUMBERS = 2**20  # of a matrix that become whole numbers at once
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors': torch's


def split(
    headers: hf_format.Headers,
    config: GPTConfig,
    tp: int,
    dtype: str,
    folder: Path | str,
    compute: str = "auto",
) -> None:
    """Writes every rank's files into `folder`.

    headers   {name: (file, shape)} of the source, with the names of config.parameter_shapes()
    dtype     of all tensors of the source, by torch's name
    compute   "int8" or "int4": the matrices of the blocks are written as whole numbers (stored.py)

    Raises ExportError for a matrix that holds what no whole number stands for.
    """
    cuts = tp_cuts(config, tp)
    for rank in range(tp):
        tensors = rank_tensors(config, rank, tp, dtype, compute)
        columns, scales = inputs(config, rank, tp), {}

        def part(name, rank=rank, tensors=tensors, columns=columns, scales=scales):
            if name in scales:  # it came with its matrix, just before
                return scales.pop(name)
            matrix = name.removesuffix(PACKED)
            with safe_open(str(headers[matrix][0]), framework="pt") as data:
                whole = data.get_slice(matrix)
                if matrix + SCALE not in tensors:
                    return cuts[name].part(rank, whole)
                values, scale = _quantized(
                    whole, matrix, cuts[matrix], rank, columns[matrix], compute
                )
            scales[matrix + SCALE] = scale
            return values

        hf_format.write_shards(folder, f"rank-{rank}-of-{tp}", _sizes(tensors), part, FILE_BYTES)


def _quantized(whole, name, cut: Cut, rank, columns, compute):
    """What a rank stores of a matrix, a safetensors slice: its whole numbers and their scales. Some
    rows after the others: a row's scales need no other row."""
    rows, width = whole.get_shape()
    first = sum(cut.sizes[:rank]) if cut.dim == 0 else 0
    last = first + cut.sizes[rank] if cut.dim == 0 else rows
    values, scales = [], []
    for start in range(first, last, step := max(1, NUMBERS // width)):
        try:
            part = quantize(whole[start : min(start + step, last)], SCHEMES[compute])
        except ValueError:
            raise ExportError(
                f"{name} holds numbers that are not finite, which no {compute} stands for: train "
                "on from a checkpoint before, or give --dtype auto"
            ) from None
        part = part.columns(*columns)
        if compute == "int4":  # groups are whole
            after = (
                part.scale.shape[1] * part.scheme.group_size - part.offset - part.values.shape[1]
            )
            values.append(pack(F.pad(part.values, (part.offset, after))))
        else:
            values.append(part.values)
        scales.append(part.scale)
    return torch.cat(values), torch.cat(scales)


def join(
    shards: Sequence[Sequence[Path]], config: GPTConfig, dtype: str, folder: Path | str
) -> None:
    """The inverse, of floating-point numbers: the weights of a Hugging Face folder, from the files
    of each rank, in order."""
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

    tensors = {name: (dtype, shape) for name, shape in config.parameter_shapes().items()}
    hf_format.write_model(folder, _sizes(tensors), whole, FILE_BYTES)


def _sizes(tensors):
    """{name: bytes} of {name: (dtype, shape)}."""
    return {name: math.prod(shape) * WIDTHS[kind] for name, (kind, shape) in tensors.items()}
