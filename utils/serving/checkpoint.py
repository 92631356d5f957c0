"""The checkpoint to be served: its headers are read, and an unfit one is refused with the reason.

    source = Source.read("models/base")          # sizes, tensors and their type; no weights yet
    source.copy_small_files(folder)              # config.json, tokenizer.json …
    prompts = find_prompts("prompts", source)    # {name: file}, each fit for this model

A model is served as text, so it needs tokenizer.json. A model trained on bytes has none and gets
one whose 256 tokens are the bytes.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from utils.models import hf_format
from utils.models.config import GPTConfig
from utils.models.tokenizer import BYTES, Tokenizer
from utils.prompts.file import load_prompt, prompt_facts
from utils.serving.engine.stored import WIDTHS
from utils.serving.repository import ExportError
from utils.serving.shard import NAMES

PROMPT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
OTHERS = "--backend vllm writes any model that vLLM takes, for Triton's vLLM backend"
# copied if they exist
EXTRAS = ("generation_config.json", hf_format.TOKENIZER_CONFIG, "chat_template.jinja")


@dataclass(frozen=True)
class Source:
    """A checkpoint folder that can be served. Create it with `read`."""

    folder: Path
    config: GPTConfig
    shapes: dict  # {name: shape} of every tensor
    headers: dict  # {name: (file, shape)} of the same
    dtype: str  # of all of them, as safetensors calls it: "BF16"

    @classmethod
    def read(cls, folder: str | Path) -> "Source":
        """Read the folder's headers. Raises ExportError or CheckpointError, both ValueErrors, for
        a checkpoint that cannot be served."""
        folder = hf_format.recover(folder)
        hf = hf_format.read_config(folder)
        try:
            config = GPTConfig.from_hf(hf)
        except ValueError as error:
            raise ExportError(f"{folder}: {error}; {OTHERS}") from None
        if config.experts is not None:
            raise ExportError(
                f"{folder} is a mixture of {config.experts} experts, which our engine does not "
                f"serve: {OTHERS}"
            )
        shapes = config.parameter_shapes()
        headers = {
            name: header
            for name, header in hf_format.read_headers(folder).items()
            if not name.endswith("inv_freq")  # computed from the config
            and not (name == "lm_head.weight" and config.tie_embeddings)
        }
        dtype = _one_dtype(headers, folder)
        hf_format.check_shapes(headers, shapes, where=folder)
        _check_tokenizer(folder, config)
        return cls(folder, config, shapes, headers, dtype)

    @property
    def dtype_name(self) -> str:
        """The dtype as torch and config.json call it: "bfloat16"."""
        return NAMES[self.dtype]

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return self.parameters * WIDTHS[self.dtype_name]

    def copy_small_files(self, there: str | Path) -> None:
        """Copy everything but the weights."""
        for name in (hf_format.CONFIG, hf_format.TOKENIZER, *EXTRAS):
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, Path(there) / name)
        if not (self.folder / hf_format.TOKENIZER).is_file():
            write_byte_tokenizer(there)


def stored_dtypes(headers: hf_format.Headers) -> dict[str, str]:
    """{dtype as safetensors calls it: the name of a tensor that has it}"""
    found, by_file = {}, {}
    for name, (file, _) in headers.items():
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        with safe_open(str(file), framework="pt") as data:
            for name in names:
                found.setdefault(data.get_slice(name).get_dtype(), name)
    return found


def _one_dtype(headers, where):
    """The one dtype of these tensors: floating point of at most 32 bits. Refuses anything else."""
    found = stored_dtypes(headers)
    for dtype, name in found.items():
        if dtype not in NAMES:
            raise ExportError(
                f"{where}: {name} is stored as {dtype}, which is not served (a quantized model?): "
                "save the checkpoint as float32, bfloat16 or float16"
            )
    if len(found) != 1:
        held = " and ".join(f"{name} as {NAMES[dtype]}" for dtype, name in found.items())
        raise ExportError(f"{where} holds {held or 'no tensors'}: save all tensors in one dtype")
    return next(iter(found))


# ---- text <-> tokens


def _check_tokenizer(folder, config):
    if not (folder / hf_format.TOKENIZER).is_file():
        if config.vocab_size != BYTES:
            raise ExportError(
                f"{folder} has no {hf_format.TOKENIZER}, so its {config.vocab_size} tokens cannot "
                "be served as text: copy the model's into it (transformers' save_pretrained of a "
                "fast tokenizer writes it)"
            )
        return
    size = Tokenizer.load(folder).size
    if size > config.vocab_size:
        raise ExportError(
            f"{folder / hf_format.TOKENIZER} has {size} tokens, but the model has "
            f"{config.vocab_size}: use the tokenizer that it was trained with"
        )


def byte_tokenizer() -> HFTokenizer:
    """A tokenizers.Tokenizer whose token b is the byte b.

    tokenizer.json holds text, so each byte is written as a character: its own if printable, else
    one from 256 on (GPT-2's mapping, which ByteLevel uses too).
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(BYTES) if byte not in printable)
    characters = {byte: BYTES + number for number, byte in enumerate(others)}
    vocabulary = {chr(characters.get(byte, byte)): byte for byte in range(BYTES)}
    tokenizer = HFTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_byte_tokenizer(folder: str | Path) -> None:
    byte_tokenizer().save(str(Path(folder) / hf_format.TOKENIZER))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast"}
    hf_format.write_json(Path(folder) / hf_format.TOKENIZER_CONFIG, facts)


# ---- prompts


def find_prompts(prompts: str | Path | None, source: Source) -> dict[str, Path]:
    """{name: file} for a folder of NAME.safetensors, each checked against the model's sizes."""
    if prompts is None:
        return {}
    folder = Path(prompts).expanduser()
    found = {file.stem: file for file in sorted(folder.glob("*.safetensors"))}
    if not found:
        raise ExportError(f"{folder} holds no prompts: give a folder of NAME.safetensors files")
    for name, file in found.items():
        if not PROMPT_NAME.fullmatch(name):
            raise ExportError(
                f"{file}: {name!r} is not a plain word by which a request can name the prompt: "
                "rename the file, with letters, digits, _ and - only"
            )
        prompt = load_prompt(file)
        length, hidden = prompt.shape
        if hidden != source.config.hidden_size:
            raise ExportError(
                f"{file} holds vectors of {hidden} elements, but the model's have "
                f"{source.config.hidden_size}: it was tuned on another model"
            )
        if not 0 < length < source.config.max_positions:
            raise ExportError(
                f"{file} has {length} virtual tokens, but the model has "
                f"{source.config.max_positions} positions for them and the text: tune a shorter one"
            )
        if not prompt.is_floating_point() or not prompt.isfinite().all():
            raise ExportError(f"{file} holds values that are not finite: tune it again")
    return found


def check_prompts(found: dict[str, Path], fingerprint: str, source: Source) -> None:
    """Refuse a prompt that was not tuned on exactly these weights."""
    for file in found.values():
        facts = prompt_facts(file)
        if facts.get("base_fingerprint") is None:
            raise ExportError(
                f"{file} does not say which model it is for: save it with "
                "utils.prompt_tuning.save_prompt"
            )
        if facts["base_fingerprint"] != fingerprint:
            raise ExportError(
                f"{file} is a prompt for {facts.get('base_name')} "
                f"({facts['base_fingerprint'][:12]}), not for {source.folder.name} "
                f"({fingerprint[:12]}): tune it on this model, or leave it out"
            )


def facts_of_prompt(file: Path) -> dict:
    """The entry for a prompt in manifest.json: its length, and the facts in its file."""
    facts = {name: text for name, text in prompt_facts(file).items() if name != "format"}
    return {**facts, "length": len(load_prompt(file))}
