"""A version folder of the model repository, as written by the export: reads and verifies it.

    version = Version.read("triton_model_repo/gpt_engine/1")     # the leader: reads no tensor
    version.model.vocab_size, version.tp, version.prompts        # prompts: {name: virtual tokens}
    weights = version.weights(rank)                              # a rank: {name: tensor}
    prompts = version.prompt_tensors()                           # {name: (P, C)}

manifest.json names every file with its bytes and SHA-256, and it is written last: a folder without
it is incomplete. Each rank reads rank-R-of-N.safetensors, its shard of every tensor, under Hugging
Face's names (for quantized ones, see stored.py); a large shard is in several files,
rank-R-of-N-00001-of-00003.safetensors. A file that is missing, changed or truncated raises
LoadError with its name. The manifest's "compute" is the version's compute dtype; if absent, as in
all versions of format 1, it is "auto".
Only JSON and safetensors are read: neither can run code.
"""

import hashlib
import re
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from utils import untrusted
from utils.models.config import GPTConfig
from utils.models.tp_plan import check_ranks
from utils.serving.engine.stored import COMPUTE, FLOATS, rank_tensors

if TYPE_CHECKING:  # only ranks need it
    import torch

MANIFEST = "manifest.json"


class LoadError(ValueError):
    """The version folder cannot be served; the message names the file and the problem."""


def prompt_file(name: str) -> str:
    """The path of a prompt in the version folder."""
    return f"prompts/{name}.safetensors"


@dataclass(frozen=True)
class Version:
    """A version folder whose manifest and small files were verified."""

    folder: Path
    manifest: dict
    model: GPTConfig

    @classmethod
    def read(cls, folder: Path | str) -> "Version":
        """Read manifest and configuration, and verify everything but the weights' hashes."""
        folder = Path(folder)
        manifest = _json(folder, MANIFEST, "is this version complete? Export it again")
        for key, kind in (("tp", int), ("files", dict), ("prompts", dict)):
            if type(manifest.get(key)) is not kind or manifest[key] == 0:
                raise LoadError(f"{folder / MANIFEST} has no {key!r}: export this version again")
        if manifest.get("format") not in (1, 2):
            raise LoadError(
                f"{folder / MANIFEST} has format {manifest.get('format')!r}, but this engine reads "
                "formats 1 and 2: export this version again"
            )
        types = {"dtype": manifest.get("dtype"), "compute": manifest.get("compute", "auto")}
        for (key, given), known in zip(types.items(), (tuple(FLOATS), COMPUTE)):
            if given not in known:
                raise LoadError(
                    f"{folder / MANIFEST} has {key} {given!r}, but this engine supports "
                    f"{', '.join(known)}: export this version again"
                )
        for name, facts in manifest["prompts"].items():
            if not isinstance(facts, dict) or type(facts.get("length")) is not int:
                raise LoadError(f"{folder / MANIFEST} has no length of prompt {name!r}")
        version = cls(folder, manifest, None)
        shards = chain.from_iterable(map(version.shards, range(version.tp)))
        for name in (*shards, *map(prompt_file, version.prompts)):
            version.listed(name)
        for name in manifest["files"]:
            version.verify(name, values=not name.startswith("rank-"))
        file = folder / "config.json"
        try:
            model = _config(folder, manifest["files"])
            file = folder / MANIFEST
            check_ranks(model, version.tp)
        except LoadError:
            raise
        except (TypeError, ValueError) as error:
            raise LoadError(f"{file}: {error}") from None
        return cls(folder, manifest, model)

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""
        return self.manifest["tp"]

    @property
    def stored(self) -> str:
        """The dtype of the weights stored in floating point."""
        return self.manifest["dtype"]

    @property
    def compute(self) -> str:
        """The compute dtype: "auto", a floating-point dtype, "int8" or "int4"."""
        return self.manifest.get("compute", "auto")

    @property
    def number(self) -> str:
        """The version's number in the repository, its folder's name: "2"."""
        return self.folder.name

    @property
    def name(self) -> str:
        return self.manifest.get("name") or self.folder.name

    @property
    def prompts(self) -> dict[str, int]:
        """{prompt name: number of virtual tokens}."""
        return {name: facts["length"] for name, facts in self.manifest["prompts"].items()}

    def shards(self, rank: int) -> list[str]:
        """The file names of a rank's weights."""
        stem = f"rank-{rank}-of-{self.tp}"
        several = re.compile(stem + r"-\d+-of-\d+\.safetensors")
        return sorted(filter(several.fullmatch, self.manifest["files"])) or [f"{stem}.safetensors"]

    def listed(self, name: str) -> dict:
        """The manifest's entry for a file."""
        facts = self.manifest["files"].get(name)
        if not isinstance(facts, dict) or not {"bytes", "sha256"} <= set(facts):
            raise LoadError(f"{self.folder / MANIFEST} does not list {name}: export it again")
        return facts

    def verify(self, name: str, values: bool = True) -> None:
        """Compare a file's size and, with `values`, its SHA-256 with the manifest."""
        facts, file = self.listed(name), self.folder / name
        try:
            size = file.stat().st_size
            if size != facts["bytes"]:
                raise LoadError(
                    f"{file} has {size} bytes and should have {facts['bytes']}: it is truncated or "
                    "was changed; copy or export it again"
                )
            if values and _sha256(file) != facts["sha256"]:
                raise LoadError(
                    f"{file} is not what the manifest lists (SHA-256 differs): it was changed or "
                    "damaged; copy or export it again"
                )
        except OSError as error:
            raise LoadError(f"{file} cannot be read: {error.strerror}") from None

    def weights(self, rank: int) -> "dict[str, torch.Tensor]":
        """{name: tensor} of one rank, verified, in the stored dtypes on the CPU."""
        tensors = {}
        expected = rank_tensors(self.model, rank, self.tp, self.stored, self.compute)
        for name in self.shards(rank):
            self.verify(name)
            for key, tensor in _tensors(self.folder / name).items():
                if key not in expected:
                    raise LoadError(f"{self.folder / name} holds {key}, which the model lacks")
                dtype, shape = expected[key]
                if tuple(tensor.shape) != shape:
                    raise LoadError(
                        f"{self.folder / name}: {key} has shape {list(tensor.shape)}, but rank "
                        f"{rank} of {self.tp} needs {list(shape)}"
                    )
                if (found := str(tensor.dtype).removeprefix("torch.")) != dtype:
                    raise LoadError(f"{self.folder / name}: {key} is {found}, not {dtype}")
                tensors[key] = tensor
        for key in expected:
            if key not in tensors:
                raise LoadError(f"{self.folder} lacks {key} of rank {rank}: export it again")
        return tensors

    def prompt_tensors(self) -> "dict[str, torch.Tensor]":
        """{name: virtual tokens (P, C)} on the CPU."""
        prompts = {}
        for name, length in self.prompts.items():
            file = self.folder / prompt_file(name)
            prompts[name] = _tensors(file).get("prompt_embeddings")
            shape = None if prompts[name] is None else tuple(prompts[name].shape)
            if shape != (length, self.model.hidden_size):
                raise LoadError(
                    f"{file} holds no prompt_embeddings of shape "
                    f"{[length, self.model.hidden_size]}: export this version again"
                )
        return prompts


def _config(folder, files):
    """The sizes in config.json. Raises ValueError for a model that this engine does not support."""
    config = GPTConfig.from_hf(_json(folder, "config.json"))
    if config.experts is not None:
        raise ValueError("this engine does not serve a mixture of experts")
    if "generation_config.json" in files:  # its end tokens take precedence
        ends = _json(folder, "generation_config.json").get("eos_token_id")
        if ends is not None:
            config = replace(config, eos_token_id=tuple(ends) if isinstance(ends, list) else ends)
    return config


def _json(folder, name, hint="export this version again"):
    file = folder / name
    try:
        return untrusted.read_json(file)
    except FileNotFoundError:
        raise LoadError(f"{file} is missing: {hint}") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{file} cannot be read as JSON: {error}") from None


def _sha256(file):
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _tensors(file):
    from safetensors import SafetensorError, safe_open  # with torch, which only ranks need

    try:
        with safe_open(str(file), framework="pt") as data:
            return {name: data.get_tensor(name) for name in data.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} is not a readable safetensors file: {error}") from None
