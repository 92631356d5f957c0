"""How each matrix is split for tensor parallelism: a table for the decoder and other models.

    TP_PLAN["o_proj"]                      ("row", "query heads"): the decoder's
    TP_PLANS["bert"]                       the same for a Hugging Face architecture
    cuts = tp_cuts(config, ranks=2)        {name of a parameter: Cut}
    cuts[name].shape(0, whole_shape)       the shape of rank 0's slice

A *column* matrix is split by its outputs, the following *row* matrix by its inputs, which are those
outputs, so that the two need only one sum over the ranks (Shoeybi et al., arXiv:1909.08053,
section 3). In some architectures q, k and v are one matrix (a *packed column*), or every head has
a column in a *table*. Everything not in a plan, norms and the router of experts, is whole on every
rank.

Training (utils/parallel/tensor.py), the export (utils/serving/shard.py) and the server's engine
use it. It does not import torch, because the engine's leader runs without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from utils.models.config import GPTConfig
from utils.shares import shares

QUERY_HEADS, KV_HEADS = "query heads", "key-value heads"
MLP_COLUMNS, WORDS = "columns of the MLP", "words of the vocabulary"

TP_PLAN = {  # module: how it is split, and by what
    "embed_tokens": ("column", WORDS),
    "q_proj": ("column", QUERY_HEADS),
    "k_proj": ("column", KV_HEADS),
    "v_proj": ("column", KV_HEADS),
    "o_proj": ("row", QUERY_HEADS),
    "gate_proj": ("column", MLP_COLUMNS),
    "up_proj": ("column", MLP_COLUMNS),
    "down_proj": ("row", MLP_COLUMNS),
    "w1": ("column", MLP_COLUMNS),  # an expert's gate, up and down, under Mixtral's names
    "w3": ("column", MLP_COLUMNS),
    "w2": ("row", MLP_COLUMNS),
    "lm_head": ("column", WORDS),
}

TP_PLANS = {  # `model_type` in a model's config.json: {ending of a module's name: the same}
    "llama": TP_PLAN,
    "bert": {
        "word_embeddings": ("column", WORDS),
        "self.query": ("column", QUERY_HEADS),
        "self.key": ("column", KV_HEADS),
        "self.value": ("column", KV_HEADS),
        "attention.output.dense": ("row", QUERY_HEADS),
        "intermediate.dense": ("column", MLP_COLUMNS),
        "output.dense": ("row", MLP_COLUMNS),
        "predictions.decoder": ("column", WORDS),
    },
    "gpt2": {
        "wte": ("column", WORDS),
        "attn.c_attn": ("packed column", QUERY_HEADS),
        "attn.c_proj": ("row", QUERY_HEADS),
        "mlp.c_fc": ("column", MLP_COLUMNS),
        "mlp.c_proj": ("row", MLP_COLUMNS),
        "lm_head": ("column", WORDS),
    },
    "t5": {
        "shared": ("column", WORDS),
        "embed_tokens": ("column", WORDS),
        "q": ("column", QUERY_HEADS),
        "k": ("column", KV_HEADS),
        "v": ("column", KV_HEADS),
        "relative_attention_bias": ("table", QUERY_HEADS),
        "o": ("row", QUERY_HEADS),
        "wi": ("column", MLP_COLUMNS),
        "wo": ("row", MLP_COLUMNS),
        "lm_head": ("column", WORDS),
    },
    "vit": {
        "q_proj": ("column", QUERY_HEADS),
        "k_proj": ("column", KV_HEADS),
        "v_proj": ("column", KV_HEADS),
        "o_proj": ("row", QUERY_HEADS),
        "fc1": ("column", MLP_COLUMNS),
        "fc2": ("row", MLP_COLUMNS),
    },
}


def planned(plan: dict[str, tuple[str, str]], name: str) -> tuple[str, str] | None:
    """A plan's entry for the module `name`: the longest one that the name ends with."""
    words = name.split(".")
    endings = (".".join(words[first:]) for first in range(len(words)))
    return next((plan[ending] for ending in endings if ending in plan), None)


def head_shares(
    heads: int, kv_heads: int, ranks: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """(query heads, key-value heads) of each rank: some key-value heads and all queries that use
    them. The second is None if there are fewer key-value heads than ranks: they are then not split,
    and several ranks compute the same ones."""
    if kv_heads < ranks:
        return shares(heads, ranks), None
    kv_shares = shares(kv_heads, ranks)
    return tuple(share * (heads // kv_heads) for share in kv_shares), kv_shares


def key_value_heads(queries: Sequence[int], group: int) -> list[int]:
    """The key-value heads to which these query heads attend, `group` of which share one: one per
    group if the groups are of equal size, else one per query head."""
    per_query = [query // group for query in queries]
    distinct = sorted(set(per_query))
    equal = len({per_query.count(head) for head in distinct}) == 1
    return distinct if equal else per_query


@dataclass(frozen=True)
class Cut:
    """How one parameter is divided: along `dim`, into `sizes` by rank.

    dim None: it is not divided; ranks with size 1 have all of it, ranks with size 0 nothing.
    """

    dim: int | None
    sizes: tuple[int, ...]

    def shape(self, rank: int, whole: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a rank's slice; None if it has none."""
        if self.dim is None:
            return tuple(whole) if self.sizes[rank] else None
        return (*whole[: self.dim], self.sizes[rank], *whole[self.dim + 1 :])

    def part(self, rank: int, whole: Any) -> Any:
        """A rank's slice of the whole tensor, or of a safetensors slice of it; None if it has
        none."""
        if self.dim is None:
            return whole[:] if self.sizes[rank] else None
        start = sum(self.sizes[:rank])
        stop = start + self.sizes[rank]
        return whole[start:stop] if self.dim == 0 else whole[:, start:stop]


def tp_cuts(config: GPTConfig, ranks: int) -> dict[str, Cut]:
    """{name: Cut} of every parameter, for ranks whose partial results are summed.

    The bias of a row matrix is only on rank 0, so that the sum contains it once. Raises ValueError
    if this number of ranks cannot split the model.
    """
    check_ranks(config, ranks)
    queries, kv_heads = head_shares(config.heads, config.key_value_heads, ranks)
    lengths = {
        QUERY_HEADS: tuple(count * config.head_size for count in queries),
        KV_HEADS: tuple(count * config.head_size for count in kv_heads),
        MLP_COLUMNS: shares(config.mlp_size, ranks),
        WORDS: shares(config.vocab_size, ranks),
    }
    cuts = {}
    for name in config.parameter_shapes():
        module, kind = name.split(".")[-2:]
        how, what = TP_PLAN.get(module, (None, None))
        if how == "column":
            cuts[name] = Cut(0, lengths[what])
        elif how == "row" and kind == "weight":
            cuts[name] = Cut(1, lengths[what])
        elif how == "row":
            cuts[name] = Cut(None, (1,) + (0,) * (ranks - 1))
        else:
            cuts[name] = Cut(None, (1,) * ranks)
    return cuts


def rank_shapes(config: GPTConfig, rank: int, ranks: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the parameters that one rank holds."""
    cuts = tp_cuts(config, ranks)
    parts = {
        name: cuts[name].shape(rank, whole) for name, whole in config.parameter_shapes().items()
    }
    return {name: shape for name, shape in parts.items() if shape is not None}


def check_ranks(config: GPTConfig, ranks: int) -> None:
    """Raise ValueError unless this number of ranks can split the model, with equal numbers of whole
    heads of both kinds."""
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"tp {ranks!r} is not a number of ranks: give 1 or more")
    heads, kv_heads = config.heads, config.key_value_heads
    if heads % ranks or kv_heads % ranks:
        *first, last = [str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise ValueError(
            f"tp {ranks} does not divide the model's {heads} heads and {kv_heads} key-value heads: "
            f"give {', '.join(first) + ' or ' if first else ''}{last}"
        )
    for size, what in ((config.mlp_size, "columns of the MLP"), (config.vocab_size, "words")):
        if size < ranks:
            raise ValueError(f"tp {ranks} is more than the model's {size} {what}: give fewer ranks")
