"""Bytes that one rank of the fullest stage holds, by kind, at the peak of a step.

weights, gradients, optimizer   of this rank's share of the parameters. In bf16 2 + 2 + 12 bytes
    each (fp32 master copy and two moments), shared out by ZeRO: Rajbhandari et al. 2020,
    arXiv:1910.02054, section 5. A tied matrix is on the first and on the last stage.
activations   what the backward pass waits for, of all micro-batches that are under way. GPT layout:
    Korthikanti et al. 2022, arXiv:2205.05198, section 4, with s·b·h values a layer
        sbh (10 + 24/t + 5as/ht)   and all of it / t with sequence parallelism;
        selective recomputation leaves out 5as/h; full recomputation keeps 2sbh.
    The first stage holds p micro-batches; with v chunks 1 + (p−1)/pv times as much.
    Gated layout: what `utils.planner.footprint` counts, split over t in the same way; selective
    recomputation keeps the results of matrix products and attention (`utils.memory.checkpointing`).
buffers   what lives for moments: one layer that is being recomputed, gradients on their way
    through it, the loss, messages, ZeRO's gathered layers (in fp32, where there is no master copy,
    ZeRO-2 holds a rank's own part beside the whole weights).
"""

import numpy as np

from utils.planner.strategy import PRECISIONS

KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")


def split(model, c):
    """Parameters on one rank: (of a layer without experts, of a layer's experts, of the embedding
    matrix)."""
    attention = (model.attention_matrices + model.split_biases[0]) / c.tp + model.whole[0]
    expert = (model.expert_matrices + model.split_biases[1]) / c.tp + model.whole[1]
    table = np.ceil(model.vocab_size / c.tp) * model.hidden_size
    if model.experts == 1:
        return attention + expert, np.zeros_like(table), table
    return attention, expert * model.experts / c.ep, table


def layers_on_stage(model, c):
    """Layers of the fullest stage: chunks are equal, but for the rest of the division."""
    return np.ceil(model.layers / (c.pp * c.interleave)) * c.interleave


def stage_parameters(model, c):
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


def state(model, c, dense, experts):
    """{kind: bytes} of weights, gradients and optimizer for so many parameters on a rank, and the
    bytes that the host holds instead."""
    bytes_of = np.array([PRECISIONS[name] for name in c.precision], dtype=float).T  # (3, n)
    held, host = {}, np.zeros(len(c))
    for index, kind in enumerate(("weights", "gradients", "optimizer")):
        shared = c.zero >= 3 - index
        share = np.where(shared, dense / c.dp + experts / (c.dp / c.ep), dense + experts)
        held[kind] = bytes_of[index] * share
        moved = c.offload == "parameters"
        if kind != "weights":
            moved = moved | (c.offload == "optimizer")
        host = host + np.where(moved, held[kind], 0)
        held[kind] = np.where(moved, 0, held[kind])
    return held, host


# ---- activations


def layer_activations(model, c):
    """{mode: bytes} that one layer keeps for one micro-batch, for each mode of recomputation."""
    values = c.micro_batch * model.seq * np.where(c.precision == "fp32", 2.0, 1.0)  # × 16 bits
    whole = np.where(c.sequence_parallel, c.tp, 1.0)  # what only sequence parallelism splits
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
    inner = _active(model) * model.mlp_size / c.tp
    attention = (2 * width + 2 * keys + model.heads) / c.tp  # q, k, v, result, log of the sums
    scores = np.where(fused, 0.0, 2.5 * model.heads * model.seq / c.tp)
    tables = 2 * (width + keys) / c.tp / c.micro_batch  # rotary cosines and sines
    norms = 2 * (2 * model.hidden_size + 1) / whole  # their inputs, results and scales
    return {
        "none": 2 * values * (norms + attention + scores + 4 * inner + tables + sent),
        "selective": 2 * values * (model.hidden_size * (1 / whole + 2) + attention + 2 * inner),
        "full": 2 * values * model.hidden_size / whole,
    }


def _active(model):
    return model.experts_per_token


def in_flight(c):
    """Micro-batches, in units of a whole stage, whose activations the first stage holds."""
    chunks = np.where(c.interleave > 1, 1 + (c.pp - 1) / (c.pp * c.interleave), 1.0)
    return np.where(
        c.schedule == "gpipe", c.micro_batches, np.minimum(c.micro_batches, c.pp) * chunks
    )


def head_activations(model, c):
    """Bytes that the last stage keeps of one micro-batch behind the last layer: the norm's input,
    the head's input, the logits in fp32."""
    tokens = c.micro_batch * model.seq
    value = np.where(c.precision == "fp32", 4.0, 2.0)
    norms = 2 * value * model.hidden_size / np.where(c.sequence_parallel, c.tp, 1.0)
    return tokens * (norms + 4 * model.vocab_size / c.tp)


# ---- all of it


def memory(model, c):
    """({kind: bytes} on the fullest stage's ranks, bytes in the host's memory), arrays."""
    kept = layer_activations(model, c)
    by_mode = np.select([c.recompute == mode for mode in kept], list(kept.values()))
    layers, held = layers_on_stage(model, c), in_flight(c)
    tokens = c.micro_batch * model.seq
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
    # gradients on their way through a layer's MLP, and what of this layer is computed again
    passing = 2 * value * tokens * _active(model) * model.mlp_size / c.tp + hidden / whole
    working = passing + kept["none"] - by_mode
    loss = tokens * model.vocab_size / c.tp * (value + 4)  # the logits, and their gradient in fp32
    layer, experts, _ = split(model, c)
    layer_bytes = value * (layer + experts)
    # ZeRO-3: the weights of a layer in use and of the next one, and the gradients of one
    waiting = layer_bytes * (2 * ((c.zero == 3) | (c.offload == "parameters")) + (c.zero >= 2))
    # what arrives and what leaves, for each chunk; the whole sequence and its gradient
    waiting += np.where(c.pp > 1, 2 * c.interleave * hidden / whole, 0.0)
    waiting += np.where(c.sequence_parallel, 2 * hidden, 0.0)
    best, best_host, total = None, None, None
    for (dense, moe), kept_here, is_last in zip(stages, activations, (False, True), strict=True):
        held_here, host = state(model, c, dense, moe)
        has_head = is_last | (c.pp == 1)
        held_here["activations"] = kept_here
        # the loss is over, and the head's activations are gone, when a layer is recomputed
        share = np.where(c.zero == 2, value * (dense + moe) / c.dp, 0.0)
        held_here["buffers"] = waiting + np.where(c.precision == "fp32", share, 0.0)
        held_here["buffers"] += np.maximum(
            np.where(has_head, loss, 0.0), working - np.where(has_head, head, 0.0)
        )
        here = sum(held_here.values())
        if best is None:
            best, best_host, total = held_here, host, here
            continue
        more = here > total
        best = {kind: np.where(more, held_here[kind], best[kind]) for kind in KINDS}
        best_host, total = np.where(more, host, best_host), np.maximum(here, total)
    return best | {"total": total}, best_host
