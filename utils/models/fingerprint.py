"""A checkpoint's fingerprint: one hexadecimal number that shows whether weights are the same.

    fingerprint("models/base") == fingerprint(GPT.from_pretrained("models/base"))

It is SHA-256 over the names, shapes and values of all tensors, in the order of their names. It does
not depend on how they are stored: in one file or in shards, on which device, or with more bits than
the values need. Every value is hashed as fp32, so weights stored in bf16 and loaded as fp32 are the
same model, while weights rounded to fewer bits are a different one.
"""

import hashlib
from pathlib import Path

import torch

from utils.models import hf_format

BLOCK = 2**22  # values converted at once


def fingerprint(base: str | Path | torch.nn.Module) -> str:
    """64 hexadecimal digits for a checkpoint folder, or for a model that holds whole tensors.

    A folder is read tensor by tensor, in blocks, so it need not fit into memory. Raises ValueError
    (CheckpointError) for an unreadable folder, or for only a part of a model.
    """
    digests = {}
    for name, tensor in _tensors_of(base):
        digest = hashlib.sha256(str(list(tensor.shape)).encode())
        for rows in _in_blocks(tensor):
            digest.update(rows.to("cpu", torch.float32).contiguous().numpy())
        digests[name] = digest.hexdigest()
    total = hashlib.sha256()
    for name in sorted(digests):
        total.update(f"{name}:{digests[name]}\n".encode())
    return total.hexdigest()


def _tensors_of(base):
    if not isinstance(base, torch.nn.Module):
        tied = hf_format.read_config(base).get("tie_word_embeddings", False)
        headers = hf_format.read_headers(base)
        follows = [n for n in headers if n.endswith("inv_freq") or (tied and n == "lm_head.weight")]
        names = [name for name in headers if name not in follows]
        for name in names:  # reopening the file frees the memory of the previous tensor
            yield from hf_format.read_tensors(headers, [name])
        return
    for name, parameter in base.named_parameters():  # a tied matrix comes once
        if "embed_tokens.embedding." in name:
            raise ValueError(
                "the model has a prompt in front: take its fingerprint outside `prompted`"
            )
        if hasattr(parameter, "tp_split"):
            raise ValueError(
                f"{name} is a slice of a matrix: take the fingerprint of the folder, or before the "
                "model is split"
            )
        yield name, parameter.detach()


def _in_blocks(tensor):
    """The rows of a tensor, in blocks that take a few megabytes as fp32."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        return (tensor,)
    return tensor.split(max(1, BLOCK * len(tensor) // tensor.numel()))
