"""The model: a Llama-layout decoder in plain PyTorch, which knows nothing about parallelism.

Pipeline stages and the server's engine are made of the same blocks (`Decoder`).

Parameter names and checkpoint files are Hugging Face's, so any Llama-layout checkpoint can be
loaded, and models trained here open in `transformers`:

    model = GPT(GPTConfig(hidden_size=128, layers=4, heads=4))
    logits = model(tokens)                                # (B, T) -> (B, T, V)
    loss = cross_entropy(logits, targets)                 # nats per token
    nats = model(tokens, targets)                         # their sum, without all logits in memory
    model.save_pretrained("folder")
    model = GPT.from_pretrained("folder")

Shapes: B sequences, T positions, C hidden size, H query heads, K key-value heads, D head size,
M size inside the MLP, V vocabulary. Sources: the layout arXiv:2302.13971, RMSNorm arXiv:1910.07467,
rotary positions arXiv:2104.09864, SwiGLU arXiv:2002.05202, grouped-query attention
arXiv:2305.13245. With `experts` in the config each block has a mixture of experts
(utils/models/moe.py), in the layout of Mixtral.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from utils.models import hf_format
from utils.models.config import GPTConfig
from utils.models.moe import MoE
from utils.models.ops import linear_cross_entropy, rms_norm, rotate

# ---- 1. rotary positions


def rotary_frequencies(config: GPTConfig) -> torch.Tensor:
    """Radians per position for each pair of a head's values, fp32 (D/2,)."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents  # (D/2,)
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    if scaling["rope_type"] == "llama3":
        return _llama3_frequencies(frequencies, scaling)
    return frequencies


def _llama3_frequencies(frequencies, scaling):
    """Slow waves are slowed by `factor`, fast ones kept, those in between mixed (Llama 3.1)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slowed, 1: kept
    return kept * frequencies + (1 - kept) * frequencies / scaling["factor"]


def rotary_tables(
    config: GPTConfig, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every angle, (T, D) each: the D/2 pairs twice, for both halves of a head.

    Recomputed in every forward pass: that takes microseconds, and a model without buffers is easier
    to move, shard and save.
    """
    frequencies = rotary_frequencies(config).to(positions.device)
    angles = torch.outer(positions.float(), frequencies)  # (T, D/2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


# ---- 2. one block


class RMSNorm(nn.RMSNorm):
    """torch's layer with a gradient that is faster on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention: H query heads share K key-value heads."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.head_size = config.head_size
        queries = config.heads * config.head_size
        keys = config.key_value_heads * config.head_size
        of_qkv, of_output, _ = config.biases
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=of_qkv)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=of_qkv)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=of_qkv)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=of_output)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: Any = None
    ) -> torch.Tensor:
        """context: None, or what attention sees in addition to x; see `Decoder`."""
        q, k, v = self.project(x, cos, sin)
        y = causal_attention(q, k, v) if context is None else context.attend(q, k, v)
        return self.o_proj(y)  # (B, T, C)

    def project(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, T, H, D), keys and values (B, T, K, D), with q and k rotated by position."""
        B, T, _ = x.shape
        # the number of heads follows from the output's width: a rank may hold only some
        q = self.q_proj(x).view(B, T, -1, self.head_size)  # (B, T, H, D)
        k = self.k_proj(x).view(B, T, -1, self.head_size)  # (B, T, K, D)
        v = self.v_proj(x).view(B, T, -1, self.head_size)  # (B, T, K, D)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q (B, T, H, D), k and v (B, T, K, D) -> (B, T, H·D): positions attend to earlier ones."""
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=True,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # (B, H, T, D)
    return y.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.mlp_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.mlp_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.project(x)
        return self.down_proj(F.silu(gate) * up)  # (B, T, C)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate_proj(x), self.up_proj(x)  # (B, T, M) each


class Block(nn.Module):
    """One layer: attention, then the MLP, each on normalized input and added to the residual."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.self_attn = Attention(config)
        if config.experts is None:
            self.mlp = MLP(config)
        else:
            self.block_sparse_moe = MoE(config)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *context: Any
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, *context)
        return x + self.feed_forward(self.post_attention_layernorm(x))  # (B, T, C)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x) if hasattr(self, "mlp") else self.block_sparse_moe(x)


# ---- 3. the model


class Decoder(nn.Module):
    """Tokens -> hidden states: everything except the last matrix; the whole of it, or a part.

    embed_tokens  None: the input is hidden states, from the previous pipeline stage
    layers        an nn.ModuleList of some or all of the model's blocks
    norm          None: the hidden states go to another stage
    """

    def __init__(
        self,
        config: GPTConfig,
        embed_tokens: nn.Module | None,
        layers: nn.Module,
        norm: nn.Module | None,
    ):
        super().__init__()
        self.config = config
        self.embed_tokens, self.layers, self.norm = embed_tokens, layers, norm

    def forward(
        self, x: torch.Tensor, length: int | None = None, context: Any = None
    ) -> torch.Tensor:
        """Tokens (B, T), or hidden states (B, T, C) without an embedding -> (B, T, C).

        length  positions of the whole sequence, if x has only some of them (sequence parallelism);
                None: as many as x has
        context what attention sees in addition to x, such as a server's cache of earlier positions:
                its `tables(dtype)` are the rotary cosines and sines of the positions of x,
                (T, 1, D) or (B, T, 1, D), and each of its `layers` has `attend(q, k, v)` ->
                (B, T, H·D). None: only x
        """
        length = length or x.shape[1]
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)  # (B, T, C)
        if context is not None:
            tables = context.tables(x.dtype)
            for layer, seen in zip(self.layers, context.layers):
                x = layer(x, *tables, seen)
            return x if self.norm is None else self.norm(x)
        # a prompt in the embedding makes the sequence longer than the tokens
        length = max(length, x.shape[1])
        self.check_length(length)
        # (T, 1, D): one table for all heads, in the type of the projections' output
        cos, sin = rotary_tables(self.config, torch.arange(length, device=x.device), x.dtype)
        cos, sin = cos[:, None], sin[:, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.norm is None else self.norm(x)  # (B, T, C)

    def check_length(self, length: int) -> None:
        """Raise ValueError for a sequence longer than the model supports."""
        if length > self.config.max_positions:
            raise ValueError(
                f"sequence of {length} tokens is longer than max_positions "
                f"{self.config.max_positions}"
            )


class Head(nn.Linear):
    """The last matrix: hidden states (B, T, C) -> logits (B, T, V); with targets (B, T), the sum of
    their losses in nats instead."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if targets is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, targets)


class GPT(nn.Module):
    """The whole language model. Its initial weights come from torch's global generator."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(
            config,
            nn.Embedding(config.vocab_size, config.hidden_size),
            nn.ModuleList(Block(config) for _ in range(config.layers)),
            RMSNorm(config.hidden_size, eps=config.norm_eps),
        )
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False)
        self.tie()
        if not self.lm_head.weight.is_meta:
            self.initialize()

    @classmethod
    def without_memory(cls, config: GPTConfig) -> "GPT":
        """A model on the meta device: names, shapes and formats of its parameters, no values."""
        with torch.device("meta"), _NothingDrawn():
            return cls(config)

    def tie(self) -> None:
        """Use one matrix for the first and the last layer, if the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw normal weights with standard deviation 0.02, or less for matrices that add to the
        residual stream (GPT-2, 2.3)."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                adds = name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight"))
                scale = math.sqrt(2 * self.config.layers) if adds else 1.0
                parameter.normal_(0.0, 0.02 / scale)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, T, V) for int64 tokens (B, T), T at most config.max_positions; with targets
        (B, T), the sum of their losses in nats."""
        return self.lm_head(self.model(tokens), *([] if targets is None else [targets]))

    def parameter_count(self) -> int:
        """Parameters of this module, tied ones once; config.parameter_count() if it is whole."""
        return sum(parameter.numel() for parameter in self.parameters())

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """Tokens (B, T) with max_new_tokens more, drawn one at a time: (B, T + max_new_tokens).

        Temperature 0 takes the likeliest token. Equal seeds give equal tokens. Every step runs the
        whole sequence again, up to its last max_positions; a server caches keys and values.
        """
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ValueError(
                f"temperature {temperature} must be at least 0 and top_k {top_k} at least 1"
            )
        generator = torch.Generator().manual_seed(seed)
        for _ in range(max_new_tokens):
            logits = self(tokens[:, -self.config.max_positions :])[:, -1].float().cpu()  # (B, V)
            if temperature == 0:
                drawn = logits.argmax(dim=-1, keepdim=True)
            else:
                if top_k is not None and top_k < logits.shape[-1]:
                    least = logits.topk(top_k).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                probabilities = F.softmax(logits / temperature, dim=-1)
                drawn = torch.multinomial(probabilities, 1, generator=generator)  # (B, 1)
            tokens = torch.cat((tokens, drawn.to(tokens.device)), dim=1)
        return tokens

    # ---- Hugging Face checkpoint folders

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> "GPT":
        """A model from a Hugging Face folder; dtype None keeps the stored one.

        Raises CheckpointError (a ValueError) naming what is missing, damaged or not supported.
        """
        while True:
            one = hf_format.one_checkpoint(folder)
            try:
                return cls._read(one, dtype, device)
            except (hf_format.CheckpointError, FileNotFoundError):
                if one.exists() or one == hf_format.one_checkpoint(folder):
                    raise  # else a run that writes there has moved on and removed it

    @classmethod
    def _read(cls, folder, dtype, device):
        hf = hf_format.read_config(folder)
        try:
            config = GPTConfig.from_hf(hf)
        except ValueError as error:
            raise hf_format.CheckpointError(f"{folder}: {error}") from None
        model = cls.without_memory(config)
        stored = hf_format.read_headers(folder)
        headers = {n: header for n, header in stored.items() if not _is_redundant(n, config)}
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        hf_format.check_shapes(headers, shapes, where=folder)
        state = {
            name: tensor.to(device=device, dtype=dtype)
            for name, tensor in hf_format.read_tensors(headers)
        }
        if config.tie_embeddings and "lm_head.weight" in stored:
            (_, head), *_ = hf_format.read_tensors(stored, ["lm_head.weight"])
            embedding = state["model.embed_tokens.weight"]
            if not torch.equal(head.to(embedding), embedding):
                raise hf_format.CheckpointError(
                    f"{folder} has an lm_head.weight that differs from the embedding, although "
                    "config.json says tie_word_embeddings: set that to false"
                )
        model.load_state_dict(state, strict=False, assign=True)
        model.tie()
        return model

    def save_pretrained(self, folder: str | Path, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write a Hugging Face folder, which appears whole or not at all."""
        with hf_format.replacing(folder) as beside:
            self.write_pretrained(beside, max_shard_bytes)

    def write_pretrained(
        self,
        folder: str | Path,
        max_shard_bytes: int = 5 * 10**9,
        tensors: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the same files into an existing folder. `tensors`, by name, come from elsewhere if
        this rank holds only a part of the model."""
        if tensors is None:
            tensors = dict(self.named_parameters())  # a tied lm_head is not stored twice
        self.write_config(folder)
        hf_format.write_weights(folder, tensors, max_shard_bytes)

    def write_config(self, folder: str | Path) -> None:
        """Write config.json into an existing folder."""
        dtype = str(self.lm_head.weight.dtype).removeprefix("torch.")
        hf_format.write_json(
            f"{folder}/{hf_format.CONFIG}", {**self.config.to_hf(), "dtype": dtype}
        )


class _NothingDrawn(TorchFunctionMode):
    """Inside, torch's layers draw no numbers when they are created. On the meta device there is
    nothing to draw, but torch would spend more than a second importing its compiler to find out."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


def _is_redundant(name, config):
    """Whether a tensor is one that some checkpoints hold although it follows from the rest."""
    return (name == "lm_head.weight" and config.tie_embeddings) or name.endswith("inv_freq")


def keep_from_compiling(model: nn.Module) -> None:
    """Exclude some modules from `torch.compile(model)`; call it first.

    Sizes in an MoE layer depend on the tokens, so it would be recompiled repeatedly; and torch
    2.13's compiler loses the gradient of the balance losses (see `_WithLoss`). The head's loss is a
    loop of large products with a handwritten gradient, which DDP's part of the compiler refuses.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, MoE) or name.endswith("lm_head"):
            layer.forward = torch.compiler.disable(layer.forward)


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """The loss in nats: logits (B, T, V), targets (B, T); "mean", "sum" or "none" over tokens.

    Computed in fp32 or higher, whatever the type of the logits.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
