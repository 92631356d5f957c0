"""A model's sizes, checked; its cost, by formula; its Hugging Face config.json.

config = GPTConfig(hidden_size=128, layers=4, heads=4)
config.parameter_count()            # 0.86 million, without building the model
config.flops_per_token(seq=128)     # of one training step
config.to_hf(), GPTConfig.from_hf(dictionary)
"""

import math
from dataclasses import dataclass, field, replace
from types import NoneType

from utils import untrusted

ROPE_KINDS = {  # rope_type -> the additional keys that it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class DecoderSizes:
    """The sizes of a decoder, and what follows from them: widths, parameters, FLOPs.

    `GPTConfig` describes the decoder that the course trains and serves, the planner's `Model` any
    decoder that it plans for. Both set their sizes; each formula is here, once.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int | None
    head_dim: int | None
    intermediate_size: int | None
    experts: int | None
    experts_per_token: int

    gated = True  # three matrices in the MLP and RMSNorm; else two and LayerNorm, with a bias
    learned_positions = 0  # rows of the table of learned positions
    is_tied: bool  # one matrix for embedding and head
    has_experts: bool  # a mixture with a router, not one MLP per layer
    biases: tuple[bool, bool, bool]  # whether (q, k and v; o; an MLP's matrices) have them

    # ---- widths

    @property
    def key_value_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.heads if self.head_dim is None else self.head_dim

    @property
    def query_width(self) -> int:
        """The total width of all query heads."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """The total width of all key heads, and also of all value heads."""
        return self.key_value_heads * self.head_size

    @property
    def mlp_size(self) -> int:
        """The width inside the MLP."""
        if self.intermediate_size is not None:
            return self.intermediate_size
        return 8 * math.ceil(self.hidden_size / 3) if self.gated else 4 * self.hidden_size

    # ---- parameters

    @property
    def attention_matrices(self) -> int:
        """Parameters in the matrices of one attention: queries, keys, values, output."""
        return 2 * self.hidden_size * (self.query_width + self.key_width)

    @property
    def expert_matrices(self) -> int:
        """Parameters in the matrices of one expert, or of the MLP of a dense layer."""
        return (3 if self.gated else 2) * self.hidden_size * self.mlp_size

    @property
    def router(self) -> int:
        """Parameters of the router, the matrix that assigns tokens to experts."""
        return self.hidden_size * self.experts if self.has_experts else 0

    @property
    def split_biases(self) -> tuple[int, int]:
        """(attention's, an expert's) biases that tensor parallelism splits: of column layers."""
        of_qkv, _, of_mlp = self.biases
        columns = (2 if self.gated else 1) * self.mlp_size
        return of_qkv * (self.query_width + 2 * self.key_width), of_mlp * columns

    @property
    def whole(self) -> tuple[int, int]:
        """(a layer's, an expert's) parameters that every tensor-parallel rank holds: norms, row
        biases, the router."""
        _, of_output, of_mlp = self.biases
        norms = 2 * self.last_norm
        return norms + of_output * self.hidden_size + self.router, of_mlp * self.hidden_size

    @property
    def last_norm(self) -> int:
        return self.hidden_size if self.gated else 2 * self.hidden_size

    @property
    def expert_parameters(self) -> int:
        """All parameters of one expert, or of the MLP of a dense layer."""
        return self.expert_matrices + self.split_biases[1] + self.whole[1]

    def parameter_count(self) -> int:
        """The number of parameters; tied embeddings count once."""
        layer = self.attention_matrices + self.split_biases[0] + self.whole[0]
        layer += (self.experts if self.has_experts else 1) * self.expert_parameters
        ends = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        ends += self.learned_positions * self.hidden_size + self.last_norm
        return self.layers * layer + ends

    def active_parameter_count(self) -> int:
        """The number of parameters without the experts that a token does not use."""
        idle = self.experts - self.experts_per_token if self.has_experts else 0
        return self.parameter_count() - self.layers * idle * self.expert_parameters

    def matmul_parameter_count(self) -> int:
        """The parameters that multiply every token: all matrices except the embedding's lookup.

        Only the experts that compute a token count.
        """
        experts = self.experts_per_token if self.has_experts else 1
        layer = self.attention_matrices + experts * self.expert_matrices + self.router
        return self.layers * layer + self.vocab_size * self.hidden_size  # the last: lm_head

    # ---- FLOPs

    def flops_per_token(self, seq: int, causal: bool = False) -> float:
        """Floating-point operations per token in one training step (forward and backward).

        6 per matmul parameter (2 forward, 4 backward), and 12 · layers · heads · head size · seq
        for the attention scores and their use (PaLM, arXiv:2204.02311, appendix B).

        The rule of thumb "6 N" with N = all parameters is wrong if the embedding is a large part of
        N (its lookup multiplies nothing), if embeddings are tied (lm_head still multiplies), or if
        seq is not small compared with 6 · hidden_size (attention). Both leave out norms, rotary
        positions, activations and softmax. `causal` counts only the half of the scores that a
        causal kernel needs; hardware counters and published MFU count all.
        """
        attended = (seq + 1) / 2 if causal else seq
        attention = 12 * self.layers * self.query_width * attended
        return 6 * self.matmul_parameter_count() + attention


@dataclass(frozen=True)
class GPTConfig(DecoderSizes):
    """The sizes of a Llama-layout decoder. Raises ValueError if they do not fit together.

    None is derived from the other sizes: see `key_value_heads`, `head_size`, `mlp_size`.
    """

    vocab_size: int = 256
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None  # None: as many as heads; 1: multi-query attention
    head_dim: int | None = None  # None: hidden_size / heads
    intermediate_size: int | None = None  # None: 8/3 hidden_size, rounded up to a multiple of 8
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: dict | None = field(default=None, hash=False)  # {"rope_type": "llama3", ...}
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention_bias: bool = False  # of q, k, v and o
    qkv_bias: bool = False  # of q, k and v only, as in Qwen2
    mlp_bias: bool = False
    experts: int | None = (
        None  # None: one MLP per block; else a mixture of n (utils/models/moe.py)
    )
    experts_per_token: int = 2  # how many of them compute each token
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate_size",
            "max_positions",
            "experts",
            "experts_per_token",
        ):
            value = getattr(self, name)
            optional = name in ("kv_heads", "head_dim", "intermediate_size", "experts")
            if not ((type(value) is int and value > 0) or (optional and value is None)):
                raise ValueError(f"{name} {value!r} is not an integer of at least 1")
            largest = LARGEST.get(name, 2**31 - 1)
            if value is not None and value > largest:
                raise ValueError(f"{name} {value} is more than any model has: at most {largest:,}")
        for name in ("rope_theta", "norm_eps"):
            if type(getattr(self, name)) not in (int, float):
                raise ValueError(f"{name} {getattr(self, name)!r} is not a number")
        if self.hidden_size % self.heads:
            raise ValueError(f"heads {self.heads} does not divide hidden_size {self.hidden_size}")
        if self.heads % self.key_value_heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}: each "
                "key-value head serves an equal group of query heads"
            )
        if self.head_size % 2:
            raise ValueError(
                f"head size {self.head_size} is odd: rotary positions rotate pairs of "
                "values, so choose an even hidden_size / heads"
            )
        if not self.rope_theta > 0 or not self.norm_eps > 0:
            raise ValueError(
                f"rope_theta {self.rope_theta} and norm_eps {self.norm_eps} must be above 0"
            )
        if self.qkv_bias and (self.attention_bias or self.mlp_bias):
            raise ValueError("qkv_bias excludes attention_bias and mlp_bias: Qwen2 has neither")
        self._check_rope_scaling()
        self._check_experts()

    def _check_experts(self):
        if self.experts is None:
            return
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the number of "
                f"experts, {self.experts}"
            )
        for name in ("attention_bias", "qkv_bias", "mlp_bias"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} does not work with experts {self.experts}: the layout with experts, "
                    "Mixtral's, has no biases"
                )

    def _check_rope_scaling(self):
        scaling = self.rope_scaling or {"rope_type": "default"}
        kind = scaling.get("rope_type")
        if not isinstance(kind, str) or kind not in ROPE_KINDS:
            raise ValueError(
                f"rope scaling {kind!r} is not supported: only {', '.join(ROPE_KINDS)} are"
            )
        for key in ROPE_KINDS[kind]:
            if not isinstance(scaling.get(key), (int, float)) or scaling[key] <= 0:
                raise ValueError(
                    f"rope scaling {kind!r} needs a positive {key}, not {scaling.get(key)!r}"
                )

    @property
    def is_tied(self) -> bool:
        return self.tie_embeddings

    @property
    def has_experts(self) -> bool:
        return self.experts is not None

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias or self.qkv_bias, self.attention_bias, self.mlp_bias

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        if self.eos_token_id is None:
            return ()
        one = not isinstance(self.eos_token_id, tuple)
        return (self.eos_token_id,) if one else self.eos_token_id

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape} of every parameter, without building the model; tied ones appear once."""
        C, M = self.hidden_size, self.mlp_size
        queries, keys = self.query_width, self.key_width
        attention = {"q": (queries, C), "k": (keys, C), "v": (keys, C), "o": (C, queries)}
        mlp = {"gate": (M, C), "up": (M, C), "down": (C, M)}
        shapes = {"model.embed_tokens.weight": (self.vocab_size, C)}
        for number in range(self.layers):
            layer = f"model.layers.{number}."
            of_qkv, of_output, of_mlp = self.biases
            matrices = [("self_attn", attention)]
            if self.experts is None:
                matrices.append(("mlp", mlp))
            biased = {**dict.fromkeys("qkv", of_qkv), "o": of_output}
            for module, sizes in matrices:
                for name, size in sizes.items():
                    shapes[f"{layer}{module}.{name}_proj.weight"] = size
                    if biased.get(name, of_mlp):
                        shapes[f"{layer}{module}.{name}_proj.bias"] = size[:1]
            moe = f"{layer}block_sparse_moe."
            if self.experts is not None:
                shapes[f"{moe}gate.weight"] = (self.experts, C)
            for expert in range(self.experts or 0):
                for name, size in {"w1": (M, C), "w2": (C, M), "w3": (M, C)}.items():
                    shapes[f"{moe}experts.{expert}.{name}.weight"] = size
            for name in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{layer}{name}.weight"] = (C,)
        shapes["model.norm.weight"] = (C,)
        if not self.tie_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, C)
        return shapes

    # ---- Hugging Face's config.json

    def to_hf(self) -> dict:
        """The dictionary of config.json, as transformers 5 writes it."""
        scaling = dict(self.rope_scaling or {"rope_type": "default"})
        eos = self.eos_token_id
        kind = "qwen2" if self.qkv_bias else "llama" if self.experts is None else "mixtral"
        names = HF_NAMES | HF_NAMES_OF[kind]
        return {
            "architectures": [f"{kind.title()}ForCausalLM"],
            "model_type": kind,
            **{theirs: getattr(self, ours) for theirs, ours in names.items()},
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.mlp_size,
            "rope_parameters": {**scaling, "rope_theta": self.rope_theta},
            "hidden_act": "silu",
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        }

    @classmethod
    def from_hf(cls, hf: dict) -> "GPTConfig":
        """A GPTConfig from config.json's dictionary. Raises ValueError for models that do not
        compute like Llama, Mistral, Qwen2 or Mixtral without a sliding window."""
        untrusted.check(hf, dict.fromkeys(OBJECTS, (dict, NoneType)))
        hf = _with_defaults(hf)
        _refuse_other_models(hf)
        names = HF_NAMES | HF_NAMES_OF[hf["model_type"]]
        values = {ours: hf[theirs] for theirs, ours in names.items() if theirs in hf}
        for theirs, ours in (
            ("num_key_value_heads", "kv_heads"),
            ("head_dim", "head_dim"),
            ("intermediate_size", "intermediate_size"),
        ):
            values[ours] = hf.get(theirs)
        if isinstance(hf.get("eos_token_id"), list):
            values["eos_token_id"] = tuple(hf["eos_token_id"])
        # transformers 5 keeps all rope settings in rope_parameters; before, they were in two places
        rope = {}
        for name in ("rope_scaling", "rope_parameters"):
            rope.update(hf.get(name) or {})
        values["rope_theta"] = rope.pop("rope_theta", hf.get("rope_theta", 10000.0))
        old_name = rope.pop("type", "default")
        rope.setdefault("rope_type", old_name)
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("partial_rotary_factor is not supported: all of a head is rotated")
        values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        return cls(**values, qkv_bias=hf["model_type"] == "qwen2")._with_defaults_as_none()

    def _with_defaults_as_none(self):
        """This config with None for sizes equal to their default: saved configs then stay equal."""
        config = self
        for name in ("kv_heads", "head_dim", "intermediate_size"):
            try:
                shorter = replace(config, **{name: None})
            except ValueError:  # hidden_size / heads may be odd if head_dim is given
                continue
            if shorter.to_hf() == self.to_hf():
                config = shorter
        return config


LARGEST = {"layers": 10_000, "experts": 2**16}  # each is a separate module, which is slow to build

OBJECTS = ("quantization_config", "rope_scaling", "rope_parameters")  # in a config.json

HF_NAMES = {  # config.json's name -> ours, with the same value
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "max_positions",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
}
HF_NAMES_OF = {  # names that only one layout has
    "llama": {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    "mistral": {},  # Llama, and saved as such
    "qwen2": {},
    "mixtral": {"num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"},
}
HF_DEFAULTS = {  # the values of entries that a config.json leaves out
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "qwen2": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
    },
    "mixtral": {
        "max_position_embeddings": 4096 * 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
HF_REFUSED = {  # features of a layout that ours does not have
    "llama": (),
    "mistral": ("sliding_window",),
    "qwen2": ("use_sliding_window",),
    "mixtral": ("sliding_window", "router_jitter_noise"),
}


def _with_defaults(hf):
    """config.json's dictionary with Hugging Face's defaults filled in, because they differ from
    ours."""
    kind = hf.get("model_type")
    if str(kind) not in HF_DEFAULTS:
        raise ValueError(
            f"model_type {kind!r} is not supported: only {', '.join(HF_DEFAULTS)} are"
        )
    return {**HF_DEFAULTS[kind], **hf}


def _refuse_other_models(hf):
    for name in HF_REFUSED[hf["model_type"]]:
        if hf.get(name):
            raise ValueError(f"{name} {hf[name]} is not supported: only a model without it is")
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    ):
        if hf.get(name) is None:
            raise ValueError(f"config.json has no {name}")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported: only 'silu' is")
    if hf.get("attention_dropout"):
        raise ValueError(f"attention_dropout {hf['attention_dropout']} is not supported: only 0 is")
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method")
        raise ValueError(
            f"quantization_config {method!r} is not supported: convert the checkpoint "
            "to float32, bfloat16 or float16"
        )
