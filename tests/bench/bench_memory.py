"""Step time and peak memory of each way to save memory: ours, plain PyTorch's, DeepSpeed's.

    python -m tests.bench.bench_memory                      every technique, on 2 ranks
    python -m tests.bench.bench_memory --only shard         those whose names begin with it
    python -m tests.bench.bench_memory --large              1.3 billion parameters, on GPUs only
    python -m tests.bench.bench_memory --store result.json

All contenders of a technique train the same model (ours) on the same rows with AdamW and clipping;
they take turns on the same ranks, in a new order each round, and ratios are taken within a round,
so other load affects all alike. Time and memory are measured in different steps, because counting
costs time. Memory is the highest peak of any rank, by `utils.measure.memory`: tensors on the
device, not what is in files or in another memory. Techniques that a contender lacks are named as
absent.

`--large` times the steps of each technique in turn with `utils.train`'s engine, each in its own
processes; it gives tokens per second, MFU (by GPTConfig.flops_per_token) and the peak of the
device's allocator. `make gpu` stores the same rows.
"""

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.bench.bench_train import peak_of
from tests.bench.memory_contenders import CONTENDERS, Absent, contender
from utils.data import corpus
from utils.measure.memory import Memory
from utils.ranks import Ranks
from utils.training.train import TrainConfig

TECHNIQUES = {
    "data parallel": {},
    "accumulate 4": {"accumulate": 4},
    "bf16": {"precision": "bf16"},
    "recompute full": {"recompute": "full"},
    "recompute selective": {"recompute": "selective"},
    "offload activations": {"offload": "activations"},
    "offload optimizer": {"offload": "optimizer", "shard": "1"},
    "shard 1": {"shard": "1"},
    "shard 2": {"shard": "2"},
    "shard 3": {"shard": "3"},
    "shard 3, accumulate 4": {"shard": "3", "accumulate": 4},
    "shard 3, offload parameters": {"shard": "3", "offload": "parameters"},
}
# for a model that fits on a GPU with any technique; each row adds to bf16
LARGE = {
    "none (fp32)": {},
    "bf16": {"precision": "bf16"},
    "compile": {"precision": "bf16", "compile": True},
    "recompute full": {"precision": "bf16", "recompute": "full"},
    "recompute selective": {"precision": "bf16", "recompute": "selective"},
    "shard 1": {"precision": "bf16", "shard": "1"},
    "shard 3": {"precision": "bf16", "shard": "3"},
    "offload activations": {"precision": "bf16", "offload": "activations"},
    "offload optimizer": {"precision": "bf16", "offload": "optimizer"},
    "shard 3, offload parameters": {"precision": "bf16", "shard": "3", "offload": "parameters"},
    "shard 3, recompute full": {"precision": "bf16", "shard": "3", "recompute": "full"},
}


# ---- the measurement, on every rank


def compare(config, rounds):
    """Measure each contender with `in_turn`."""
    device = this_device()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = corpus.batch(corpus.load(), 0, config.batch, config.seq, 0, rank, ranks)

    def build(name):
        return contender(name, config, device)

    return in_turn(CONTENDERS, build, x.to(device), y.to(device), device, rounds)


def in_turn(names, build, x, y, device, rounds):
    """Return {contender: {"seconds": [per round], "peak": bytes, "kinds": {…}} or {"absent": why}}.

    build   name -> (step, model, optimizer), where step(x, y) takes one training step; raises
            Absent or ValueError with the reason if there is none
    """
    steps, held, result = {}, {}, {}
    for name in names:
        try:
            steps[name], *held[name] = build(name)
            result[name] = {"seconds": []}
        except (Absent, ValueError) as reason:
            result[name] = {"absent": str(reason)}
    for number in range(rounds + 2):  # the first two only warm up
        for name in random.Random(number).sample(sorted(steps), len(steps)):
            elapsed = timed(steps[name], x, y, device)
            if number > 1:
                result[name]["seconds"].append(elapsed)
    for name, step in steps.items():
        model, optimizer = held[name]
        with Memory(model=model, optimizer=optimizer, device=device) as memory:
            step(x, y)
        result[name].update(peak=memory.peak_bytes, kinds=memory.peak)
    del steps, held
    gc.collect()
    return result


def this_device():
    """This rank's GPU if the process group uses NCCL, else the CPU."""
    if "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timed(step, x, y, device):
    """Seconds of one step, with a barrier of all ranks before and after it."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    dist.barrier()
    synchronize()
    began = time.perf_counter()
    step(x, y)
    synchronize()
    dist.barrier()
    return time.perf_counter() - began


def large_step(config, steps):
    """Return (seconds per step, the allocator's peak bytes) of our engine on this rank."""
    device = this_device()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step, *_ = contender("ours", config, device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, y = corpus.batch(corpus.load(), 0, config.batch, config.seq, 0, rank, ranks)
    x, y = x.to(device), y.to(device)
    times = [timed(step, x, y, device) for _ in range(steps + 2)][2:]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return statistics.median(times), peak


# ---- the tables


def table(sizes):
    """Run and print every technique; return what `--store` writes."""
    chosen = {name: way for name, way in TECHNIQUES.items() if name.startswith(sizes.only)}
    base = TrainConfig(
        layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads, vocab=sizes.vocab,
        batch=sizes.batch or 16, seq=sizes.seq, optimizer="adamw", steps=1,
    )
    rows = {}
    with Ranks(sizes.ranks, timeout=300) as pool:
        print(f"{pool!r}; {describe(base)}; {sizes.rounds} rounds")
        print(HEAD)
        for name, way in chosen.items():
            by_rank = pool.run(compare, replace(base, **way), sizes.rounds)
            rows[name] = {who: summary(who, by_rank, base) for who in CONTENDERS}
            show(name, rows[name])
    return rows


def describe(config):
    count = config.model_config().parameter_count()
    return (
        f"{count / 1e6:,.1f} M parameters, layers {config.layers}, hidden {config.hidden}, batch "
        f"{config.batch} x {config.seq}"
    )


def summary(who, by_rank, config):
    """One contender's figures. Ratios are ours to theirs, within a round: above 1 in speed and
    below 1 in memory, ours is better."""
    mine = by_rank[0][who]
    if "absent" in mine:
        return mine
    ours = by_rank[0]["ours"]
    ratios = [theirs / own for theirs, own in zip(mine["seconds"], ours["seconds"])]
    peak, our_peak = (max(rank[name]["peak"] for rank in by_rank) for name in (who, "ours"))
    return {
        "tokens_per_s": config.batch * config.seq / statistics.median(mine["seconds"]),
        "speed": statistics.quantiles(ratios, n=4),
        "peak": peak,
        "memory": our_peak / peak,
        "kinds": mine["kinds"],
    }


HEAD = f"{'':39} {'tokens/s':>9} {'ours/theirs: speed':>24} {'peak MiB':>9} {'memory':>7}"


def show(name, rows):
    for who, row in rows.items():
        print(f"{name if who == 'ours' else '':28} {who:10} {line(row)}", flush=True)


def store(chosen, what, rows):
    """Write the figures and the options and device of the measurement as JSON."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    record = {"device": where, "options": vars(chosen), what: rows}
    with open(chosen.store, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)
        file.write("\n")


def line(row):
    if "absent" in row:
        return f"absent: {row['absent']}"
    low, middle, high = row["speed"]
    speed = f"{middle:.2f} ({low:.2f}, {high:.2f})"
    return (
        f"{row['tokens_per_s']:9,.0f} {speed:>24} {row['peak'] / 2**20:9.1f} {row['memory']:7.2f}"
    )


def large_config(batch):
    """The training of 1.3 billion parameters, with `batch` sequences per step over all ranks."""
    return TrainConfig(
        layers=24, hidden=2048, heads=16, vocab=32768, batch=batch, seq=2048, optimizer="adamw",
        steps=1,
    )


def large_row(config, ranks, rounds, peak, device="cuda"):
    """Return {"tokens_per_s", "mfu", "peak"} of one technique, or {"absent": reason}.

    peak   bf16 FLOP/s of a device; None if unknown, and then the MFU is None too
    """
    with Ranks(ranks, device=device, timeout=600) as pool:
        try:
            by_rank = pool.run(large_step, config, rounds)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return {"absent": "does not fit"}
    rate = config.batch * config.seq / by_rank[0][0]
    flops = rate * config.model_config().flops_per_token(config.seq)
    return {
        "tokens_per_s": rate,
        "mfu": flops / (ranks * peak) if peak else None,
        "peak": max(most for _, most in by_rank),
    }


def large_table(sizes):
    """Measure 1.3 billion parameters on all GPUs, one technique at a time."""
    ranks, device = torch.cuda.device_count(), torch.cuda.get_device_name()
    base = large_config((sizes.batch or 8) * ranks)
    peak = sizes.peak or peak_of(device)
    print(f"{ranks} x {device}; {describe(base)}; {sizes.rounds} steps")
    print(f"{'':28} {'tokens/s':>10} {'MFU':>6} {'peak GiB':>9}")
    rows = {}
    for name, way in LARGE.items():
        if not name.startswith(sizes.only):
            continue
        row = rows[name] = large_row(replace(base, **way), ranks, sizes.rounds, peak)
        if "absent" in row:
            print(f"{name:28} {row['absent']}")
            continue
        used = f"{row['mfu']:6.1%}" if peak else f"{'–':>6}"
        print(f"{name:28} {row['tokens_per_s']:10,.0f} {used} {row['peak'] / 2**30:9.1f}")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--large", action="store_true", help="1.3 billion parameters on GPUs")
    parser.add_argument("--only", default="", help="techniques whose names begin so")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() if gpu else 2)
    parser.add_argument("--batch", type=int, help="default: 16; with --large 8 on every GPU")
    sizes = {"layers": 4, "hidden": 256, "heads": 4, "seq": 128, "vocab": 256}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peak", type=float, help="a device's bf16 FLOP/s, for MFU")
    parser.add_argument("--store", help="write the figures to this JSON file")
    chosen = parser.parse_args()
    if chosen.large and not gpu:
        parser.error("--large needs a GPU, and torch sees none here")
    rows = large_table(chosen) if chosen.large else table(chosen)
    if chosen.store:
        store(chosen, "techniques", rows)


if __name__ == "__main__":
    main()
