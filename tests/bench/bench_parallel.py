"""Step time and peak memory of each mix of --dp, --pp and --tp: ours, torch's, DeepSpeed's.

    python -m tests.bench.bench_parallel                    every mix, on up to 8 ranks
    python -m tests.bench.bench_parallel --only "pp 2"      those whose names begin with it
    python -m tests.bench.bench_parallel --store result.json

All contenders of a mix train the same model (ours) on the same rows with AdamW; they take turns on
the same ranks, in a new order each round, and ratios are taken within a round, so other load
affects all alike. Time and memory are measured in different steps, because counting costs time.
Memory is the highest peak of any rank, by `utils.measure.memory`. Mixes that a contender lacks are
named as absent. With more ranks than cores, the time is that of the work and messages of all ranks,
not of a pipeline that runs in parallel.
"""

import argparse
from dataclasses import replace

import torch.distributed as dist

from tests.bench.bench_memory import HEAD, describe, in_turn, show, store, this_device
from tests.bench.bench_memory import summary as summary_of
from tests.bench.memory_contenders import CONTENDERS
from tests.bench.parallel_contenders import contender
from utils.data import corpus
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
}


# ---- the measurement, on every rank


def compare(config, rounds):
    """Measure each contender with `in_turn`."""
    device, mesh = this_device(), make_mesh(**config.mesh_sizes(dist.get_world_size()))
    x, y = corpus.batch(corpus.load(), 0, config.batch, config.seq, 0, mesh.dp.index, mesh.dp.size)

    def build(name):
        return contender(name, config, device, mesh)

    return in_turn(CONTENDERS, build, x.to(device), y.to(device), device, rounds)


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
    )
    rows = {}
    print(f"{describe(base)}; {chosen.rounds} rounds")
    print(HEAD)
    for name, way in MIXES.items():
        if not name.startswith(chosen.only):
            continue
        config = replace(base, **way)
        with Ranks(config.dp * config.pp * config.tp, timeout=300) as pool:
            by_rank = pool.run(compare, config, chosen.rounds)
        rows[name] = {who: summary_of(who, by_rank, base) for who in CONTENDERS}
        show(name, rows[name])
    if chosen.store:
        store(chosen, "mixes", rows)


if __name__ == "__main__":
    main()
