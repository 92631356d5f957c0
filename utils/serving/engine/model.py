"""One rank's shard of the model with its KV cache: the decoder of utils/models/gpt.py for serving.

    decoder = ServedDecoder(config, weights, rank, tp, max_num_seqs=16, max_model_len=512)
    logits = decoder.prefill(slot, start=0, tokens=[5, 7])       # (1, V) on rank 0, else None
    logits = decoder.decode([0, 3], [17, 4])                     # (2, V): one token for each slot

Shapes: B rows of the batch, T positions of this pass, L positions that attention sees, at most P, W
blocks of BLOCK positions for these, C hidden size, V vocabulary, D head size; of this rank H query
heads, K key-value heads, M columns of the MLP. All ranks make the same calls in the same order.

Communication (Shoeybi et al., arXiv:1909.08053): a pass over B·T positions makes 2 · layers + 1
all-reduces of B·T·C elements (the embedding, without virtual tokens, then attention and MLP of each
layer) and, if logits are wanted, one gather of B · ceil(V / tp) elements from each rank to rank 0.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from utils.compression.quantize import quantize_rows
from utils.compression.scheme import INT4
from utils.models import gpt
from utils.models.config import GPTConfig
from utils.serving.engine.blocks import BLOCK, blocks_for
from utils.serving.engine.fused import FusedStep
from utils.serving.engine.linear import Int4Linear, Int8Linear, Linear
from utils.serving.engine.native import Library, NativeLinear, Step
from utils.serving.engine.stored import PACKED, SCALE, inputs
from utils.shares import shares

# ---- 1. a block for serving
#
# A layer computes `forward` of the model's own classes. Here they are plain objects instead of
# nn.Modules: they are not trained, hooked or moved, and a module's call and attribute lookups would
# take a tenth of a small model's decode step.


class Norm:
    """RMSNorm: x·w / sqrt(mean(x²) + eps)."""

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight, self.eps = weight, eps
        # = x·w·sqrt(C) / hypot(|x|, sqrt(C·eps)): takes half as long as torch's chain of operators
        size = torch.tensor(float(len(weight)), device=weight.device)
        self.scaled, self.least = weight * size.sqrt().to(weight), (size * eps).sqrt()
        self.by_hand = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.by_hand:  # a single kernel elsewhere; below fp32 it keeps the precision
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # (B, T, 1)
        return (x * self.scaled).div_(norm.hypot_(self.least))


class Attention:
    """This rank's heads. q, k and v read the same x, so one matrix combines the three: one launch.

    Positions rotate pairs of elements of q and k, i and i + D/2 of a head. Here each pair is
    adjacent, because the rows of the matrices were reordered: it forms a complex number, and a
    rotation is one multiplication. The products q·k do not depend on the order, if q and k share
    it.
    """

    __call__ = gpt.Attention.forward

    def __init__(self, config: GPTConfig, part: "Part"):
        self.head_size = config.head_size
        self.heads, self.kv_heads = config.heads // part.tp, config.key_value_heads // part.tp
        part.pair("self_attn.q_proj", self.head_size)
        part.pair("self_attn.k_proj", self.head_size)
        self.qkv_proj = part.linear("self_attn", "q_proj", "k_proj", "v_proj")
        self.o_proj = part.linear("self_attn", "o_proj", summed=True)

    def project(
        self, x: torch.Tensor, turns: torch.Tensor, _: None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of x, q and k rotated. turns (B, T, 1, D/2): cos + i·sin of each angle."""
        B, T, _ = x.shape
        H, K = self.heads, self.kv_heads
        qkv = self.qkv_proj(x).float().view(B, T, H + 2 * K, self.head_size)
        qkv[:, :, : H + K].view(torch.complex64).mul_(turns)
        return qkv.to(x.dtype).split((H, K, K), dim=2)


class MLP:
    """This rank's columns, with gate and up in one matrix."""

    __call__ = gpt.MLP.forward

    def __init__(self, part: "Part"):
        self.gate_up_proj = part.linear("mlp", "gate_proj", "up_proj")
        self.down_proj = part.linear("mlp", "down_proj", summed=True)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gate_up_proj(x).chunk(2, dim=-1)  # (B, T, M) each


class Block:
    """One layer, with this rank's weights."""

    __call__ = gpt.Block.forward

    def __init__(self, config: GPTConfig, part: "Part"):
        self.self_attn, self.feed_forward = Attention(config, part), MLP(part)
        self.input_layernorm = part.norm("input_layernorm", config.norm_eps)
        self.post_attention_layernorm = part.norm("post_attention_layernorm", config.norm_eps)


class Layers:
    """All layers, from hidden states to hidden states; embedding and head are sharded by tokens."""

    __call__ = gpt.Decoder.forward
    embed_tokens = norm = None

    def __init__(self, blocks: list[Block]):
        self.layers = blocks


class Part:
    """This rank's weights whose names begin with `prefix`, usually those of one layer. They are
    removed as they are used, so that none is in memory twice for long."""

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        prefix: str,
        tp: int,
        device: torch.device,
        dtype: torch.dtype,
        columns: dict[str, tuple[int, int]],
        library: Library | None,
        kernels: ModuleType | None,
    ):
        self.weights, self.prefix, self.tp, self.columns = weights, prefix, tp, columns
        self.library, self.kernels = library, kernels
        self.place = {"device": device, "dtype": dtype}

    def take(self, name: str) -> torch.Tensor | None:
        """A tensor on its device and in its compute dtype; None if there is none."""
        tensor = self.weights.pop(self.prefix + name, None)
        return None if tensor is None else tensor.to(**self.place)

    def pair(self, module: str, size: int) -> None:
        """Put rows i and i + size/2 of each head of a matrix (or of its bias) side by side."""
        for name, rows in self.weights.items():
            if name.startswith(f"{self.prefix}{module}."):
                pairs = rows.unflatten(0, (-1, 2, size // 2)).transpose(1, 2)
                self.weights[name] = pairs.flatten(0, 2)

    def linear(
        self, module: str, *names: str, summed: bool = False
    ) -> Linear | Int8Linear | Int4Linear | NativeLinear:
        """Several matrices with the same input, concatenated by rows. The bias of o and down is on
        rank 0 only, so the sum over the ranks adds it once."""
        biases = [self.take(f"{module}.{name}.bias") for name in names]
        bias = None if biases[0] is None else torch.cat(biases)
        names, summed = [f"{module}.{name}.weight" for name in names], summed and self.tp > 1
        if self.prefix + names[0] + SCALE in self.weights:
            return self._quantized(names, bias, summed)
        weight = torch.cat([self.take(name) for name in names])
        if self.library is not None:
            return self.library.floats(weight, bias, summed)
        return Linear(weight, bias, summed)

    def _quantized(self, names, bias, summed):
        """One linear layer of several integer matrices, whose scales belong to their rows."""

        def whole(ending):
            parts = [self.weights.pop(self.prefix + name + ending) for name in names]
            return torch.cat(parts).to(self.place["device"])

        scale, library = whole(SCALE), self.library
        if self.prefix + names[0] in self.weights:
            numbers = whole(""), scale, bias, summed
            return library.int8(*numbers) if library else Int8Linear(*numbers, self.kernels)
        first, stop = self.columns[self.prefix + names[0]]
        numbers = whole(PACKED), scale, bias, summed, first % INT4.group_size
        if library:
            return library.int4(*numbers, stop - first)
        return Int4Linear(*numbers, self.kernels)

    def norm(self, name: str, eps: float) -> Norm:
        return Norm(self.take(f"{name}.weight"), eps)


# ---- 2. the cache


class KVCache:
    """Keys and values of all layers in blocks, with each slot's block table; for one pass, also its
    positions and its mask.

    Here attention reads a contiguous copy of a slot's blocks; the compiled step and the GPU kernels
    read the blocks in place.

    config      GPTConfig;   kv_heads   of this rank
    slots       number of slots, of at most P positions;   num_blocks   None: enough for all
    pairs       whether a rotation is one complex number, in `cos`, as `Attention` here needs it;
                else `cos` and `sin` are those of the model
    """

    def __init__(
        self,
        config: GPTConfig,
        kv_heads: int,
        slots: int,
        positions: int,
        device: torch.device | str,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        num_blocks: int | None = None,
        pairs: bool = False,
    ):
        width, head_size = blocks_for(positions), config.head_size
        # Until `assign` is called, a slot has consecutive blocks of its own.
        count = slots * width if num_blocks is None else num_blocks
        own = torch.arange(slots * width, dtype=torch.int32, device=device) % count
        self.blocks = own.view(slots, width)  # (slots, W)
        # Zeros, not uninitialized memory: a masked weight of 0 times NaN would be NaN.
        numbers = (2, count, kv_heads, BLOCK, head_size)
        kind = Int8LayerCache if kv_cache_dtype == torch.int8 else LayerCache
        self.layers = [
            kind(self, torch.zeros(numbers, device=device, dtype=kv_cache_dtype))
            for _ in range(config.layers)
        ]
        all_positions, half = torch.arange(positions), head_size // 2
        if pairs:
            cos, sin = gpt.rotary_tables(config, all_positions, torch.float32)
            tables = [torch.complex(cos[:, :half], sin[:, half:])]  # (P, D/2)
            self.turns = tables[0]
        else:
            tables = gpt.rotary_tables(config, all_positions, dtype)  # (P, D) each
        self._tables = [table[:, None].to(device) for table in tables]
        self._heads = torch.arange(kv_heads, device=device)

    def assign(self, slot: int, blocks: Sequence[int], first: int = 0) -> None:
        """Give a slot these blocks, from position 16 · first on."""
        table = self.blocks[slot, first : first + len(blocks)]
        table.copy_(torch.tensor(blocks, dtype=torch.int32))

    def clear(self, blocks: Sequence[int]) -> None:
        """Set the contents of these blocks to zero."""
        for layer in self.layers:
            layer.clear(blocks)

    def begin(
        self,
        slots: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
        mask: torch.Tensor | None,
        causal: bool,
    ) -> "KVCache":
        """Prepare a pass over some slots (B,).

        positions (B, T) of the input;   longest: number of positions that attention sees, L
        """
        self.longest, self.mask, self.causal = longest, mask, causal
        self.looked_at = self.blocks[slots, : blocks_for(longest)].long()  # (B, W)
        blocks = self.looked_at.gather(1, positions // BLOCK)[..., None]  # (B, T, 1)
        self.places = blocks, self._heads, (positions % BLOCK)[..., None]  # (B, T, K)
        self.cos, self.sin, *_ = *(table[positions] for table in self._tables), None  # (B, T, 1, D)
        return self

    def tables(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Cosines and sines for the positions of this pass, (B, T, 1, D)."""
        return self.cos, self.sin


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self, cache: KVCache, numbers: torch.Tensor):
        self.cache, self.numbers = cache, numbers  # (2, blocks, K, BLOCK, D)
        self.keys, self.values = numbers

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k and v (B, T, K, D); the attention of q (B, T, H, D) to all: (B, T, H·D)."""
        B, T, H, D = q.shape
        K, now = k.shape[2], self.cache
        self.keep(k, v)
        k, v = self.kept(q.dtype)  # (B, K, L, D) each
        if T == 1:  # queries that share a key-value head take the place of positions
            q = q.view(B, K, H // K, D)
        else:
            q = q.transpose(1, 2)  # (B, H, T, D)
            if q.is_cuda and q.shape[1] != K:  # CUDA's kernels with a mask need H = K
                k, v = (one.repeat_interleave(H // K, dim=1) for one in (k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=now.mask, is_causal=now.causal, enable_gqa=q.shape[1] != k.shape[1]
        )
        return y.view(B, 1, -1) if T == 1 else y.transpose(1, 2).reshape(B, T, -1)

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        places = self.cache.places
        self.keys[places] = k.to(self.numbers.dtype)
        self.values[places] = v.to(self.numbers.dtype)

    def clear(self, blocks: Sequence[int]) -> None:
        self.numbers[:, blocks] = 0

    def kept(self, dtype: torch.dtype) -> torch.Tensor:
        """The keys and values that this pass sees, (2, B, K, L, D)."""
        return self._gathered(self.numbers).to(dtype)

    def _gathered(self, numbers):
        """(2, blocks, K, BLOCK, X) -> (2, B, K, L, X)"""
        now = self.cache
        rows = numbers[:, now.looked_at].transpose(2, 3)  # (2, B, K, W, BLOCK, X)
        return rows.flatten(3, 4)[..., : now.longest, :]


class Int8LayerCache(LayerCache):
    """Keys and values of one layer in int8, with a scale for the D elements of each position and
    head."""

    def __init__(self, cache: KVCache, numbers: torch.Tensor):
        super().__init__(cache, numbers)
        self.scales = torch.zeros(*numbers.shape[:-1], 1, device=numbers.device)

    def keep(self, k: torch.Tensor, v: torch.Tensor) -> None:
        (k, k_scales), (v, v_scales) = quantize_rows(k), quantize_rows(v)
        super().keep(k, v)
        key_scales, value_scales = self.scales
        key_scales[self.cache.places] = k_scales
        value_scales[self.cache.places] = v_scales

    def clear(self, blocks: Sequence[int]) -> None:
        super().clear(blocks)
        self.scales[:, blocks] = 0

    def kept(self, dtype: torch.dtype) -> torch.Tensor:
        return super().kept(torch.float32).mul_(self._gathered(self.scales)).to(dtype)


# ---- 3. the model


class ServedDecoder:
    """This rank's shard of the model and of the KV cache.

    config          GPTConfig;   weights {name: tensor} of this rank;   prompts {name: (P, C)}
    max_num_seqs    requests at the same time: slots
    max_model_len   most positions of each
    num_blocks      of the whole cache; None: enough for all slots. Otherwise `cache.assign` must
                    give each slot its blocks
    dtype, kv_cache_dtype   of the computation, and of the stored keys and values
    library         the compiled matrix products and decode step (native.py), for the CPU and fp32;
                    if keys and values are not fp32, only the products. None: PyTorch's
    kernels         the module utils.kernels.decode: integer products with few rows and, if keys and
                    values have `dtype`, the fused step (fused.py). None: PyTorch's
    """

    def __init__(
        self,
        config: GPTConfig,
        weights: dict[str, torch.Tensor],
        rank: int,
        tp: int,
        max_num_seqs: int,
        max_model_len: int,
        prompts: dict[str, torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: torch.dtype = torch.float32,
        library: Library | None = None,
        num_blocks: int | None = None,
        kernels: ModuleType | None = None,
    ):
        self.rank, self.tp, self.device = rank, tp, torch.device(device)
        weights = dict(weights)  # entries are removed as they are used
        where = tp, self.device, dtype, inputs(config, rank, tp), library, kernels
        top = Part(weights, "", *where)
        words = shares(config.vocab_size, tp)
        self.words, self.first_word = words, sum(words[:rank])
        # a gather needs equal sizes: if tp does not divide V, the last ranks add a row of zeros
        self.embedding = _padded(top.take("model.embed_tokens.weight"), words[0])  # (V/tp, C)
        head = self.embedding
        if not config.tie_embeddings:
            head = _padded(top.take("lm_head.weight"), words[0])
        self.lm_head = (Linear if library is None else library.floats)(head, None)
        parts = (
            Part(weights, f"model.layers.{number}.", *where) for number in range(config.layers)
        )
        self.layers = Layers([Block(config, part) for part in parts])
        self.norm = top.norm("model.norm", config.norm_eps)
        self.cache = KVCache(
            config, config.key_value_heads // tp, max_num_seqs, max_model_len, self.device, dtype,
            kv_cache_dtype, num_blocks, pairs=True,
        )
        self.step = None
        if library is not None and kv_cache_dtype == torch.float32:
            self.step = Step(library, config, self.layers.layers, self.cache, tp)
        self.fused = None
        self.prompts = {name: p.to(self.device, dtype) for name, p in (prompts or {}).items()}
        self.all_positions = torch.arange(max_model_len, device=self.device)
        self.lengths = [0] * max_num_seqs  # positions that each slot has in the cache
        if kernels is not None and kv_cache_dtype == dtype:
            self.fused = FusedStep(self, kernels)

    @torch.inference_mode()
    def prefill(
        self,
        slot: int,
        start: int,
        tokens: Sequence[int],
        prompt: tuple[str, int, int] | None = None,
        logits: bool = True,
    ) -> torch.Tensor | None:
        """Read the next tokens of one request into its slot, from position `start` on.

        prompt    virtual tokens before the tokens: their name, first index, last index + 1
        logits    whether to return those of the last position, (1, V) on rank 0; else None
        """
        x = self.embed(torch.tensor(tokens, dtype=torch.long, device=self.device)[None])
        if prompt is not None:
            name, first, last = prompt
            x = torch.cat((self.prompts[name][None, first:last], x), dim=1)
        stop = start + x.shape[1]
        positions = self.all_positions[None, start:stop]  # (1, T)
        # at the start "causal" suffices, and a mask would only be slower
        mask = None
        if start:  # four dimensions: with three, attention on the CPU is four times as slow
            mask = self.all_positions[:stop] <= positions[:, None, :, None]  # (1, 1, T, L)
            if x.is_cuda:  # the same mask by name, so that a kernel without one in memory is used
                mask = causal_lower_right(x.shape[1], stop) if x.shape[1] > 1 else None
        x = self._through(x, [slot], positions, stop, mask, causal=start == 0)
        self.lengths[slot] = stop
        return self._logits(x[:, -1]) if logits else None

    @torch.inference_mode()
    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> torch.Tensor | None:
        """Read one more token for each slot: logits (B, V) on rank 0, in the order of `slots`."""
        where = [self.lengths[slot] for slot in slots]
        for slot in slots:
            self.lengths[slot] += 1
        if self.step is not None:
            return self._logits(self.step(self.embed(torch.tensor(tokens)), slots, where))
        tokens = torch.tensor(tokens, device=self.device)[:, None]  # (B, 1)
        positions = torch.tensor(where, device=self.device)[:, None]  # (B, 1)
        longest, mask = max(where) + 1, None  # a single row sees all positions
        if len(slots) > 1:
            seen = self.all_positions[:longest] <= positions[:, None, None]  # (B, 1, 1, L)
            # as floats: from booleans, attention on the CPU would convert them in each layer
            mask = torch.where(seen, 0.0, -torch.inf).to(self.embedding.dtype)
        x = self._through(self.embed(tokens), slots, positions, longest, mask, causal=False)
        return self._logits(x[:, -1])

    def _through(self, x, slots, *where, causal):
        slots = torch.tensor(slots, device=self.device)
        return self.layers(x, context=self.cache.begin(slots, *where, causal))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens of any shape -> (..., C): each rank embeds its own tokens; the sum has all."""
        if self.tp == 1:
            return F.embedding(tokens, self.embedding)
        own = tokens - self.first_word
        foreign = (own < 0) | (own >= self.words[self.rank])
        x = F.embedding(own.masked_fill(foreign, 0), self.embedding)
        return self._summed(x.masked_fill_(foreign[..., None], 0.0))

    def _summed(self, x):
        """The sum of all ranks' x, in place."""
        if self.tp > 1:
            dist.all_reduce(x)
        return x

    def _logits(self, x):
        """Hidden states (B, C) -> logits (B, V) on rank 0; None on the others."""
        return self.gathered(self.lm_head(self.norm(x)))

    def gathered(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Logits (B, V/tp) of each rank -> (B, V) on rank 0; None on the others."""
        if self.tp == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in self.words] if self.rank == 0 else None
        dist.gather(logits, parts, dst=0)
        if self.rank != 0:
            return None
        return torch.cat([part[:, :size] for part, size in zip(parts, self.words)], dim=1)


def _padded(weight, rows):
    return F.pad(weight, (0, 0, 0, rows - len(weight)))
