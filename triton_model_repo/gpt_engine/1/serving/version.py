"""A version folder of the model repository: what the export wrote, read and verified.

    version = Version.read("triton_model_repo/gpt_engine/1")     # the leader: no tensor is read
    version.model.vocab_size, version.tp, version.prompts        # prompts: {name: virtual tokens}
    weights = version.weights(rank)                              # a rank: {name: tensor}
    prompts = version.prompt_tensors()                           # {name: (P, C)}

manifest.json names every file with its bytes and SHA-256, and it is written last: a folder without
it is not complete. Each rank reads rank-R-of-N.safetensors, its part of every tensor, under Hugging
Face's names. Whatever is missing, changed or cut short raises LoadError with the file's name.
Nothing but JSON and safetensors is read: neither can run code.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
ROPE_KINDS = ("default", "linear", "llama3")
COUNTS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings",
)  # fmt: skip


class LoadError(ValueError):
    """The version folder can not be served; the message names the file and what is wrong."""


@dataclass(frozen=True)
class Model:
    """The sizes of a Llama-layout decoder, from config.json."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    max_positions: int
    norm_eps: float
    rope: dict  # rope_theta, rope_type and the numbers that the type needs
    tied: bool  # one matrix for the first and the last layer
    attention_bias: bool
    mlp_bias: bool
    end_tokens: tuple[int, ...]  # each of them ends the text

    @classmethod
    def from_config(cls, config, end=None):
        """From config.json's dictionary. Raises KeyError, TypeError or ValueError.

        end: eos_token_id of generation_config.json, which overrules
        """
        if config.get("model_type") != "llama":
            raise ValueError(f"model_type {config.get('model_type')!r} is served by no code here")
        # transformers 5 keeps all of rope in rope_parameters; before, it was in two places
        rope = {"rope_theta": config.get("rope_theta", 10000.0)}
        rope.update(config.get("rope_scaling") or {})
        rope.update(config.get("rope_parameters") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        if rope["rope_type"] not in ROPE_KINDS:
            raise ValueError(f"rope scaling {rope['rope_type']!r} is not supported")
        for name, value in config.items():
            if name in COUNTS and (type(value) is not int or value < 1):
                raise ValueError(f"{name} {value!r} is not a whole number of at least 1")
        end = config.get("eos_token_id") if end is None else end
        heads = config["num_attention_heads"]
        return cls(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=config.get("head_dim") or config["hidden_size"] // heads,
            mlp_size=config["intermediate_size"],
            max_positions=config.get("max_position_embeddings", 2048),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope,
            tied=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            mlp_bias=config.get("mlp_bias", False),
            end_tokens=tuple(end) if isinstance(end, list) else () if end is None else (end,),
        )


def prompt_file(name):
    """Where a prompt is, in the version folder."""
    return f"prompts/{name}.safetensors"


def shares(total, ranks):
    """How many of `total` things each rank holds: equal, or one more on the first ranks."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


@dataclass(frozen=True)
class Version:
    """A version folder whose manifest and small files were verified."""

    folder: Path
    manifest: dict
    model: Model

    @classmethod
    def read(cls, folder):
        """Reads the manifest and the configuration, and verifies all but the weights' hashes."""
        folder = Path(folder)
        manifest = _json(folder, MANIFEST, "is this version complete? Export it again")
        for key, kind in (("tp", int), ("files", dict), ("prompts", dict)):
            if type(manifest.get(key)) is not kind or manifest[key] == 0:
                raise LoadError(f"{folder / MANIFEST} has no {key!r}: export this version again")
        if manifest.get("format") != 1:
            raise LoadError(
                f"{folder / MANIFEST} has format {manifest.get('format')!r}, and this engine reads "
                "format 1: export this version again"
            )
        for name, facts in manifest["prompts"].items():
            if not isinstance(facts, dict) or type(facts.get("length")) is not int:
                raise LoadError(f"{folder / MANIFEST} has no length of prompt {name!r}")
        version = cls(folder, manifest, None)
        for name in [*map(version.shard, range(version.tp)), *map(prompt_file, version.prompts)]:
            version.listed(name)
        for name in manifest["files"]:
            version.verify(name, values=not name.startswith("rank-"))
        try:
            end = None
            if "generation_config.json" in manifest["files"]:
                end = _json(folder, "generation_config.json").get("eos_token_id")
            model = Model.from_config(_json(folder, "config.json"), end)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, LoadError):
                raise
            what = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise LoadError(f"{folder / 'config.json'}: {what}") from None
        if model.kv_heads % version.tp or model.heads % version.tp:
            raise LoadError(
                f"{folder / MANIFEST}: tp {version.tp} does not divide {model.heads} heads and "
                f"{model.kv_heads} key-value heads"
            )
        return cls(folder, manifest, model)

    @property
    def tp(self):
        """Ranks that share the model."""
        return self.manifest["tp"]

    @property
    def name(self):
        return self.manifest.get("name") or self.folder.name

    @property
    def prompts(self):
        """{name of a prompt: how many virtual tokens it has}."""
        return {name: facts["length"] for name, facts in self.manifest["prompts"].items()}

    def shard(self, rank):
        """The file name of a rank's weights."""
        return f"rank-{rank}-of-{self.tp}.safetensors"

    def listed(self, name):
        """What the manifest says of a file."""
        facts = self.manifest["files"].get(name)
        if not isinstance(facts, dict) or not {"bytes", "sha256"} <= set(facts):
            raise LoadError(f"{self.folder / MANIFEST} does not list {name}: export it again")
        return facts

    def verify(self, name, values=True):
        """Compares a file's size, and its SHA-256 where `values`, with the manifest."""
        facts, file = self.listed(name), self.folder / name
        try:
            size = file.stat().st_size
            if size != facts["bytes"]:
                raise LoadError(
                    f"{file} has {size} bytes and should have {facts['bytes']}: it is cut short or "
                    "was changed, copy or export it again"
                )
            if values and _sha256(file) != facts["sha256"]:
                raise LoadError(
                    f"{file} is not what the manifest lists (SHA-256 differs): it was changed or "
                    "damaged, copy or export it again"
                )
        except OSError as error:
            raise LoadError(f"{file} cannot be read: {error.strerror}") from None

    def weights(self, rank):
        """{name: tensor} of one rank, verified, in the stored type on the CPU."""
        name = self.shard(rank)
        self.verify(name)
        tensors = _tensors(self.folder / name)
        expected = rank_shapes(self.model, rank, self.tp)
        for key in expected:
            if key not in tensors:
                raise LoadError(f"{self.folder / name} lacks {key}: export this version again")
        for key, tensor in tensors.items():
            if key not in expected:
                raise LoadError(f"{self.folder / name} holds {key}, which the model has not")
            if tuple(tensor.shape) != expected[key]:
                raise LoadError(
                    f"{self.folder / name}: {key} has shape {list(tensor.shape)}, and rank {rank} "
                    f"of {self.tp} needs {list(expected[key])}"
                )
        return tensors

    def prompt_tensors(self):
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


def rank_shapes(model, rank, tp):
    """{name: shape} of one rank's tensors.

    Of q, k, v, gate, up and the words' matrices a rank has some rows, with their biases, of o and
    down some columns; the biases of these two are on rank 0 only.
    """
    C, D = model.hidden_size, model.head_size
    queries, keys = model.heads // tp * D, model.kv_heads // tp * D
    columns, words = shares(model.mlp_size, tp)[rank], shares(model.vocab_size, tp)[rank]
    attention = {"q": (queries, C), "k": (keys, C), "v": (keys, C), "o": (C, queries)}
    mlp = {"gate": (columns, C), "up": (columns, C), "down": (C, columns)}
    shapes = {"model.embed_tokens.weight": (words, C), "model.norm.weight": (C,)}
    if not model.tied:
        shapes["lm_head.weight"] = (words, C)
    for number in range(model.layers):
        layer = f"model.layers.{number}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (C,)
        for module, sizes, biased in (
            ("self_attn", attention, model.attention_bias),
            ("mlp", mlp, model.mlp_bias),
        ):
            for name, size in sizes.items():
                shapes[f"{layer}{module}.{name}_proj.weight"] = size
                if biased and (rank == 0 or name not in ("o", "down")):
                    shapes[f"{layer}{module}.{name}_proj.bias"] = size[:1]
    return shapes


def _json(folder, name, hint="export this version again"):
    file = folder / name
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{file} is missing: {hint}") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise LoadError(f"{file} holds a JSON {type(data).__name__}, not an object")
    return data


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
