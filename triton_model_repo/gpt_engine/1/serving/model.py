"""One rank's piece of the model, with its KV cache: utils/models/gpt.py as a server computes it.

    decoder = Decoder(model, weights, rank, tp, slots=16, positions=512)
    logits = decoder.prefill(slot, start=0, tokens=[5, 7])       # (1, V) on rank 0, else None
    logits = decoder.decode([0, 3], [17, 4])                     # (2, V): one token for each slot

Shapes: B rows of the batch, T positions of this pass, L positions that attention looks at, P of the
cache, C hidden size, V vocabulary, D head size; of this rank H query heads, K key-value heads, M
columns of the MLP. All ranks make the same calls in the same order.

What ranks say to each other (Shoeybi et al., arXiv:1909.08053): a pass over B·T positions makes
2 · layers + 1 all-reduces of B·T·C numbers (the embedding, where virtual tokens do not count, then
attention and MLP of each layer), and, where logits are wanted, one gather of B · ceil(V / tp)
numbers from each rank to rank 0.
"""

import math

import torch
import torch.distributed as dist
from torch.nn import functional as F

from .version import shares

# ---- 1. rotary positions


def rotary_frequencies(model):
    """Radians per position for each pair of values of a head, fp32 (D/2,)."""
    rope = model.rope
    exponents = torch.arange(0, model.head_size, 2, dtype=torch.float32) / model.head_size
    frequencies = 1.0 / rope["rope_theta"] ** exponents
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":  # slow waves are slowed, fast ones kept, those between mixed
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * frequencies + (1 - kept) * frequencies / rope["factor"]
    return frequencies


def rotary_tables(model, positions):
    """cos and sin of every angle, (P, 1, D) each, the first half of sin negated."""
    angles = torch.outer(torch.arange(positions).float(), rotary_frequencies(model))  # (P, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(x, cos, sin):
    """Turns each pair (x[i], x[i + D/2]) of a head by its position's angle: (B, T, heads, D)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((x[..., half:], x[..., :half]), dim=-1) * sin


# ---- 2. one block


class Norm:
    """RMSNorm."""

    def __init__(self, weight, eps):
        self.weight, self.eps = weight, eps

    def __call__(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention:
    """Causal grouped-query attention of this rank's heads over what the cache holds."""

    def __init__(self, model, part, tp, slots, positions):
        self.head_size = model.head_size
        self.heads, self.kv_heads = model.heads // tp, model.kv_heads // tp
        # q, k and v read the same x: one matrix for the three is read and started once
        self.qkv, self.qkv_bias = part.joined("self_attn", "q_proj", "k_proj", "v_proj")
        self.o, self.o_bias = part.joined("self_attn", "o_proj")
        # Zeros, not whatever memory held: a masked weight of 0 times NaN would be NaN.
        self.cache = self.o.new_zeros(slots, 2, self.kv_heads, positions, self.head_size)

    def __call__(self, x, now):
        B, T, _ = x.shape
        H, K = self.heads, self.kv_heads
        qkv = F.linear(x, self.qkv, self.qkv_bias).view(B, T, H + 2 * K, self.head_size)
        qk, v = qkv.split((H + K, K), dim=2)
        q, k = rotate(qk, now.cos, now.sin).split((H, K), dim=2)
        self.cache[now.rows, :, :, now.positions] = torch.stack((k, v), dim=2)  # (B, T, 2, K, D)
        k, v = self.cache[now.first : now.first + B, :, :, : now.longest].unbind(1)  # (B, K, L, D)
        if T == 1:  # queries that share a key-value head stand where positions would
            q = q.view(B, K, H // K, self.head_size)
        else:
            q = q.transpose(1, 2)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=now.mask, is_causal=now.causal, enable_gqa=q.shape[1] != K
        )
        y = y.view(B, 1, -1) if T == 1 else y.transpose(1, 2).reshape(B, T, -1)
        return F.linear(y, self.o, self.o_bias)  # (B, T, C), to be summed over the ranks


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x)), of this rank's columns."""

    def __init__(self, part):
        self.gate_up, self.bias = part.joined("mlp", "gate_proj", "up_proj")
        self.down, self.down_bias = part.joined("mlp", "down_proj")

    def __call__(self, x):
        gate, up = F.linear(x, self.gate_up, self.bias).chunk(2, dim=-1)  # (B, T, M) each
        return F.linear(F.silu(gate).mul_(up), self.down, self.down_bias)  # to be summed


class Part:
    """Weights of this rank whose names begin with `prefix`, one layer's as a rule. They are taken
    out as they are used, so that none is in memory twice for long."""

    def __init__(self, weights, prefix, device, dtype):
        self.weights, self.prefix, self.place = weights, prefix, {"device": device, "dtype": dtype}

    def take(self, name):
        """A tensor where and in which type it is computed with; None where there is none."""
        tensor = self.weights.pop(self.prefix + name, None)
        return None if tensor is None else tensor.to(**self.place)

    def joined(self, module, *names):
        """(weight, bias or None) of several matrices that read the same input, one above the
        other. The bias of o and down is on rank 0 only: the sum over the ranks adds it once."""
        both = []
        for kind in ("weight", "bias"):
            found = [self.take(f"{module}.{name}.{kind}") for name in names]
            both.append(None if found[0] is None else torch.cat(found))
        return both

    def norm(self, name, eps):
        return Norm(self.take(f"{name}.weight"), eps)


class Block:
    """One layer: attention, then the MLP, each normalized first and added to what came in."""

    def __init__(self, model, part, tp, slots, positions):
        self.attention = Attention(model, part, tp, slots, positions)
        self.mlp = MLP(part)
        self.before_attention = part.norm("input_layernorm", model.norm_eps)
        self.before_mlp = part.norm("post_attention_layernorm", model.norm_eps)

    def __call__(self, x, now, summed):
        x = x + summed(self.attention(self.before_attention(x), now))
        return x + summed(self.mlp(self.before_mlp(x)))  # (B, T, C)


# ---- 3. the model


class Pass:
    """Where the positions of one pass stand, and what they may look at."""

    def __init__(self, decoder, first, positions, longest, mask, causal):
        self.first = first  # the rows of the cache are first, first + 1, ... first + B - 1
        rows = torch.arange(first, first + len(positions), device=positions.device)
        self.rows, self.positions = rows[:, None], positions  # (B, 1), (B, T)
        self.longest, self.mask, self.causal = longest, mask, causal
        self.cos, self.sin = decoder.cos[positions], decoder.sin[positions]  # (B, T, 1, D)


class Decoder:
    """This rank's piece of the model and of the KV cache.

    model      shards.Model;   weights {name: tensor} of this rank;   prompts {name: (P, C)}
    slots      requests at the same time;   positions: of each, at most
    device     "cpu" computes in fp32, "cuda:R" in the stored type
    """

    def __init__(self, model, weights, rank, tp, slots, positions, prompts=None, device="cpu"):
        self.rank, self.tp, self.device = rank, tp, torch.device(device)
        weights = dict(weights)  # they are taken out of it
        dtype = weights["model.norm.weight"].dtype if self.device.type != "cpu" else torch.float32
        top = Part(weights, "", self.device, dtype)
        words = shares(model.vocab_size, tp)
        self.words, self.first_word = words, sum(words[:rank])
        # a gather wants equal parts: where tp does not divide V, the last ranks add a row of zeros
        self.embedding = _padded(top.take("model.embed_tokens.weight"), words[0])  # (V/tp, C)
        self.lm_head = self.embedding
        if not model.tied:
            self.lm_head = _padded(top.take("lm_head.weight"), words[0])
        parts = (
            Part(weights, f"model.layers.{number}.", self.device, dtype)
            for number in range(model.layers)
        )
        self.blocks = [Block(model, part, tp, slots, positions) for part in parts]
        self.norm = top.norm("model.norm", model.norm_eps)
        cos, sin = rotary_tables(model, positions)
        self.cos, self.sin = cos.to(self.device, dtype), sin.to(self.device, dtype)
        self.prompts = {name: p.to(self.device, dtype) for name, p in (prompts or {}).items()}
        self.columns = torch.arange(positions, device=self.device)
        self.lengths = [0] * slots  # positions that each slot has in the cache

    @torch.inference_mode()
    def prefill(self, slot, start, tokens, prompt=None, logits=True):
        """Reads the next tokens of one request into its slot, from position `start` on.

        prompt    name of virtual tokens that come before the tokens
        logits    whether to return those of the last position, (1, V) on rank 0; else None
        """
        x = self._embed(torch.tensor(tokens, dtype=torch.long, device=self.device)[None])
        if prompt is not None:
            x = torch.cat((self.prompts[prompt][None], x), dim=1)
        stop = start + x.shape[1]
        positions = self.columns[None, start:stop]  # (1, T)
        # at the start "causal" is all that is to be said, and a mask would only be slower
        mask = None if start == 0 else self.columns[:stop] <= positions[..., None]  # (1, T, L)
        x = self._layers(x, Pass(self, slot, positions, stop, mask, causal=start == 0))
        self.lengths[slot] = stop
        return self._logits(x[:, -1]) if logits else None

    @torch.inference_mode()
    def decode(self, slots, tokens):
        """One token more for each of the slots: logits (B, V) on rank 0, in their order.

        The batch is rows 0 to the highest slot: a view of the cache, where a choice of rows would
        be a copy. A row between that is not asked for computes something that nobody reads, and
        writes it where its own next position will be written.
        """
        B = max(slots) + 1
        row_tokens = [0] * B
        for slot, token in zip(slots, tokens):
            row_tokens[slot] = token
        last = len(self.columns) - 1
        row_positions = [min(length, last) for length in self.lengths[:B]]
        longest = max(row_positions[slot] for slot in slots) + 1
        tokens = torch.tensor(row_tokens, device=self.device)[:, None]  # (B, 1)
        positions = torch.tensor(row_positions, device=self.device)[:, None]  # (B, 1)
        mask = None  # a row alone looks at all there is
        if B > 1:
            mask = self.columns[:longest] <= positions[:, None, None]  # (B, 1, 1, L)
        x = self._layers(self._embed(tokens), Pass(self, 0, positions, longest, mask, causal=False))
        for slot in slots:
            self.lengths[slot] += 1
        x = x[:, -1]  # (B, C)
        return self._logits(x if len(slots) == B else x[slots])

    def _layers(self, x, now):
        for block in self.blocks:
            x = block(x, now, self._summed)
        return x

    def _embed(self, tokens):
        """Tokens (B, T) -> (B, T, C): each rank knows some words, the sum knows all."""
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
        logits = F.linear(self.norm(x), self.lm_head)  # (B, V/tp)
        if self.tp == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in self.words] if self.rank == 0 else None
        dist.gather(logits, parts, dst=0)
        if self.rank != 0:
            return None
        return torch.cat([part[:, :size] for part, size in zip(parts, self.words)], dim=1)


def _padded(weight, rows):
    return F.pad(weight, (0, 0, 0, rows - len(weight)))
