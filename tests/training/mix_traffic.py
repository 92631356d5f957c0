"""The traffic of a mix's rank 0 in one step, computed from shapes alone."""

import torch

from utils.models.gpt import GPT
from utils.parallel.context.positions import held, positions
from utils.parallel.context.ulysses import heads_of_ranks
from utils.parallel.ddp import named_parameters
from utils.parallel.full_tensor import full_size, split_of
from utils.parallel.mesh import Axis, Mesh
from utils.parallel.parallelize import EMBEDDING, blocks, split_model
from utils.parallel.zero import owners
from utils.shares import share
from utils.training.optimizer import is_block_matrix


def has_formula(config):
    """Recomputation repeats collectives, 16-bit formats change their sizes, and expert loads are
    unknown in advance; test_matrix.py covers ZeRO-2 and 3. Traffic is counted in the second step,
    which must not be the last: that one also evaluates."""
    return (
        config.steps > 2
        and config.recompute == "none"
        and config.precision in ("fp32", "fp64")
        and config.experts is None
        and config.zero_stage() < 2
        and not config.sequence_parallel
        and (config.kv_heads or config.heads) >= config.tp
    )


def traffic_by_formula(config):
    """Return {operation: (calls, payload bytes of rank 0)}."""
    value = 8 if config.precision == "fp64" else 4  # bytes per weight, gradient and hidden value
    stages = stages_of_rank_0(config)
    named, micro_batches = named_parameters(stages), config.accumulation_steps()
    rows = share(config.batch, 0, config.dp)[1]
    places = positions(config.seq, config.cp)
    tokens = rows * held(places[0])  # over all micro-batches
    hidden = value * tokens * config.hidden  # bytes of their hidden states

    reduced = [24]  # the loss, the time, the stop flag
    if config.splits_model() or config.zero_stage():
        reduced.append(value)  # the squared norm
    if config.tp > 1:
        layers = len(blocks(stages))
        ends = 1  # the embedding's forward pass
        if config.pp == 1:
            ends += 1  # lm_head's backward pass
            # the maximum logit; the sum of exponentials and the target's logit
            reduced += per_micro_batch(value * tokens, micro_batches)
            reduced += per_micro_batch(2 * value * tokens, micro_batches)
        for _ in range(4 * layers + ends):
            reduced += per_micro_batch(hidden, micro_batches)
    result = {}
    ranks = config.dp * config.cp  # that split the tokens, and so the state
    if ranks > 1 and config.zero_stage() == 0:
        reduced.append(value * sum(parameter.numel() for parameter in named.values()))
    mine = named
    if config.zero_stage() == 1:
        owner = owners([full_size(parameter) for parameter in named.values()], ranks)
        load = [0] * ranks
        for parameter, place in zip(named.values(), owner):
            load[place] += parameter.numel()
        mine = {name: p for (name, p), place in zip(named.items(), owner) if place == 0}
        if ranks > 1:
            row = value * max(load)
            result = {"reduce_scatter": (1, ranks * row), "all_gather": (1, row)}
    if config.optimizer == "muon" and config.tp > 1:  # gathers whole matrices
        calls, payload = result.get("all_gather", (0, 0))
        for name, parameter in mine.items():
            if is_block_matrix(name, parameter) and split_of(parameter):
                calls, payload = calls + 1, payload + value * parameter.numel()
        result["all_gather"] = (calls, payload)
    if config.pp > 1:
        passes = (
            2 * config.stages_per_rank() - 1
        )  # forward from every stage, backward from all but stage 0
        calls, payload = passes * micro_batches, passes * hidden
        if config.tie:  # the gradient of this stage's copy
            calls, payload = calls + 1, payload + value * named[EMBEDDING].numel()
        result["send"] = (calls, payload)
    result["all_reduce"] = (len(reduced), sum(reduced))
    times = micro_batches * len(blocks(stages))
    for operation, calls, bytes_ in context_traffic(
        config, places, value * rows * config.hidden // config.heads
    ):
        before = result.get(operation, (0, 0))
        result[operation] = (before[0] + calls * times, before[1] + bytes_ * len(blocks(stages)))
    return result


def context_traffic(config, places, head):
    """Return [(operation, calls per layer and micro-batch, bytes per layer)] of cp's rank 0.

    head   bytes per head and position, over all rows
    """
    if config.cp == 1:
        return []
    heads, kv_heads = (n // config.tp for n in (config.heads, config.kv_heads or config.heads))
    sizes = [held(place) for place in places]
    if config.context == "ring":  # keys and values of rank 0, then of the last rank, …
        passed = [2 * kv_heads * head * sizes[-turn] for turn in range(config.cp)]
        return [("send", len(passed) * 3 - 2, 2 * sum(passed[:-1]) + sum(passed))]
    if config.context == "gather":
        own = 2 * kv_heads * head * max(sizes)
        return [("all_gather", 2, 2 * own), ("reduce_scatter", 1, config.cp * own)]
    queries, keys = heads_of_ranks(heads, kv_heads, config.cp)
    to_heads = sizes[0] * (heads + 2 * sum(map(len, keys)))
    whole = sum(sizes) * len(queries[0])  # all positions of this rank's heads
    back = sizes[0] * heads + sum(sizes) * (len(queries[0]) + 2 * len(keys[0]))
    return [("all_to_all", 4, head * (to_heads + whole + back))]


def per_micro_batch(bytes_, count):
    """One call per micro-batch; only the total matters, so it goes to the first."""
    return [bytes_] + [0] * (count - 1)


def stages_of_rank_0(config):
    """Build its stages without memory or other ranks; rank 0's shards are the largest."""
    axes = {name: getattr(config, name) for name in ("pp", "dp", "cp", "tp", "ep")}
    axes["edp"] = config.dp // config.ep
    axes |= {f"{name}_cp": axes[name] * config.cp for name in ("dp", "edp")}
    mesh = Mesh(**{name: Axis(name, tuple(range(size)), 0, None) for name, size in axes.items()})
    model = GPT.without_memory(config.model_config())
    with torch.device("meta"):
        return split_model(model, mesh, config.sequence_parallel, config.stages_per_rank())
