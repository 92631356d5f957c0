"""Splits a Hugging Face checkpoint into safetensors files for each rank, and joins them again.

    split(headers, config, tp=2, dtype="float32", folder=folder)  # rank-0-of-2.safetensors, …
    split(headers, config, 2, "float32", folder, "int8")          # the blocks' matrices in 8 bits
    join([files of rank 0, files of rank 1], config, "float32", folder)   # model.safetensors

Tensors are sharded as in training, by the same table, utils/models/tp_plan.py. Norms are on every
rank; the biases of o and down are on rank 0 only, because partial results are summed. Matrices are
quantized before they are sharded, so the integers do not depend on tp.

A model may be larger than memory, and safetensors' writer needs all tensors of a file at once. So a
rank's shard that is larger than FILE_BYTES becomes several files, named as large models of Hugging
Face are: rank-0-of-2-00001-of-00003.safetensors. Memory holds the tensors of one file and one
tensor of the checkpoint, the one whose shard is being read; of a matrix that is quantized, NUMBERS
elements at a time.
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

FILE_BYTES = 2**30  # most bytes per file; a larger tensor has a file of its own
NUMBERS = 2**20  # elements of a matrix that are quantized at once
NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors': torch's


def split(
    headers: hf_format.Headers,
    config: GPTConfig,
    tp: int,
    dtype: str,
    folder: Path | str,
    compute: str = "auto",
) -> None:
    """Write every rank's files into `folder`.

    headers   {name: (file, shape)} of the source, with the names of config.parameter_shapes()
    dtype     of all tensors of the source, by torch's name
    compute   "int8" or "int4": the matrices of the blocks are written as integers (stored.py)

    Raises ExportError for a matrix to be quantized that holds values that are not finite.
    """
    cuts = tp_cuts(config, tp)
    for rank in range(tp):
        tensors = rank_tensors(config, rank, tp, dtype, compute)
        columns, scales = inputs(config, rank, tp), {}

        def part(name, rank=rank, tensors=tensors, columns=columns, scales=scales):
            if name in scales:  # computed with its matrix, just before
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
    """A rank's shard of a matrix (a safetensors slice): its integers and their scales. Quantized
    some rows at a time, since a row's scales depend on no other row."""
    rows, width = whole.get_shape()
    first = sum(cut.sizes[:rank]) if cut.dim == 0 else 0
    last = first + cut.sizes[rank] if cut.dim == 0 else rows
    values, scales = [], []
    for start in range(first, last, step := max(1, NUMBERS // width)):
        try:
            part = quantize(whole[start : min(start + step, last)], SCHEMES[compute])
        except ValueError:
            raise ExportError(
                f"{name} holds values that are not finite, which {compute} cannot represent: "
                "resume training from an earlier checkpoint, or give --dtype auto"
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
    """The inverse for floating-point weights: writes those of a Hugging Face folder from each
    rank's files, in order of rank."""
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
