"""Seconds of one training step, by kind, as the slowest stage of the pipeline sees them.

compute      forward and backward of its layers, and of the head or the embedding (`kernels`)
recompute    repeated forward passes
tp           two all-reduces per layer forward and two backward, and more with recomputation (with
             sequence parallelism an all-gather and a reduce-scatter each: as many bytes)
cp           keys and values to every rank and their gradients back, or heads for positions, in each
             layer (`context_messages`)
pp           hidden states to the next stage and their gradients back, once per chunk; each of the
             tp ranks sends its slice, and the receivers gather them (Narayanan et al. 2021, 4.1)
ep           two all-to-alls per layer forward, two backward
dp           gradients: an all-reduce, or ZeRO's reduce-scatter and all-gather; ZeRO-3 gathers the
             weights for every forward and every backward pass
bubble       the stage's wait for others: (p−1)/v of a micro-batch's pass, and the difference
             between unequal stages
optimizer    reading and writing the state
offload      waiting for the host's memory or for its optimizer

Messages that travel while the device computes are hidden, and reported separately. Each kind is a
field of `Strategy`; without it the device waits for the message.

* overlap_tp: a message of tensor parallelism is split into chunks that travel while the product
  before or after it works on the others, forward and backward. Copy engines send them into the
  memory of the node's other devices, so all of it is hidden, as long as the products last. Without
  it, and across nodes, only backward messages hide: at most `HIDDEN` of them, behind weight
  gradients.
* overlap_pp: hidden states travel while the stage works on another of its chunks, but not while
  the pipeline fills and drains: then each chunk waits for the message before it.
* overlap_grad_reduce: gradients travel during the last backward pass (ZeRO-2 and 3: during all).
* overlap_param_gather: ZeRO-1's weights travel during the first forward pass, ZeRO-3's during all
  passes, a layer ahead. Without it ZeRO-3 fetches each parameter separately when it is needed.

Among the messages of the last two, the first or last unit (`edge`) has nothing to hide behind. Of
the rest, only a fraction is hidden, and no more than the passes last, as a collective takes memory
bandwidth and processors from the computation: `HIDDEN` if each layer waits for its own (ZeRO-3),
`HIDDEN_ONCE` if gradients are waited for only at the end. Both are fitted to one half of the runs
in `published`.
"""

import numpy as np

from utils.planner import kernels, network
from utils.planner.machine import Machine
from utils.planner.memory import key_columns, layers_on_stage, split, stage_parameters
from utils.planner.model import Model
from utils.planner.strategy import PRECISIONS, Columns

KINDS = ("compute", "recompute", "tp", "cp", "pp", "ep", "dp", "bubble", "optimizer", "offload")
HIDDEN, HIDDEN_ONCE = 0.5, 0.7
PARAMETERS = 12  # tensors of a layer that ZeRO-3 fetches one by one
# Bytes of device memory that an AdamW step with clipping moves per parameter in mixed
# precision: cast and unscale the gradient (2 + 4), its norm (4), clip (8), read gradient, master
# copy and two moments, write three of them (28), write the weight (2).
OPTIMIZER_BYTES = 48
# FSDP's backward pass concatenates a unit's gradients (reads 2, writes 2) and divides them before
# they are summed (2 + 2): PyTorch's torch/distributed/fsdp, _flat_param.py and _runtime_utils.py.
FSDP_BYTES = 8
BUCKET = 40e6, 1e6  # parameters: minimum, per rank; Megatron-Core's DistributedDataParallel


def step(
    model: Model, c: Columns, machine: Machine
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """({kind: seconds, "total": …}, {"tp", "cp", "pp" and "dp": hidden seconds}), arrays."""
    value = float(PRECISIONS[machine.precision][0])
    m, layers = c.micro_batches, layers_on_stage(model, c)
    one = kernels.layer(machine, model, c, value)
    messages = layer_messages(model, c, machine, value, one)
    again = np.select([c.recompute == "full", c.recompute == "selective"],
                      [one["forward"], one["selective"]], 0.0)
    parts = (c.cp > 1) & (c.context != "ulysses") & (c.recompute == "selective") & model.gated
    again = again + np.where(parts, one["attention"], 0.0)  # attention in blocks is not kept
    full = c.recompute == "full"
    tp = messages["forward"] * (1 + full) + messages["backward"]
    ep = messages["experts"] * (2 + full)
    cp, cp_hidden = context_messages(model, c, machine, value, one)

    # the cost of one micro-batch on a stage, by kind
    ends = _ends(model, c, machine, value)
    layer, experts, _ = split(model, c)
    # from the second micro-batch on gradients are added: two are read, their sum is written; in
    # fp32 the sum is read and written by the kernel that computes them
    added = np.where(m > 1, 3 * value, 0.0)
    added = np.where(gradient_bytes(c, value) > value, 8.0, added)
    added = kernels.stream(machine, added * (layer + experts))
    body = one["forward"] + one["backward"] + added
    hop, hop_hidden = _hop(model, c, machine, value, layers * body)
    layer_seconds = body + again + tp + cp + ep
    first, last = ends
    # if layers do not divide evenly, the last stage has one fewer, then the first one
    spare = layers * c.pp - model.layers
    first, last = first - (spare >= 2) * layer_seconds, last - (spare >= 1) * layer_seconds
    slow_end = np.where(c.pp == 1, sum(ends), np.maximum(np.maximum(first, last), 0.0))
    slowest = layers * layer_seconds + slow_end + hop
    all_stages = model.layers * layer_seconds + sum(ends) + c.pp * hop
    waits = np.maximum(all_stages - slowest, 0.0) / c.interleave
    waits = waits * np.where(c.schedule == "zero-bubble", 1 / 3, 1.0)  # arXiv:2401.10241, ZB-H1

    seconds = {
        "compute": m * (layers * body + slow_end),
        "recompute": m * layers * again,
        "tp": m * layers * tp,
        "cp": m * layers * cp,
        "pp": m * hop,
        "ep": m * layers * ep,
        "bubble": waits,
    }
    passes = (layers * one["forward"], layers * (one["backward"] + again))
    seconds["dp"], dp_hidden = _data_parallel(model, c, machine, value, *passes)
    seconds["optimizer"], seconds["offload"] = _update(model, c, machine, value)
    seconds["offload"] += _streamed(model, c, machine, value, m * layers * body)
    seconds = {kind: seconds[kind] + np.zeros(len(c)) for kind in KINDS}
    seconds["total"] = sum(seconds.values())
    hidden = {
        "tp": m * layers * (messages["hidden forward"] * (1 + full) + messages["hidden backward"]),
        "cp": m * layers * cp_hidden,
        "pp": m * hop_hidden,
        "dp": dp_hidden,
    }
    return seconds, hidden


def layer_messages(
    model: Model, c: Columns, machine: Machine, value: float, one: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Exposed seconds of one layer's messages for one micro-batch: forward, backward, experts (one
    direction), and the hidden part of the first two. one: the layer's computation, of `kernels`."""
    size = c.tokens(model) * model.hidden_size * value
    pair = 2 * np.where(
        c.sequence_parallel,
        2 * network.gather(machine, size, c.tp, 1),
        network.all_reduce(machine, size, c.tp, 1),
    )
    pipelined = c.overlap_tp & c.sequence_parallel & (c.tp <= machine.node)
    forward = np.where(pipelined, np.minimum(pair, one["products"]), 0.0)
    backward = np.where(
        pipelined,
        np.minimum(pair, one["inputs"] + one["weights"]),
        np.minimum(HIDDEN * pair, one["weights"]),
    )
    routed = size * model.experts_per_token / np.where(c.sequence_parallel, c.tp, 1.0)
    experts = 2 * network.all_to_all(machine, routed, c.ep, c.tp * c.cp) * (model.experts > 1)
    return {
        "forward": pair - forward,
        "backward": pair - backward,
        "hidden forward": forward,
        "hidden backward": backward,
        "experts": experts,
    }


def context_messages(
    model: Model, c: Columns, machine: Machine, value: float, one: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """(exposed, hidden) seconds of attention's messages over cp for one layer and micro-batch, with
    those that recomputation repeats. one: the layer's computation, of `kernels`.

    ring      cp − 1 times keys and values, while one block of the scores is computed; backward with
              their gradients in fp32, which return one message later, when nothing is left to
              compute. The farthest neighbours set the pace
    gather    all keys and values before the first score; their gradients, in fp32, after the last
    ulysses   two all-to-alls forward and two backward, between which the scores are computed
    """
    tokens, n = c.tokens(model), c.cp
    keys = tokens * 2 * key_columns(model, c)
    reach = c.tp * np.maximum(n - 1, 1)
    kv, gradient = (network.send(machine, size * keys, reach) for size in (value, 4.0))
    turns = n - 1
    blocks = [one[name] / n for name in ("attention", "attention backward")]
    hidden = [np.minimum(sent, block) for sent, block in zip((kv, kv + gradient), blocks)]
    again = (c.recompute == "full") | ((c.recompute == "selective") & model.gated)
    ring = turns * (kv * (1 + again) + kv + gradient) + gradient
    ring_hidden = turns * (hidden[0] * (1 + again) + hidden[1])

    once = network.gather(machine, value * n * keys, n, c.tp)
    gathered = once * (2 + again) + network.gather(machine, 4 * n * keys, n, c.tp)

    width = tokens * model.query_width / c.tp
    heads = width + 2 * tokens * key_columns(model, c, True)
    pair = sum(network.all_to_all(machine, value * size, n, c.tp) for size in (width, heads))
    by_heads = pair * (2 + again)

    ways = [(c.cp > 1) & (c.context == way) for way in ("ring", "gather", "ulysses")]
    return (
        np.select(ways, [ring - ring_hidden, gathered, by_heads], 0.0),
        np.select(ways[:1], [ring_hidden], 0.0),
    )


def _ends(model, c, machine, value):
    """Seconds that the embedding, and the head with the loss, add to a micro-batch."""
    size = c.tokens(model) * model.hidden_size * value
    message = network.all_reduce(machine, size, c.tp, 1)
    first = kernels.embedding(machine, model, c, value) + message
    return first, sum(kernels.head(machine, model, c, value)) + message


def _hop(model, c, machine, value, computing):
    """(exposed, hidden) seconds of a stage's messages for one micro-batch, whose computation takes
    `computing`. Only a stage with several chunks has another one to work on."""
    size = c.tokens(model) * model.hidden_size * value
    reach = c.tp * c.dp_cp * (c.pp - 1)
    one = network.send(machine, size / c.tp, reach)
    one = one + np.where(c.sequence_parallel, 0.0, network.gather(machine, size, c.tp, 1))
    both = np.where(c.pp > 1, 2 * c.interleave * one, 0.0)
    hidden = np.where(c.overlap_pp & (c.interleave > 1), np.minimum(both, computing), 0.0)
    # chunks' passes of the first stage before its steady state, of all of them (Megatron-Core:
    # overlap_p2p_comm_warmup_flush, which is off unless asked for)
    filling = (2 * (c.pp - 1) + (c.interleave - 1) * c.pp) / (c.micro_batches * c.interleave)
    hidden = hidden * (1 - np.minimum(filling, 1.0))
    return both - hidden, hidden


def _data_parallel(model, c, machine, value, forward, backward):
    """(exposed, hidden) seconds of data parallelism's messages in a step: gradients, and the
    weights that ZeRO shards. forward, backward: a stage's seconds for one micro-batch."""
    dense, experts = stage_parameters(model, c)[0]
    m = c.micro_batches
    gradients, weights = np.zeros(len(c)), np.zeros(len(c))
    # (experts: the ranks of cp are adjacent, those of dp ep apart; both are taken as apart)
    groups = ((dense, c.dp_cp, c.tp), (experts, c.dp_cp // c.ep, c.tp * c.ep))
    for parameters, n, stride in groups:
        size = value * parameters
        once = network.gather(machine, size, n, stride)
        # stage 3 gathers layer by layer or tensor by tensor: the same bytes, more latencies
        pieces = np.where(c.overlap_param_gather, 1, PARAMETERS)
        often = once + pieces * model.layers * (n - 1) * network.pace(machine, n, stride)[1]
        size = gradient_bytes(c, value) * parameters
        reduced, all_reduce = (way(machine, size, n, stride)
                               for way in (network.gather, network.all_reduce))
        gradients += np.select([c.zero == 3, c.zero == 2, c.zero == 1],
                               [m * (often - once + reduced), m * reduced, reduced], all_reduce)
        weights += np.select([c.zero == 3, c.zero > 0], [2 * m * often, once], 0.0)
    # the computation to hide behind: the last backward pass and the first forward pass; if every
    # micro-batch sends, all of them
    each = np.where(c.zero >= 2, m, 1)
    part = np.where(c.zero == 3, HIDDEN, HIDDEN_ONCE) * (1 - edge(model, c, dense + experts))
    hidden = c.overlap_grad_reduce * np.minimum(part * gradients, each * backward)
    left = np.where(c.zero == 3, m * (forward + backward) - hidden, forward)
    hidden = hidden + c.overlap_param_gather * np.minimum(part * weights, left)
    table = value * split(model, c)[2]
    both_ends = (c.pp > 1) & model.is_tied  # its two copies get one gradient
    reach = c.tp * c.dp_cp * (c.pp - 1)
    ends = np.where(both_ends, network.send(machine, table, reach), 0.0)
    fsdp = (c.zero == 3) & c.overlap_param_gather & (c.software == "megatron")
    copies = fsdp * m * kernels.stream(machine, FSDP_BYTES * (dense + experts))
    return gradients + weights - hidden + ends + copies, hidden


def gradient_bytes(c: Columns, value: float) -> np.ndarray:
    """Bytes of one gradient value that data parallelism sends."""
    return np.where(c.precision == "bf16-fp32-gradients", 4.0, value)


def edge(model: Model, c: Columns, parameters: np.ndarray) -> np.ndarray:
    """Fraction of a stage's parameters in the unit that is sent before or after all computation: a
    layer with ZeRO-3, otherwise a bucket."""
    layer, experts, _ = split(model, c)
    bucket = np.maximum(BUCKET[0], BUCKET[1] * c.dp_cp)
    return np.minimum(np.where(c.zero == 3, layer + experts, bucket) / parameters, 1.0)


def _update(model, c, machine, value):
    """(on the device, by the host) seconds of the optimizer's step."""
    dense, experts = stage_parameters(model, c)[0]
    share = np.where(c.zero >= 1, dense / c.dp_cp + experts * c.ep / c.dp_cp, dense + experts)
    trainer = c.software != "megatron"
    # the trainer's: norm (4), clip (8), AdamW (28); in 16 bits each pass casts gradients (6), and a
    # step, or with autocast each pass and each recomputation, casts the weights (6)
    passes = c.micro_batches * (1 + (c.recompute != "none"))
    casts = 6 * c.micro_batches + 6 * np.where(c.precision == "autocast", passes, 1)
    own = 40 + np.where(c.precision == "fp32", 0, casts)
    on_device = kernels.stream(machine, np.where(trainer, own, OPTIMIZER_BYTES) * share)
    computing, travelling = share * 28 / machine.host_bandwidth, 4 * share / machine.host_link
    # the trainer's copies, in fp32, travel during the host's step
    host = np.where(
        trainer,
        np.maximum(computing, 2 * travelling),
        computing + 2 * value * share / machine.host_link,
    )
    offloaded = c.offload != "none"
    return np.where(offloaded, 0.0, on_device), np.where(offloaded, host, 0.0)


def _streamed(model, c, machine, value, computing):
    """Seconds that the device waits for weights in the host's memory: each rank loads its shard
    for every forward and backward pass, while the previous layers compute."""
    dense, experts = stage_parameters(model, c)[0]
    share = np.where(c.zero == 3, c.dp_cp, 1) * 1.0
    bring = c.micro_batches * 2 * value * (dense + experts) / share / machine.host_link
    wait = bring - np.minimum(HIDDEN * bring, computing)
    return np.where(c.offload == "parameters", wait, 0.0)
