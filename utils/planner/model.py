"""The model: its sizes, its exact parameter count, and FLOPs as the papers count them.

    MODELS["gpt3-175b"].parameters                 # 174_600_…
    Model(layers=96, hidden_size=12288, heads=96, seq=2048)       # the layout of GPT
    Model.of(GPTConfig(hidden_size=128), seq=256)                         # the workshop's own model

Two layouts. *GPT*: two matrices in the MLP, LayerNorms and biases, learned positions, one matrix
for embedding and head, dropout, attention scores kept in memory – as Megatron's papers of 2021 and
2022. *Gated* (Llama): three matrices in the MLP, RMSNorm, no biases, rotary positions, two
matrices for embedding and head, fused attention.
"""

from dataclasses import dataclass, replace
from typing import Any

from utils.models.config import DecoderSizes, GPTConfig

WORDS = {"hidden_size": "hidden", "vocab_size": "vocab", "intermediate_size": "ffn"}  # of options
LARGEST = 2**31 - 1  # of a size or a count: products of several stay exact, or far from inf
SHARED = ("layers", "hidden_size", "heads", "vocab_size", "kv_heads", "head_dim", "tie_embeddings")


@dataclass(frozen=True)
class Model(DecoderSizes):
    """The sizes of a decoder and of its training, in either layout; see `GPTConfig` for the
    workshop's own. Raises ValueError if they are incompatible.

    kv_heads, intermediate_size, head_dim: None means heads, 4 hidden_size (gated: 8/3 hidden_size,
    rounded up to a multiple of 8), hidden_size / heads.  tie_embeddings: one matrix for embedding
    and head; None: not in the gated layout.  experts 1: a dense MLP.  positions: learned ones;
    None: seq in the GPT layout, none in the gated one (0 in the GPT layout: rotary ones).
    squared_relu: the activation of the GPT layout's MLP, instead of a fused GELU.
    """

    layers: int
    hidden_size: int
    heads: int
    vocab_size: int = 51200
    seq: int = 2048
    kv_heads: int | None = None
    intermediate_size: int | None = None
    head_dim: int | None = None
    gated: bool = False
    tie_embeddings: bool | None = None
    positions: int | None = None
    squared_relu: bool = False
    experts: int = 1
    experts_per_token: int = 1
    batch: int = 1024  # default sequences per step
    name: str = ""

    def __post_init__(self):
        counts = ("layers", "hidden_size", "heads", "vocab_size", "seq", "experts")
        optional = ("kv_heads", "intermediate_size", "head_dim")
        for name in (*counts, "experts_per_token", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            check_whole(WORDS.get(name, name), value)
        if self.head_dim is None and self.hidden_size % self.heads:
            raise ValueError(f"heads {self.heads} do not divide hidden {self.hidden_size}")
        if self.heads % self.key_value_heads:
            raise ValueError(f"kv_heads {self.kv_heads} do not divide heads {self.heads}")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than experts {self.experts}"
            )

    @classmethod
    def of(cls, config: GPTConfig, seq: int, **changes: Any) -> "Model":
        """The sizes of a `utils.models.config.GPTConfig`, trained on sequences of `seq` tokens."""
        experts = getattr(config, "experts", None) or 1
        sizes = {
            **{name: getattr(config, name) for name in SHARED},
            "intermediate_size": config.mlp_size,
            "experts": experts,
            "experts_per_token": config.experts_per_token if experts > 1 else 1,
        }
        return cls(seq=seq, gated=True, **(sizes | changes))

    # ---- consequences of the layout

    @property
    def is_tied(self) -> bool:
        return not self.gated if self.tie_embeddings is None else self.tie_embeddings

    @property
    def has_experts(self) -> bool:
        return self.experts > 1

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return (not self.gated,) * 3

    @property
    def learned_positions(self) -> int:
        if self.positions is not None:
            return self.positions
        return 0 if self.gated else self.seq

    # ---- parameters and FLOPs

    @property
    def parameters(self) -> int:
        """All parameters, exactly; a tied matrix counts once."""
        return self.parameter_count()

    @property
    def active_parameters(self) -> int:
        """The parameters that one token uses: all except the experts it is not sent to."""
        return self.active_parameter_count()

    def flops(self, sequences: int = 1) -> int:
        """FLOPs of one training step without recomputation: forward once, backward twice as much.
        As in the papers, all seq × seq scores count, even those that a causal mask hides.

        For the GPT layout 72 B L s h² (1 + s/6h + V/12hL), Narayanan et al. 2021 (arXiv:2104.04473,
        section 5.1) and Korthikanti et al. 2022 (arXiv:2205.05198, appendix A)."""
        return sequences * self.seq * self.flops_per_token(self.seq)

    def recomputed_flops(self, mode: str, sequences: int = 1) -> int:
        """FLOPs that recomputation adds: a forward pass of all layers; with "selective", that of
        attention's core, and in the gated layout no matrix products."""
        scores = 4 * self.layers * self.seq * self.query_width
        head = 2 * self.vocab_size * self.hidden_size
        core = 0 if self.gated else scores
        full = 2 * self.matmul_parameter_count() - head + scores
        return sequences * self.seq * {"none": 0, "selective": core, "full": full}[mode]


def check_whole(name: str, value: Any) -> None:
    """Raise ValueError unless a size or a count is an int from 1 to LARGEST."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} {value!r} is not an integer above 0")
    if value > LARGEST:
        raise ValueError(f"{name} {value} is more than {LARGEST}, the planner's largest value")


def _gpt(layers, hidden, heads, batch, vocab=51200, seq=2048, **more):
    return Model(layers, hidden, heads, vocab, seq, batch=batch, **more)


def _llama(layers, hidden, heads, kv_heads, ffn, vocab, seq, batch, **more):
    return Model(layers, hidden, heads, vocab, seq, kv_heads, ffn, gated=True, batch=batch, **more)


# Sizes: gpt2 Radford et al. 2019; gpt3 Brown et al. 2020, Table 2.1, with Megatron's vocabulary;
# opt arXiv:2205.01068, Table 1 (two spare positions, as in its checkpoints); megatron-* Narayanan
# et al. 2021, Table 1; mt-nlg arXiv:2201.11990; llama arXiv:2302.13971, 2307.09288, 2407.21783;
# mixtral arXiv:2401.04088. `batch` is the source's batch, in sequences.
_PRESETS = {
    "gpt2": _gpt(12, 768, 12, 512, 50257, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 512, 50257, 1024),
    "gpt3-6.7b": _gpt(32, 4096, 32, 1024),
    "gpt3-13b": _gpt(40, 5120, 40, 1024),
    "gpt3-175b": _gpt(96, 12288, 96, 1536),
    "opt-1.3b": _gpt(24, 2048, 32, 512, 50272, positions=2050),
    "opt-30b": _gpt(48, 7168, 56, 2048, 50272, positions=2050),
    "opt-175b": _gpt(96, 12288, 96, 1024, 50272, positions=2050),
    "megatron-1.7b": _gpt(24, 2304, 24, 512),
    "megatron-3.6b": _gpt(30, 3072, 32, 512),
    "megatron-7.5b": _gpt(36, 4096, 32, 512),
    "megatron-18b": _gpt(40, 6144, 48, 1024),
    "megatron-22b": _gpt(48, 6144, 64, 1024),
    "megatron-39b": _gpt(48, 8192, 64, 1536),
    "megatron-76b": _gpt(60, 10240, 80, 1792),
    "megatron-145b": _gpt(80, 12288, 96, 2304),
    "megatron-310b": _gpt(96, 16384, 128, 2160),
    "mt-nlg-530b": _gpt(105, 20480, 128, 1920),
    "1t": _gpt(128, 25600, 160, 3072),
    "llama-7b": _llama(32, 4096, 32, None, 11008, 32000, 2048, 2048),
    "llama2-13b": _llama(40, 5120, 40, None, 13824, 32000, 4096, 1024),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096, 1024),
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, 1024),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, 2048),
    "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192, 2048),
    "mixtral-8x7b": _llama(
        32, 4096, 32, 8, 14336, 32000, 4096, 1024, experts=8, experts_per_token=2
    ),
    "kintsugi-1m": _llama(4, 128, 4, None, 344, 256, 256, 16),  # of the lessons
}
MODELS = {name: replace(model, name=name) for name, model in _PRESETS.items()}
