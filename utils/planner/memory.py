"""Bytes that one rank holds, by kind: all of them, by formula.

    bytes_per_rank(7_500_000_000, ranks=64, stage=2)          # {"parameters": 1.5e10, ...}
    activation_bytes(config, batch=8, seq=2048, recompute="full")
    largest_model(80e9, ranks=64, stage=3)                    # parameters that just fit
    memory(model, columns)                                    # arrays: one entry per strategy

The first half is one data-parallel rank that shards its state by ZeRO, for lesson 05; the second is
a rank of the fullest stage of any strategy, at the peak of a step, for the planner.
`utils.measure.memory` measures what is computed here.

weights, gradients, optimizer   of this rank's part of the parameters. In bf16 2 + 2 + 12 bytes
    each (fp32 master copy and two moments), sharded by ZeRO: Rajbhandari et al. 2020,
    arXiv:1910.02054, section 5. A tied matrix is on the first and on the last stage. This
    workshop's trainer in bf16: 4 + 2 for the passes' copy, 4, 8; its gradients stay until the
    optimizer, even one on the host, has them.
activations   what all micro-batches in flight keep for the backward pass. GPT layout:
    Korthikanti et al. 2022, arXiv:2205.05198, section 4, with s·b·h values per layer
        sbh (10 + 24/t + 5as/ht)   and all of it / t with sequence parallelism;
        selective recomputation drops 5as/h; full recomputation keeps 2sbh.
    The first stage holds p micro-batches; with v chunks 1 + (p−1)/pv times as much.
    Gated layout: the values of `gated_values`, split over t in the same way; selective
    recomputation keeps the results of matrix products and attention (`utils.memory.checkpointing`).
    With context parallelism a rank has 1/cp of the tokens, and ZeRO shards its state over dp · cp.
    Ulysses keeps more, see `_more_by_context`.
buffers   short-lived memory: one layer that is being recomputed, gradients on their way through it,
    the loss, messages, other ranks' keys and values (`context_buffers`), ZeRO's gathered layers (in
    fp32, without a master copy, ZeRO-2 holds a rank's own shard in addition to the whole weights).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from utils.choices import RECOMPUTE, ZERO
from utils.models.config import GPTConfig
from utils.planner.kernels import loss_rows
from utils.planner.model import Model
from utils.planner.strategy import OFFLOAD, OPTIMIZERS, PRECISIONS, Columns, Numbers

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")

# ---- one rank of a data-parallel group


@dataclass(frozen=True)
class Place:
    """Bytes by kind on a rank's device and in its host memory."""

    device: dict[str, int]
    host: dict[str, int]


def bytes_per_rank(
    parameters: int,
    ranks: int = 1,
    *,
    stage: int = 0,
    precision: str = "bf16",
    optimizer: str = "adamw",
    offload: str = "none",
    unit: int = 0,
) -> dict[str, int]:
    """{kind: bytes} on one rank's device: `place(...)` without the host's side."""
    arguments = {"stage": stage, "precision": precision, "optimizer": optimizer}
    return place(parameters, ranks, offload=offload, unit=unit, **arguments).device


def place(
    parameters: int,
    ranks: int = 1,
    *,
    stage: int = 0,
    precision: str = "bf16",
    optimizer: str = "adamw",
    offload: str = "none",
    unit: int = 0,
) -> Place:
    """The location of each byte of the model's state.

    parameters  of the whole model, Ψ
    ranks       of the data-parallel group, N
    stage       0 (plain data parallel), 1, 2 or 3
    offload     "optimizer": its state, and the gradients that it needs, are in host memory
                (ZeRO-Offload, arXiv:2101.06840); "parameters": the weights as well, and the device
                holds only what is in use (ZeRO-Infinity, arXiv:2104.07857)
    unit        parameters of the largest unit that is gathered or reduced at once; it costs memory
                while it is whole. 0 omits this, as the paper's formulas do.
    Raises ValueError for unknown values and impossible combinations.
    """
    _check(parameters, ranks, stage, precision, optimizer, offload)
    weight, gradient, master = PRECISIONS[precision]
    share = -(-parameters // ranks)  # rounded up
    sizes = {
        "parameters": weight * (share if stage >= 3 else parameters),
        "gradients": gradient * (share if stage >= 2 else parameters),
        "optimizer": (master + OPTIMIZERS[optimizer]) * (share if stage >= 1 else parameters),
    }
    moved = {"none": (), "optimizer": ("gradients", "optimizer"), "parameters": tuple(sizes)}
    device = {kind: 0 if kind in moved[offload] else size for kind, size in sizes.items()}
    host = {kind: size if kind in moved[offload] else 0 for kind, size in sizes.items()}
    whole_weights = stage == 3 or offload == "parameters"
    whole_gradients = stage >= 2 or offload != "none"
    device["temporary"] = unit * (weight * whole_weights + gradient * whole_gradients)
    return Place(device, host | {"temporary": 0})


def _check(parameters, ranks, stage, precision, optimizer, offload):
    if parameters < 1 or ranks < 1 or int(ranks) != ranks:
        raise ValueError(f"{parameters} parameters on {ranks} ranks: both must be at least 1")
    for name, value, known in (
        ("stage", stage, ZERO),
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
        ("offload", offload, OFFLOAD),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, known))}")


def sent_per_step(parameters: int, ranks: int, *, stage: int = 0, value_bytes: int = 4) -> float:
    """Bytes that each rank sends in one step, by the ring algorithms (section 7 of the paper).

    Stages 0 to 2: reduce-scatter the gradients and all-gather the result, 2Ψ(N−1)/N values. Stage
    3 gathers the weights twice, for the forward and for the backward pass: 3Ψ(N−1)/N values.
    """
    _check(parameters, ranks, stage, "fp32", "adamw", "none")
    rounds = 3 if stage == 3 else 2
    return rounds * parameters * value_bytes * (ranks - 1) / ranks


# ---- its activations


def activation_bytes(
    config: GPTConfig, batch: int, seq: int, recompute: str = "none", value_bytes: int = 2
) -> int:
    """Peak bytes that the forward pass of `models.gpt` keeps for the backward pass, for `batch`
    sequences.

    recompute   "none"; "selective" keeps the results of matrix products and attention; "full" keeps
                each block's input. Both hold one block's whole activations while it is recomputed.
    value_bytes of an activation: 2 for bf16, 4 for fp32; the logits are always fp32.

    The attention is a fused kernel, which keeps no seq × seq scores; so this is linear in `seq`,
    unlike sbh(34 + 5as/h) of Korthikanti et al. 2022 (arXiv:2205.05198), whose kernel kept them.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute {recompute!r} is not one of {', '.join(RECOMPUTE)}")
    tokens, values = batch * seq, block_values(config)
    tables = 2 * (config.heads + config.key_value_heads) * config.head_size * seq  # rotary
    block = value_bytes * (tokens * values["none"] + tables)
    if recompute == "none":
        blocks = config.layers * block
    else:
        blocks = config.layers * value_bytes * tokens * values[recompute] + block
    head = value_bytes * 2 * config.hidden_size + 4 * config.vocab_size  # last norm, log-softmax
    return int(blocks + tokens * head)


def block_values(config: GPTConfig) -> dict[str, float]:
    """Values that one block of `models.gpt` keeps per token, by kind of recomputation."""
    width = config.heads * config.head_size
    keys = config.key_value_heads * config.head_size
    return gated_values(config.hidden_size, width, keys, config.heads, config.mlp_size)


def gated_values(
    hidden: Numbers,
    width: Numbers,
    keys: Numbers,
    heads: Numbers,
    inner: Numbers,
    tp: Numbers = 1,
    whole: Numbers = 1,
) -> dict:
    """Values that a layer of the gated layout keeps per token, by kind of recomputation.

    width, keys: of the queries and of the keys; inner: of the MLP; tp splits attention and MLP;
    whole (tp with sequence parallelism, else 1) splits the rest. Numbers or arrays.
    """
    attention = (2 * width + 2 * keys + heads) / tp  # q, k, v, result, log of the sums
    norms = 2 * (2 * hidden + 1) / whole  # their inputs and results, and one scale each
    return {
        "none": norms + attention + 4 * inner / tp,  # gate, silu(gate), up, their product
        "selective": hidden * (1 / whole + 2) + attention + 2 * inner / tp,
        "full": hidden / whole,
    }


# ---- the largest model that fits


def unit_parameters(parameters: int) -> int:
    """Parameters of one block of a model shaped like GPT-3 (Brown et al. 2020, Table 2.1).

    Its large models have as many heads of 128 as layers, so h = 128 l and Ψ ≈ 12 l h² = 196608 l³.
    """
    layers = max(1.0, (parameters / (12 * 128**2)) ** (1 / 3))
    return int(parameters / layers)


def largest_model(
    device_bytes: float,
    ranks: int = 1,
    *,
    host_bytes: float = float("inf"),
    reserve: float = 0,
    blocks: bool = True,
    **technique: Any,
) -> int:
    """The largest number of parameters whose state fits, within 0.1 %.

    device_bytes, host_bytes    of one rank
    reserve                     device bytes kept free for activations and the rest
    blocks                      count the block that is whole at a time (`unit_parameters`)
    technique                   as for `place`: stage, precision, optimizer, offload
    """

    def fits(parameters):
        unit = unit_parameters(parameters) if blocks else 0
        there = place(parameters, ranks, unit=unit, **technique)
        on_device = sum(there.device.values()) + reserve
        return on_device <= device_bytes and sum(there.host.values()) <= host_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > 10**18:  # no memory that grows with the model is limited
            return high
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---- parameters and state of a rank of the fullest stage


def split(model: Model, c: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parameters on one rank: (of a layer without experts, of a layer's experts, of the embedding
    matrix)."""
    attention = float(model.attention_matrices + model.split_biases[0]) / c.tp + model.whole[0]
    expert = float(model.expert_matrices + model.split_biases[1]) / c.tp + model.whole[1]
    table = np.ceil(model.vocab_size / c.tp) * model.hidden_size
    if model.experts == 1:
        return attention + expert, np.zeros_like(table), table
    return attention, expert * model.experts / c.ep, table


def layers_on_stage(model: Model, c: Columns) -> np.ndarray:
    """Layers of the fullest stage: chunks are equal, except for the remainder."""
    return np.ceil(model.layers / (c.pp * c.interleave)) * c.interleave


def stage_parameters(model: Model, c: Columns) -> list[tuple[np.ndarray, np.ndarray]]:
    """[(dense, experts)] parameters on a rank of the first stage and of the last one."""
    layer, experts, table = split(model, c)
    layers = layers_on_stage(model, c)
    positions = model.learned_positions * model.hidden_size
    one = c.pp == 1
    first = table + positions + one * (model.last_norm + (0 if model.is_tied else table))
    last = table + model.last_norm
    return [
        (layers * layer + first, layers * experts),
        (layers * layer + np.where(one, first, last), layers * experts),
    ]


def state(
    c: Columns, dense: np.ndarray, experts: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """{kind: bytes} of weights, gradients and optimizer for these parameters on a rank, and the
    bytes that the host holds instead."""
    bytes_of = np.array([PRECISIONS[name] for name in c.precision], dtype=float).T  # (3, n)
    bytes_of[2] += OPTIMIZERS["adamw"]
    # recomputation casts again, and the first copies are gone
    bytes_of[0] -= 2 * ((c.precision == "autocast") & (c.recompute != "none"))
    held, host = {}, np.zeros(len(c))
    for index, kind in enumerate(("weights", "gradients", "optimizer")):
        shared = c.zero >= 3 - index
        share = np.where(shared, dense / c.dp_cp + experts / (c.dp_cp / c.ep), dense + experts)
        held[kind] = bytes_of[index] * share
        moved = c.offload == "parameters"
        if kind == "optimizer":
            moved = moved | (c.offload == "optimizer")
        if kind == "gradients":  # the trainer's move when all are there, for the optimizer's step
            moved = moved | ((c.offload == "optimizer") & (c.software == "megatron"))
        host = host + np.where(moved, held[kind], 0)
        held[kind] = np.where(moved, 0, held[kind])
    return held, host


# ---- its activations, for each strategy


def layer_activations(model: Model, c: Columns) -> dict[str, np.ndarray]:
    """{mode: bytes} that one layer keeps for one micro-batch, for each mode of recomputation."""
    values = c.tokens(model) * np.where(c.precision == "fp32", 2.0, 1.0)  # × 16 bits
    whole = np.where(c.sequence_parallel, c.tp, 1.0)  # split only by sequence parallelism
    fused = c.attention == "fused"
    # tokens in the experts' order, and the experts' results before they are weighted
    sent = (model.experts > 1) * 2 * _active(model) * model.hidden_size / whole
    if not model.gated:
        sbh = values * model.hidden_size
        width = model.query_width / model.hidden_size
        inner = model.mlp_size / (4 * model.hidden_size)
        scores = np.where(fused, 0.0, 5 * model.heads * model.seq / model.hidden_size)
        # 24/t: 8 in attention (its input is among the 10), 16 in the MLP, for inner = 4h
        rest = sbh * (10 / whole + (8 * width + 16 * _active(model) * inner) / c.tp)
        return {
            "none": rest + sbh * scores / c.tp + 2 * values * sent,
            "selective": rest + 2 * values * sent,
            "full": sbh * 2 / whole,
        }
    width, keys = model.query_width, np.maximum(model.key_width, c.tp * model.head_size)
    inner = _active(model) * model.mlp_size
    kept = gated_values(model.hidden_size, width, keys, model.heads, inner, c.tp, whole)
    scores = np.where(fused, 0.0, 2.5 * model.heads * model.seq / c.tp)
    tables = 2 * (width + keys) / c.tp / c.micro_batch  # rotary cosines and sines
    more, copied = _more_by_context(model, c)
    kept["none"] = kept["none"] + scores + tables + sent + copied
    kept["selective"] = kept["selective"] + more
    # autocast: inputs of norms in fp32, and a 16-bit copy for each product; a norm's result is
    # read by three products and by two
    in_fp32 = np.where(c.precision == "autocast", model.hidden_size / whole, 0.0)
    for mode, times in (("none", 2 + 3), ("selective", 1), ("full", 1)):
        kept[mode] = kept[mode] + times * in_fp32
    return {mode: 2 * values * each for mode, each in kept.items()}


def _by_ulysses(c):
    return (c.cp > 1) & (c.context == "ulysses")


def key_columns(model: Model, c: Columns, by_heads: bool = False) -> np.ndarray:
    """Key columns of a rank's tokens: no head is split over tp or, with by_heads, over cp."""
    return np.maximum(model.key_width, c.tp * np.where(by_heads, c.cp, 1) * model.head_size) / c.tp


def _more_by_context(model, c):
    """Additional values per token that a layer keeps with context parallelism, (selective, none).

    In a ring, and gathered, attention is computed in blocks, none of which selective recomputation
    keeps. Ulysses keeps the result in both orders, and keys and values of heads that several ranks
    compute with."""
    parts = np.where(c.cp > 1, -(model.query_width + model.heads) / c.tp, 0.0)
    copied = model.query_width / c.tp + 2 * (key_columns(model, c, True) - key_columns(model, c))
    by_heads = _by_ulysses(c)
    return np.where(by_heads, 0.0, parts), np.where(by_heads, copied, 0.0)


def _active(model):
    return model.experts_per_token


def in_flight(c: Columns) -> np.ndarray:
    """Micro-batches, in units of a whole stage, whose activations the first stage holds."""
    chunks = np.where(c.interleave > 1, 1 + (c.pp - 1) / (c.pp * c.interleave), 1.0)
    return np.where(
        c.schedule == "gpipe", c.micro_batches, np.minimum(c.micro_batches, c.pp) * chunks
    )


def head_activations(model: Model, c: Columns) -> np.ndarray:
    """Bytes that the last stage keeps of one micro-batch after the last layer: the norm's input,
    the head's input, the logits in fp32."""
    tokens = c.tokens(model)
    value = np.where(c.precision == "fp32", 4.0, 2.0)
    norms = 2 * value * model.hidden_size / np.where(c.sequence_parallel, c.tp, 1.0)
    return tokens * (norms + np.where(_in_chunks(c), 0.0, 4 * model.vocab_size / c.tp))


def _in_chunks(c):
    """Whether the loss is computed a few rows at a time: if the trainer's head is whole."""
    return (c.software != "megatron") & (c.precision != "autocast") & (c.tp == 1)


def loss_buffers(model: Model, c: Columns) -> np.ndarray:
    """Bytes of the loss while it is computed: the logits and their gradient in fp32; in chunks,
    those of some rows with their softmax, and the gradients of all hidden states and the matrix.
    """
    value = np.where(c.precision == "fp32", 4.0, 2.0)
    tokens, share = c.tokens(model), model.vocab_size / c.tp
    # the matrix's gradient is summed in fp32; 8 bytes: 16-bit logits have a 16-bit gradient
    in_chunks = 8 * loss_rows(model, c) * share + (4 + value) * share * model.hidden_size
    in_chunks = in_chunks + value * tokens * model.hidden_size
    # PyTorch's loss has a gradient of log-softmax, too
    whole = tokens * share * (value + np.where(c.software == "megatron", 4, 8))
    return np.where(_in_chunks(c), in_chunks, whole)


def mlp_activations(model: Model, c: Columns) -> np.ndarray:
    """The layer's activations that are freed before its attention's backward pass begins."""
    value = np.where(c.precision == "fp32", 4.0, 2.0)
    whole = np.where(c.sequence_parallel, c.tp, 1.0)
    inner = _active(model) * model.mlp_size / c.tp
    each = (4 if model.gated else 2) * inner + (
        2 if model.gated else 1.5
    ) * model.hidden_size / whole
    return c.tokens(model) * value * each


def context_buffers(model: Model, c: Columns) -> np.ndarray:
    """Bytes that context parallelism itself holds during the backward pass of one layer's
    attention: gradients of results and queries, and

    ring      other ranks' keys and values: one block in use, one outgoing, one incoming; their
              gradients, summed in fp32: this rank's own, one in use, one outgoing and the next, one
              incoming. With fewer than four ranks, fewer are in flight
    gather    keys and values of all ranks, and fp32 sums of their gradients
    ulysses   gradients by heads as they are sorted by rank, sent and joined
    """
    value = np.where(c.precision == "fp32", 4.0, 2.0)
    width, keys = model.query_width / c.tp, 2 * key_columns(model, c)
    both = model.hidden_size + width  # gradients of the layer's result and of the attention's
    ring = value * (both + np.minimum(c.cp - 1, 3) * keys + width + keys)
    ring = ring + 4 * (width + np.minimum(c.cp + 2, 5) * keys)
    gathered = value * (both + (c.cp + 1) * keys + width + keys) + 4 * (width + (c.cp + 2) * keys)
    sent = width + 2 * key_columns(model, c, True)
    by_heads = value * (both + width + 3 * sent)
    found = np.select([c.context == "ring", c.context == "gather"], [ring, gathered], by_heads)
    return c.tokens(model) * found


# ---- all of it


def memory(model: Model, c: Columns) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """({kind: bytes} on the fullest stage's ranks, bytes in the host's memory), arrays."""
    kept = layer_activations(model, c)
    by_mode = np.select([c.recompute == mode for mode in kept], list(kept.values()))
    layers, held = layers_on_stage(model, c), in_flight(c)
    tokens = c.tokens(model)
    value = np.where(c.precision == "fp32", 4.0, 2.0)
    whole = np.where(c.sequence_parallel, c.tp, 1.0)
    head = head_activations(model, c)
    mask = 0.0 if model.gated else tokens * model.hidden_size / whole  # of the embedding's dropout
    stages = stage_parameters(model, c)
    last_held = np.where(c.schedule == "gpipe", c.micro_batches, 1.0)
    activations = (
        held * (layers * by_mode + mask) + np.where(c.pp == 1, head, 0.0),
        last_held * (layers * by_mode + head),
    )
    hidden = value * tokens * model.hidden_size
    # gradients on their way through a layer's MLP, and what this layer recomputes
    passing = 2 * value * tokens * _active(model) * model.mlp_size / c.tp + hidden / whole
    in_attention = context_buffers(model, c) - mlp_activations(model, c)
    passing = np.where(c.cp > 1, np.maximum(passing, in_attention), passing)
    working = passing + kept["none"] - by_mode
    loss = loss_buffers(model, c)
    layer, experts, table = split(model, c)
    layer_bytes = value * (layer + experts)
    # ZeRO-3: the weights of a layer in use and of the next one, and the gradients of one
    waiting = layer_bytes * (2 * ((c.zero == 3) | (c.offload == "parameters")) + (c.zero >= 2))
    # incoming and outgoing messages, for each chunk; the whole sequence and its gradient
    waiting += np.where(c.pp > 1, 2 * c.interleave * hidden / whole, 0.0)
    waiting += np.where(c.sequence_parallel, 2 * hidden, 0.0)
    best, best_host, total = None, None, None
    for (dense, moe), kept_here, is_last in zip(stages, activations, (False, True), strict=True):
        held_here, host = state(c, dense, moe)
        has_head = is_last | (c.pp == 1)
        held_here["activations"] = kept_here
        # the loss is over, and the head's activations are gone, when a layer is recomputed
        share = np.where(c.zero == 2, value * (dense + moe) / c.dp_cp, 0.0)
        held_here["buffers"] = waiting + np.where(c.precision == "fp32", share, 0.0)
        held_here["buffers"] += np.maximum(
            np.where(has_head, loss, 0.0), working - np.where(has_head, head, 0.0)
        )
        # the gradients of the first layer and of the embedding come last
        to_come = 4 * (layer + experts + (0 if model.is_tied else table))
        held_here = _one_pass(c, held_here, by_mode + mask, waiting + working, to_come)
        here = sum(held_here.values())
        if best is None:
            best, best_host, total = held_here, host, here
            continue
        more = here > total
        best = {kind: np.where(more, held_here[kind], best[kind]) for kind in KINDS}
        best_host, total = np.where(more, host, best_host), np.maximum(here, total)
    return best | {"total": total}, best_host


def _one_pass(c, held, activations, buffers, to_come):
    """`held`, with the lower peak of the trainer on one device with one micro-batch: its gradients
    appear as activations are freed (ZeRO's have their own memory). The larger of two sums: one with
    all activations, the other with only the first layer's `activations`, its `buffers`, and all
    gradients except those `to_come`. What the compiler saves of activations is not known here."""
    alone = (c.software != "megatron") & (c.gpus * c.micro_batches == 1) & (c.zero == 0)
    if not np.any(alone):
        return held
    early = held | {"gradients": np.zeros(len(c))}
    late = {"gradients": np.maximum(held["gradients"] - to_come, 0.0)}
    late = held | late | {"activations": activations, "buffers": buffers}
    is_late = sum(late.values()) > sum(early.values())
    return {
        kind: np.where(alone, np.where(is_late, late[kind], early[kind]), held[kind])
        for kind in held
    }
