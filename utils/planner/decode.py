"""Seconds of a decode step and of prefill on 1, 2, 4 … ranks: where tensor parallelism pays off.

    model, machine = MODELS["llama2-13b"], MACHINES["dgx-h100"]          # of utils.planner
    decode_step(model, machine, batch=16, context=512, tp=4).tokens_per_second
    over(model, machine, batches=(1, 16, 64), tps=(1, 2, 4))             # a frame
    print(where_it_pays(model, machine))

A step computes one new token for each of B rows. It reads every weight once for any B, and the keys
and values of all positions so far; so at small B it waits for the memory, not for arithmetic:

    t(B, N) = max(weights / N / bandwidth, FLOPs / N / rate)      for each matrix
            + B · context · cache / N / bandwidth
            + kernels · launch                                    independent of N
            + (2L + 1) · all_reduce(B · C values)  +  gather(B · V logits)

With N ranks the first two lines shrink and the last one is added: α for every message, which no
batch reduces, and β for its bytes. Each layer sums twice (after attention, after the MLP), the
split embedding once. Prefill is the same with B·T rows instead of B.

Peaks, links and their efficiencies are the planner's (`utils.planner.machine`, with sources);
`here` measures them on this machine, links by real all-reduces on real ranks.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from utils.planner import MACHINES, MODELS, kernels, network
from utils.planner.machine import HERE, Machine
from utils.planner.model import Model
from utils.planner.strategy import PRECISIONS

if TYPE_CHECKING:  # they import torch
    from utils.measure.timing import Link
    from utils.ranks import Ranks

KINDS = ("weights", "cache", "launch", "latency", "bytes")  # of a step, in this order
KERNELS = 12  # that a layer launches on a GPU, as in the planner's `kernels.layer`
PAGE = 16  # positions per block of the KV cache: a request holds whole blocks
OPERATORS = 35  # that a layer of our own decoder calls, one by one, on this machine's CPU

# gpt-fast, README, "Tensor Parallelism": bf16, batch 1, 5 prompt tokens and 200 new ones,
# 8 x A100 80GB limited to 330 W. {model: {GPUs: tokens/s}}
PUBLISHED = {
    "llama-7b": {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43},
    "llama2-70b": {2: 21.32, 4: 38.01, 8: 62.50},
}


@dataclass(frozen=True)
class Step:
    """The cost of a forward pass.

    seconds  by kind: weights (reading them, or computing with them if that takes longer),
             cache (keys and values), launch (of kernels), latency and bytes (of messages)
    tokens   new tokens that it computes;  memory: bytes of weights and cache on a rank
    fits     whether they fit the device
    """

    batch: int
    tp: int
    seconds: dict
    tokens: int
    memory: float
    fits: bool

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.total

    @property
    def communication(self) -> float:
        """The fraction of the step that messages take, 0 to 1."""
        return (self.seconds["latency"] + self.seconds["bytes"]) / self.total


def decode_step(
    model: Model,
    machine: Machine | dict[int, Machine],
    batch: int = 1,
    context: int = 512,
    tp: int = 1,
    links: "dict[int, Link] | None" = None,
    calls: int | None = None,
) -> Step:
    """One new token for each of `batch` rows that have `context` positions already.

    machine a `Machine`, or {tp: Machine} as measured by `here`
    links   {tp: Link of an all-reduce}, measured by `all_reduce_link`; None: the machine's networks
    calls   kernels that one layer launches; None: KERNELS, on this machine OPERATORS
    Raises ValueError if tp does not divide the heads.
    """
    return _forward(model, machine, batch, 1, context, tp, links, calls)


def prefill(
    model: Model,
    machine: Machine | dict[int, Machine],
    tokens: int,
    batch: int = 1,
    tp: int = 1,
    links: "dict[int, Link] | None" = None,
    calls: int | None = None,
) -> Step:
    """`batch` prompts of `tokens` tokens each; the output is their first new tokens."""
    return _forward(model, machine, batch, tokens, tokens / 2, tp, links, calls)


def _forward(model, machine, batch, length, context, tp, links, calls):
    _check(model, batch, length, tp)
    if isinstance(machine, dict):
        if tp not in machine:
            raise ValueError(f"tp {tp} is not among the measured ones, {sorted(machine)}")
        machine = machine[tp]
    calls = calls or (OPERATORS if machine.name == HERE else KERNELS)
    value = float(PRECISIONS[machine.precision][0])
    rows = batch * length
    rate = machine.peak * machine.sustained

    def matrices(values, rows):
        """Seconds of matrices with `values` values on a rank: their bytes, or their FLOPs."""
        return np.maximum(kernels.stream(machine, value * values), 2 * values * rows / rate)

    attention = model.attention_matrices / tp
    routed = min(model.experts, rows * model.experts_per_token)  # experts that a row uses
    expert = model.expert_matrices / tp
    used = rows * model.experts_per_token / routed  # rows per expert
    head = model.vocab_size * model.hidden_size / tp
    weights = model.layers * (matrices(attention, rows) + routed * matrices(expert, used))
    weights += matrices(head, batch)
    keys = max(model.key_width / tp, model.head_size)  # each rank has at least one head
    stored = 2 * model.layers * keys * value  # bytes of cache per position
    scores = 4 * model.layers * rows * context * model.query_width / tp
    cache = max(kernels.stream(machine, stored * batch * context), scores / rate)
    latency, size = _messages(model, machine, batch, rows, tp, links, value)
    table = 0 if model.is_tied else head  # the embedding is read by rows, but stored whole
    held = value * (model.layers * (attention + model.experts * expert) + head + table)
    held += stored * batch * PAGE * math.ceil((context if length == 1 else length) / PAGE)
    seconds = {
        "weights": float(weights),
        "cache": float(cache),
        "launch": model.layers * calls * machine.launch,
        "latency": float(latency),
        "bytes": float(size),
    }
    return Step(batch, tp, seconds, batch, held, held <= machine.memory)


def _messages(model, machine, batch, rows, tp, links, value):
    """(latency, bytes) in seconds: 2L + 1 all-reduces of rows · C values, one gather of logits."""
    if tp == 1:
        return 0.0, 0.0
    count = 2 * model.layers + 1
    hidden, logits = value * rows * model.hidden_size, value * batch * model.vocab_size
    if links is None:
        alpha = float(network.all_reduce(machine, 0, tp, 1))
        first = float(network.gather(machine, 0, tp, 1))
        sums = float(network.all_reduce(machine, hidden, tp, 1)) - alpha
        gathered = float(network.gather(machine, logits, tp, 1)) - first
    elif tp not in links:
        raise ValueError(f"tp {tp} has no measured link, only {sorted(links)}: measure it")
    else:  # a ring's gather sends half of what its all-reduce sends
        alpha = first = links[tp].alpha
        sums, gathered = links[tp].beta * hidden, links[tp].beta * logits / 2
    return count * alpha + first, count * sums + gathered


def _check(model, batch, length, tp):
    for name, number in (("batch", batch), ("tokens", length), ("tp", tp)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name} {number!r} is not an integer above 0")
    if model.heads % tp:
        raise ValueError(f"tp {tp} does not divide the {model.heads} heads: choose a divisor")


# ---- many at once


def over(
    model: Model,
    machine: Machine | dict[int, Machine],
    batches: Sequence[int] = (1, 4, 16, 64),
    tps: Sequence[int] = (1, 2, 4),
    **options: Any,
) -> pd.DataFrame:
    """A row for each tp and batch: tp, batch, seconds by kind, step (s), tokens_per_second,
    per_device (tokens/s of a rank), memory (bytes of a rank), fits. `options` of `decode_step`."""
    rows = []
    for tp in tps:
        for batch in batches:
            step = decode_step(model, machine, batch, tp=tp, **options)
            rows.append({
                "tp": tp, "batch": batch, **step.seconds, "step": step.total,
                "tokens_per_second": step.tokens_per_second,
                "per_device": step.tokens_per_second / tp,
                "memory": step.memory, "fits": step.fits,
            })
    return pd.DataFrame(rows)


def where_it_pays(
    model: Model,
    machine: Machine | dict[int, Machine],
    batches: Sequence[int] = (1, 4, 16, 64),
    tps: Sequence[int] = (1, 2, 4),
    **options: Any,
) -> str:
    """A line for each batch: which tp is fastest, and which gets the most from each device."""
    table = over(model, machine, batches, tps, **options)
    lines = []
    for batch, rows in table.groupby("batch", sort=False):
        rows = rows[rows["fits"]]
        if rows.empty:
            lines.append(f"batch {batch}: fits on none of tp {', '.join(map(str, tps))}")
            continue
        fast, thrifty = (rows.loc[rows[name].idxmax()] for name in ("tokens_per_second",
                                                                    "per_device"))
        least = rows.iloc[0]
        lines.append(
            f"batch {batch}: fastest with tp {fast['tp']:.0f}, {fast['step'] * 1e3:.3g} ms per step"
            f" ({least['step'] / fast['step']:.2g}x as fast as tp {least['tp']:.0f}); most tokens "
            f"per device with tp {thrifty['tp']:.0f}"
        )
    return "\n".join(lines)


def published() -> pd.DataFrame:
    """gpt-fast's measurements and the predictions: model, tp, measured, predicted (tokens/s), error
    (a fraction). The mean context is 5 prompt tokens and half of 200 new ones."""
    rows = []
    for name, measured in PUBLISHED.items():
        for tp, rate in measured.items():
            step = decode_step(MODELS[name], MACHINES["dgx-a100"], 1, 105, tp)
            rows.append({"model": name, "tp": tp, "measured": rate,
                         "predicted": step.tokens_per_second,
                         "error": step.tokens_per_second / rate - 1})
    return pd.DataFrame(rows)


# ---- this machine


def here(
    ranks: "Ranks", model: Model, tps: Sequence[int] = (1, 2, 4)
) -> "tuple[dict[int, Machine], dict[int, Link]]":
    """({tp: Machine}, {tp: Link}): this machine, measured with tp of the open `ranks` at work. Both
    are the machine and links of the functions above.

    Bandwidth is that of products of one row with matrices of the model's own sizes, split into tp
    slices: a model that fits the cache is read faster than from memory. `launch` is the time of the
    smallest product. With more ranks than cores, ranks share cores, and each is slower.
    """
    machines, links = {}, {}
    for tp in tps:
        if not 1 <= tp <= ranks.size:
            raise ValueError(f"tp {tp} of {ranks.size} ranks: open Ranks({max(tps)})")
        shape = (model.hidden_size, max(1, model.mlp_size // tp))
        found = ranks.run(_speeds, tp, shape, 3 * model.layers)[:tp]
        rates, launches, flops = zip(*found)
        machines[tp] = replace(
            MACHINES["laptop"],
            name=HERE,
            bandwidth=min(rates) / kernels.STREAM,
            peak=min(flops),
            sustained=1.0,
            launch=max(launches),
            source=f"measured, {tp} ranks at once",
        )
        if tp > 1:
            links[tp] = all_reduce_link(ranks, tp)
    return machines, links


def all_reduce_link(
    ranks: "Ranks",
    size: int | None = None,
    values: Sequence[int] = (256, 4096, 65536, 2**18),
    repeats: int = 11,
) -> "Link":
    """`timing.Link` of an all-reduce among the first `size` ranks: α + β · bytes seconds.

    values   fp32 values in each message; the median of `repeats` counts
    If noise hides the cost of bytes, β is 1e-13 s, which is 10 TB/s.
    """
    from utils.measure.timing import Link, alpha_beta

    size = size or ranks.size
    if not 2 <= size <= ranks.size:
        raise ValueError(
            f"an all-reduce among {size} of {ranks.size} ranks: take 2 or more of them"
        )
    times = ranks.run(_all_reduce_times, size, tuple(values), repeats)[0]
    sizes = [4 * count for count in values]
    alpha, beta = alpha_beta(sizes, times)
    return Link(alpha, max(beta, 1e-13), tuple(sizes), tuple(times))


def _all_reduce_times(size, values, repeats):
    """Run on every rank; rank 0 returns the median seconds of each message."""
    import torch
    import torch.distributed as dist

    group = dist.new_group(list(range(size)))
    times = []
    if dist.get_rank() < size:
        for count in values:
            tensor, took = torch.ones(count), []
            for _ in range(repeats + 2):  # the first two warm up the connection
                dist.barrier(group)
                begin = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                took.append(time.perf_counter() - begin)
            times.append(statistics.median(took[2:]))
        dist.destroy_process_group(group)
    return times


def _speeds(size, shape, count):
    """Run on every rank, and the first `size` work: (bytes/s of `count` matrices of `shape`
    (inputs, outputs) times one row, seconds of the smallest product, FLOP/s); the others: None."""
    import torch
    import torch.distributed as dist

    from utils.measure.timing import matmul_flops, seconds

    working = dist.get_rank() < size
    found = None
    dist.barrier()
    if working:
        weights = [torch.randn(shape[1], shape[0]) for _ in range(count)]
        row, tiny = torch.randn(1, shape[0]), (torch.randn(1, 8), torch.randn(8, 8))
        with torch.inference_mode():
            launch = seconds(lambda: torch.nn.functional.linear(*tiny))
            took = seconds(lambda: [torch.nn.functional.linear(row, one) for one in weights])
        moved = 4 * count * shape[0] * shape[1]
        rate = moved / max(took - count * launch, 0.1 * took)
        found = rate, launch, matmul_flops(256, repeats=3)
    dist.barrier()
    return found
