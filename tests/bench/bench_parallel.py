"""Step time and peak memory of each mix of --dp, --pp and --tp: ours, torch's, DeepSpeed's.

    python -m tests.bench.bench_parallel                    every mix, on up to 8 ranks
    python -m tests.bench.bench_parallel --only "pp 2"      those whose names begin so
    python -m tests.bench.bench_parallel --store result.json

All contenders of a mix train the same model (ours) on the same rows with AdamW; they take turns
inside the same ranks, in a new order each round, and a ratio is taken inside a round, so what else
the machine does hits all alike. Time and memory are measured in different steps, because counting
costs time. Memory is the peak of `utils.measure.memory` on the rank that holds most. What a
contender does not have is named as absent. Where more ranks than cores share a machine, time is
that of the work of all ranks and of their messages, not of a pipeline that runs in parallel.
"""

import argparse
import gc
import json
import random
from dataclasses import replace

import torch
import torch.distributed as dist

from tests.bench.bench_memory import describe, line, this_device, timed
from tests.bench.bench_memory import summary as summary_of
from tests.bench.parallel_contenders import CONTENDERS, Absent, contender
from utils.data import corpus
from utils.measure.memory import Memory
from utils.parallel.mesh import make_mesh
from utils.ranks import Ranks
from utils.training.train import TrainConfig

MIXES = {
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2, "micro_batches": 4},
    "pp 2, interleaved": {"pp": 2, "schedule": "interleaved", "micro_batches": 4},
    "dp 2, shard 3": {"dp": 2, "shard": "3"},
    "dp 2, tp 2, shard 3": {"dp": 2, "tp": 2, "shard": "3"},
    "dp 2, pp 2, shard 1": {"dp": 2, "pp": 2, "shard": "1", "micro_batches": 4},
    "dp 2, pp 2, tp 2, shard 2": {
        "dp": 2, "pp": 2, "tp": 2, "shard": "2", "micro_batches": 4,
    },
}  # fmt: skip


# ---- the measurement, on every rank


def compare(config, rounds):
    """{contender: {"seconds": [per round], "peak": bytes, "kinds": {…}} or {"absent": reason}}."""
    device, mesh = this_device(), make_mesh(**config.mesh_sizes(dist.get_world_size()))
    x, y = corpus.batch(corpus.load(), 0, config.batch, config.seq, 0, mesh.dp.index, mesh.dp.size)
    x, y = x.to(device), y.to(device)
    steps, held, result = {}, {}, {}
    for name in CONTENDERS:
        try:
            steps[name], *held[name] = contender(name, config, device, mesh)
            result[name] = {"seconds": []}
        except (Absent, ValueError) as reason:
            result[name] = {"absent": str(reason)}
    for number in range(rounds + 2):  # two of them only warm up
        for name in random.Random(number).sample(sorted(steps), len(steps)):
            elapsed = timed(steps[name], x, y, device)
            if number > 1:
                result[name]["seconds"].append(elapsed)
    for name, step in steps.items():
        module, optimizer = held[name]
        with Memory(model=module, optimizer=optimizer, device=device) as memory:
            step(x, y)
        result[name].update(peak=memory.peak_bytes, kinds=memory.peak)
    del steps, held
    gc.collect()
    return result


# ---- the table


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="mixes whose names begin so")
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "batch": 16, "seq": 128, "vocab": 256}
    for name, default in {**sizes, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--store", help="write the figures to this JSON file")
    chosen = parser.parse_args()
    base = TrainConfig(
        **{name: getattr(chosen, name) for name in sizes}, dp=1, optimizer="adamw", clip=0.0,
        steps=1,
    )  # fmt: skip
    rows = {}
    print(f"{describe(base)}; {chosen.rounds} rounds")
    print(f"{'':39} {'tokens/s':>9} {'ours/theirs: speed':>24} {'peak MiB':>9} {'memory':>7}")
    for name, way in MIXES.items():
        if not name.startswith(chosen.only):
            continue
        config = replace(base, **way)
        with Ranks(config.dp * config.pp * config.tp, timeout=300) as pool:
            by_rank = pool.run(compare, config, chosen.rounds)
        rows[name] = {who: summary_of(who, by_rank, base) for who in CONTENDERS}
        for who, row in rows[name].items():
            print(f"{name if who == 'ours' else '':28} {who:10} {line(row)}", flush=True)
    if chosen.store:
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        record = {"device": where, "options": vars(chosen), "mixes": rows}
        with open(chosen.store, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
