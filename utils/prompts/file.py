"""A prompt on disk: a small safetensors file that records the model it belongs to.

    save_prompt("task.safetensors", prompt, "models/base", task="module names")
    prompt = load_prompt("task.safetensors", base="models/base")     # another base is refused
    prompt_facts("task.safetensors")                                 # its metadata

The tensor is called `prompt_embeddings`, as in the adapters of the `peft` library, whose folders
`read_peft` reads. The file's header holds the fingerprint of the base.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from utils.models import hf_format
from utils.models.fingerprint import fingerprint
from utils.models.gpt import GPT

TENSOR = "prompt_embeddings"


def save_prompt(
    file: Path | str,
    prompt: torch.Tensor,
    base: GPT | Path | str,
    base_name: str | None = None,
    **facts: Any,
) -> None:
    """Write a prompt (P, C); the file appears whole or not at all.

    base        the model's folder, the model, or its fingerprint
    base_name   its name in messages; None: the folder's name
    facts       further metadata, stored as text
    """
    if prompt.ndim != 2:
        raise ValueError(
            f"a prompt of shape {list(prompt.shape)} is not (P, C): save one per file"
        )
    facts = {name: str(value) for name, value in facts.items()}
    facts |= {
        "format": "pt",
        "base_fingerprint": _fingerprint(base),
        "base_name": base_name or _name(base),
        "length": str(prompt.shape[0]),
        "hidden_size": str(prompt.shape[1]),
    }
    file = Path(file).expanduser()
    beside = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        save_file({TENSOR: prompt.detach().cpu().contiguous()}, str(beside), metadata=facts)
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, file)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be written: {error}") from None
    finally:
        with suppress(OSError):
            beside.unlink()


def load_prompt(file: Path | str, base: GPT | Path | str | None = None) -> torch.Tensor:
    """The prompt (P, C) of a file, on the CPU.

    base   the model that it is for: folder, model or fingerprint; None: do not check
    Raises ValueError naming both models if the file is for another one.
    """
    facts, prompt = _read(file)
    if base is None:
        return prompt
    stored = facts.get("base_fingerprint")
    if stored is None:
        raise ValueError(f"{file} does not say which model it is for: load it with base=None")
    found = _fingerprint(base)
    if found != stored:
        raise ValueError(
            f"{file} is a prompt for {facts.get('base_name')} ({stored[:12]}), not for "
            f"{_name(base)} ({found[:12]}): load the model that it was tuned on"
        )
    return prompt


def prompt_facts(file: Path | str) -> dict[str, str]:
    """The metadata of a prompt file: {name: text}."""
    return _read(file)[0]


def read_peft(folder: Path | str) -> torch.Tensor:
    """The prompt (P, C) in a folder saved by `peft` (PromptTuningConfig), on the CPU."""
    config = hf_format.read_json(Path(folder) / "adapter_config.json")
    if config.get("peft_type") != "PROMPT_TUNING":
        raise ValueError(f"{folder} holds a {config.get('peft_type')} adapter, not PROMPT_TUNING")
    return _read(Path(folder) / "adapter_model.safetensors")[1]


def _read(file):
    try:
        with safe_open(str(file), framework="pt") as data:
            facts, names = data.metadata() or {}, list(data.keys())
            prompt = data.get_tensor(TENSOR) if TENSOR in names else None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as a safetensors file: {error}") from None
    if prompt is None or prompt.ndim != 2:
        held = ", ".join(names[:3]) or "nothing"
        raise ValueError(f"{file} is not a prompt: it holds {held}, not {TENSOR} (P, C)")
    return facts, prompt


def _fingerprint(base):
    return base if _is_fingerprint(base) else fingerprint(base)


def _is_fingerprint(base):
    return isinstance(base, str) and len(base) == 64 and set(base) <= set("0123456789abcdef")


def _name(base):
    """The name of a base in messages."""
    if isinstance(base, torch.nn.Module):
        return "this model"
    return "this base" if _is_fingerprint(base) else Path(base).resolve().name
