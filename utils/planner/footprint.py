"""What one rank must hold, by formula: parameters, gradients, optimizer state, activations.

    bytes_per_rank(7_500_000_000, ranks=64, stage=2)          # {"parameters": 1.5e10, ...}
    activation_bytes(config, batch=8, seq=2048, recompute="full")
    largest_model(80e9, ranks=64, stage=3)                    # parameters that just fit

The state follows ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5): stage 1 shares out
the optimizer state over the ranks, stage 2 the gradients too, stage 3 the parameters too.
Everything is in bytes of one rank; a share is rounded up, as the padding of a real run is.
`utils.measure.memory` measures what is computed here.
"""

from dataclasses import dataclass

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
STAGES = (0, 1, 2, 3)
OFFLOADS = ("none", "optimizer", "parameters")
RECOMPUTE = ("none", "selective", "full")
# Bytes of one parameter: (weights, gradients, fp32 master copy that the optimizer keeps). "bf16" is
# the paper's layout, that of DeepSpeed and Megatron; torch's autocast keeps the weights in fp32.
PRECISIONS = {"fp32": (4, 4, 0), "bf16": (2, 2, 4)}
# Bytes of one parameter that the optimizer keeps besides, always fp32.
OPTIMIZERS = {"sgd": 0, "momentum": 4, "muon": 4, "adamw": 8}


@dataclass(frozen=True)
class Place:
    """Bytes by kind on a rank's device and in the host memory beside it."""

    device: dict[str, int]
    host: dict[str, int]


def bytes_per_rank(
    parameters, ranks=1, *, stage=0, precision="bf16", optimizer="adamw", offload="none", unit=0
) -> dict[str, int]:
    """{kind: bytes} on one rank's device: `place(...)` without the host's side."""
    arguments = {"stage": stage, "precision": precision, "optimizer": optimizer}
    return place(parameters, ranks, offload=offload, unit=unit, **arguments).device


def place(
    parameters, ranks=1, *, stage=0, precision="bf16", optimizer="adamw", offload="none", unit=0
) -> Place:
    """Where each byte of the model's state is.

    parameters  of the whole model, Ψ
    ranks       of the data-parallel group, N
    stage       0 (plain data parallel), 1, 2 or 3
    offload     "optimizer": its state, and the gradients that it needs, wait in host memory
                (ZeRO-Offload, arXiv:2101.06840); "parameters": the weights as well, and the device
                holds only what is in use (ZeRO-Infinity, arXiv:2104.07857)
    unit        parameters of the largest piece that is gathered or reduced at once; it costs memory
                while it is whole. 0 leaves this out, as the paper's formulas do.
    Raises ValueError for values that are not known or make no sense together.
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
        raise ValueError(f"{parameters} parameters on {ranks} ranks: both must be 1 or more")
    for name, value, known in (
        ("stage", stage, STAGES),
        ("precision", precision, PRECISIONS),
        ("optimizer", optimizer, OPTIMIZERS),
        ("offload", offload, OFFLOADS),
    ):
        if value not in known:
            raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, known))}")


def sent_per_step(parameters, ranks, *, stage=0, value_bytes=4) -> float:
    """Bytes that each rank sends in one step, by the ring algorithms (section 7 of the paper).

    Stages 0 to 2: reduce-scatter the gradients and all-gather the result, 2Ψ(N−1)/N values. Stage
    3 gathers the weights twice, for the forward and for the backward pass: 3Ψ(N−1)/N values.
    """
    _check(parameters, ranks, stage, "fp32", "adamw", "none")
    rounds = 3 if stage == 3 else 2
    return rounds * parameters * value_bytes * (ranks - 1) / ranks


# ---- activations


def activation_bytes(config, batch, seq, recompute="none", value_bytes=2) -> int:
    """Bytes that the backward pass of `models.gpt` needs, at their peak, for `batch` sequences.

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
    return blocks + tokens * head


def block_values(config) -> dict[str, int]:
    """Values that one block keeps for each token, by kind of recomputation."""
    width, inner = config.heads * config.head_size, config.mlp_size
    keys, hidden = config.key_value_heads * config.head_size, config.hidden_size
    attention = width + 2 * keys + width + config.heads  # q, k, v, result, log of the sums
    norms = 2 * (2 * hidden + 1)  # their inputs and results, and one scale each
    return {
        "none": norms + attention + 4 * inner,  # gate, silu(gate), up, their product
        "selective": hidden + attention + hidden + 2 * inner + hidden,
        "full": hidden,
    }


# ---- the largest model


def unit_parameters(parameters) -> int:
    """Parameters of one block of a model shaped like GPT-3 (Brown et al. 2020, Table 2.1).

    Its large models have as many heads of 128 as layers, so h = 128 l and Ψ ≈ 12 l h² = 196608 l³.
    """
    layers = max(1.0, (parameters / (12 * 128**2)) ** (1 / 3))
    return int(parameters / layers)


def largest_model(
    device_bytes, ranks=1, *, host_bytes=float("inf"), reserve=0, blocks=True, **technique
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
        if high > 10**18:  # nothing that grows with the model is bounded
            return high
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
