"""The trainer on GPUs: every technique gives the plain run's losses; memory and speed."""

import statistics
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import torch

from tests.bench.bench_context import rows_of
from tests.bench.bench_memory import LARGE, large_config, large_row, this_device
from tests.bench.bench_train import peak_of
from tests.bench.memory_contenders import contender
from tests.gpu.child import tried
from utils.data import corpus
from utils.measure.memory import Memory
from utils.parallel.context import WAYS as WAYS_OF_CONTEXT
from utils.planner import MACHINES, Model, Strategy, plan
from utils.ranks import Ranks
from utils.ranks.launch import launch
from utils.training.config import TrainConfig

# ---- 1. losses: `utils.train` by torchrun, against fp32 on one rank

WAYS = {
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "accumulate 4": "--accumulate 4",
    "recompute full": "--recompute full",
    "recompute selective": "--recompute selective",
    "adamw-triton": "--optimizer adamw-triton",
}
OFFLOADED = {
    "offload activations": "--offload activations",
    "offload optimizer": "--offload optimizer",
    "shard 3, offload parameters": "--shard 3 --offload parameters",
    "deepspeed, shard 2": "--engine deepspeed --shard 2",
}
COMPILED = {"compile": "--compile", "bf16, compile": "--precision bf16 --compile"}
SPLITS = {  # on two ranks
    "dp": "",
    "dp, bf16": "--precision bf16",
    "shard 1": "--shard 1",
    "shard 3": "--shard 3",
    "shard 3, bf16, recompute full": "--shard 3 --precision bf16 --recompute full",
    "tp": "--tp 2",
    "tp, sequence parallel": "--tp 2 --sequence-parallel",
    "pp": "--pp 2 --micro-batches 4",
    "pp, zero-bubble": "--pp 2 --micro-batches 4 --schedule zero-bubble",
    "cp, ring": "--cp 2",
    "cp, ring, bf16": "--cp 2 --precision bf16",  # uses another kernel
    "cp, gather": "--cp 2 --context gather",
    "cp, ulysses, shard 3": "--cp 2 --context ulysses --shard 3",
}
SKIPPED_FIRST = 2  # steps of compilation and warm-up
# tolerated relative difference of losses: other kernels sum in another order
NEAR, NEAR_IN_16_BITS = 1e-3, 5e-2


def trainer(rehearse: bool) -> Iterator[tuple[str, dict]]:
    yield from runs(WAYS, 1, rehearse)


def offload(rehearse: bool) -> Iterator[tuple[str, dict]]:
    yield from runs(OFFLOADED, 1, rehearse)


def compiled(rehearse: bool) -> Iterator[tuple[str, dict]]:
    yield from runs(COMPILED, 1, rehearse)


def nccl(rehearse: bool) -> Iterator[tuple[str, dict]]:
    yield from runs(SPLITS, 2, rehearse)


def sizes_of(rehearse: bool) -> str:
    """The sizes of the model, its batch and the run, as arguments of `utils.train`."""
    sizes = "--layers 4 --hidden 256 --heads 4 --batch 32 --seq 512 --steps 12 --device cuda"
    if rehearse:
        sizes = "--layers 2 --hidden 32 --heads 2 --batch 4 --seq 32 --steps 4 --device cpu"
    return f"{sizes} --optimizer adamw --sample 0"


def runs(ways: dict[str, str], ranks: int, rehearse: bool) -> Iterator[tuple[str, dict]]:
    """The plain run, then each technique."""
    common = f"{sizes_of(rehearse)} --metrics -".split()
    plain = launch("utils.train", ranks=1, args=common, timeout=120)
    yield "plain", {"tokens_per_s": speed(plain), "loss": plain.loss.iloc[-1]}
    for name, words in ways.items():
        missing = [one for one in ("triton", "deepspeed") if one in name and not find_spec(one)]
        if missing:
            yield name, {"absent": f"{missing[0]} is not installed"}
        else:
            yield name, tried(compared, plain, ranks, [*common, *words.split()])


def compared(plain, ranks: int, words: list[str]) -> dict:
    return equal(launch("utils.train", ranks=ranks, args=words, timeout=120), plain, words)


def equal(run, plain, words: list[str]) -> dict:
    """A run's figures; raises ValueError if its losses differ from the plain run's."""
    apart = ((run.loss - plain.loss) / plain.loss).abs().max()
    near = NEAR_IN_16_BITS if {"bf16", "fp16"} & {*words} else NEAR
    if not apart <= near:
        raise ValueError(f"a loss is {apart:.2g} of the plain run's apart, more than {near:g}")
    return {"tokens_per_s": speed(run), "loss": run.loss.iloc[-1], "apart": apart}


def speed(run) -> float:
    return statistics.median(run.tokens_per_s[SKIPPED_FIRST:])


# ---- 2. memory: the planner's bytes against those of a real step

HELD = {
    "none": {},
    "recompute selective": {"recompute": "selective"},
    "recompute full": {"recompute": "full"},
    "offload optimizer": {"offload": "optimizer"},
}


def planned_memory(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """Peak memory of a step in fp32: the tensors', the allocator's, the planner's."""
    base = TrainConfig(
        layers=12, hidden=1024, heads=16, vocab=32768, batch=8, seq=1024, optimizer="adamw", steps=1
    )
    if rehearse:
        base = replace(base, layers=4, hidden=128, heads=4, vocab=256, seq=64)
    model = Model.of(base.model_config(), base.seq)
    with Ranks(1, device="cpu" if rehearse else "cuda", timeout=300) as pool:
        for name, way in HELD.items():
            yield name, tried(measured_and_planned, pool, replace(base, **way), way, model)


def measured_and_planned(pool: Ranks, config: TrainConfig, way: dict, model: Model) -> dict:
    (peaks,) = pool.run(peaks_on_rank, config)
    sizes = {"micro_batch": config.batch, "global_batch": config.batch}
    strategy = Strategy(**sizes, precision="fp32", software="eager", **way)
    planned = plan(model, strategy, MACHINES["dgx-h100"]).memory["total"]
    return {**peaks, "planned": planned, "planned_of_tensors": planned / peaks["tensors"]}


def peaks_on_rank(config: TrainConfig) -> dict:
    """Bytes at the peak of a step on this rank."""
    device = this_device()
    step, model, optimizer = contender("ours", config, device)
    batch = [part.to(device) for part in corpus.batch(corpus.load(), 0, config.batch, config.seq)]
    step(*batch)  # fills the optimizer
    found = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step(*batch)
        found["allocator"] = torch.cuda.max_memory_allocated()
    with Memory(model=model, optimizer=optimizer, device=device) as memory:
        step(*batch)
    return {"tensors": memory.peak_bytes, **found}


# ---- 3. attention over positions split between two GPUs


def context(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """Each method against one GPU, DeepSpeed-Ulysses and torch's context_parallel, in bf16."""
    lengths, kind = ((256,), torch.float32) if rehearse else ((8192, 32768, 131072), torch.bfloat16)
    with Ranks(2, device="cpu" if rehearse else "cuda", timeout=300) as pool:
        for length in lengths:
            for way in WAYS_OF_CONTEXT:
                for name, row in rows_of(pool, way, (length, 32, 8, 128, kind, 5)).items():
                    yield f"{way}, {length}, {name}", row


# ---- 4. MFU: 1.3 billion parameters by technique


def mfu(rehearse: bool) -> Iterator[tuple[str, dict]]:
    yield from large(False, rehearse)


def sharded(rehearse: bool) -> Iterator[tuple[str, dict]]:
    yield from large(True, rehearse)


def large(moved: bool, rehearse: bool) -> Iterator[tuple[str, dict]]:
    """The techniques that shard or offload (`moved`), or the others, on one GPU, with a sequence
    per 16 GiB of memory."""
    if rehearse:
        base = replace(large_config(2), layers=2, hidden=64, heads=2, vocab=256, seq=64)
        peak = None
    else:
        memory = torch.cuda.get_device_properties(0).total_memory
        base = large_config(max(1, min(8, memory >> 34)))
        peak = peak_of(torch.cuda.get_device_name())
    sizes = {"parameters": base.model_config().parameter_count(), "layers": base.layers}
    yield "model", sizes | {"hidden": base.hidden, "batch": base.batch, "seq": base.seq}
    where = "cpu" if rehearse else "cuda"
    for name, way in LARGE.items():
        if bool({"shard", "offload"} & {*way}) == moved:
            yield name, tried(large_row, replace(base, **way), 1, 5, peak, where)
