"""A checkpoint's fingerprint: one hexadecimal number that tells whether weights are the same.

    fingerprint("models/base") == fingerprint(GPT.from_pretrained("models/base"))

SHA-256 over the names, shapes and values of all tensors, in the order of the names. It does not
depend on how they are stored: in one file or in shards, on which device, or with more bits than the
values need. So each value counts as fp32: weights stored in bf16 and loaded as fp32 are the same
model. Weights that were rounded to fewer bits are another one.
"""

import hashlib
from pathlib import Path

import torch

from utils.models import hf_format

BLOCK = 2**22  # values that are converted at once


def fingerprint(base: str | Path | torch.nn.Module) -> str:
    """64 hexadecimal digits for a checkpoint folder, or for a model that holds whole tensors.

    A folder is read tensor by tensor, in blocks, so it need not fit into memory. Raises ValueError
    (CheckpointError) for a folder that cannot be read, or where the model is a part of one.
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
        for name in names:  # its file is opened for one tensor: what was read of it leaves memory
            yield from hf_format.read_tensors(headers, [name])
        return
    for name, parameter in base.named_parameters():  # a tied matrix comes once
        if "embed_tokens.embedding." in name:
            raise ValueError(
                "the model has a prompt in front: take its fingerprint outside of `prompted`"
            )
        if hasattr(parameter, "tp_split"):
            raise ValueError(
                f"{name} is a part of a matrix: take the fingerprint of the folder, or before the "
                "model is split"
            )
        yield name, parameter.detach()


def _in_blocks(tensor):
    """The rows of a tensor, so many at once that their values as fp32 take few megabytes."""
    if tensor.ndim == 0 or tensor.numel() == 0:
        return (tensor,)
    return tensor.split(max(1, BLOCK * len(tensor) // tensor.numel()))
