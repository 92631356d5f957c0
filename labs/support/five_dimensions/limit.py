"""Given: a run whose ranks may hold only CAP bytes, and the planner's predictions for it.

planned(recompute="full").memory        # {kind: bytes} on a rank, before any run
attempt(recompute="full")               # run on RANKS real ranks under the cap; print how it ends
table()                                 # the measurements of the last check of exercise f

The cap is that of `utils.measure.memory`: it counts tensors, so it is the same on every machine. On
a GPU `torch.cuda.set_per_process_memory_fraction` makes the allocator itself refuse.
"""

import gc
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from utils.course.assertions import Wrong
from utils.course.runner import Trial
from utils.data import corpus
from utils.measure import traces
from utils.measure.memory import Memory
from utils.measure.profile import tracing
from utils.parallel.mesh import Mesh, make_mesh
from utils.planner import MACHINES, Model, Plan, Strategy, plan
from utils.ranks import RankError, Ranks
from utils.training.config import TrainConfig, check_ranks
from utils.training.train import micro_batches, start

RANKS, CAP = 2, 24_000_000
RUN = TrainConfig(layers=4, hidden=192, heads=4, batch=16, seq=64, steps=4, optimizer="adamw")
OPTIONS = (  # those that leave the result unchanged
    "accumulate", "precision", "recompute", "shard", "offload", "tp", "sequence_parallel", "pp",
    "cp", "context",
)
SIZES = ("layers", "hidden", "heads", "kv_heads", "tie")  # those of the model
WATCHED = 2  # steps; the optimizer has its state from the second on
SECONDS = 60.0  # of CPU time per run, which takes a few


class Measured(NamedTuple):
    """A rank's bytes by kind at the peak, losses by step, tokens/s, and a step's time by kind."""

    held: dict[str, int]
    losses: tuple[float, ...]
    speed: float
    split: traces.Split

    @property
    def peak(self) -> int:
        return sum(self.held.values())


class Rung(NamedTuple):
    """One row of the table."""

    flags: dict[str, Any]
    predicted: float  # MB
    measured: Measured  # on the fullest rank

    @property
    def words(self) -> str:
        return " · ".join(f"{name} {value}" for name, value in self.flags.items()) or "plain"


rows: list[Rung] = []  # from the last check


def configured(flags: dict[str, Any], **sizes: Any) -> TrainConfig:
    """The run with these options of the trainer. Raises ValueError for any others."""
    for given, known in ((flags, OPTIONS), (sizes, SIZES)):
        for name in given:
            if name not in known:
                raise ValueError(f"{name} is not one of the options {', '.join(known)}")
    config = replace(RUN, **flags, **sizes)
    if config.precision not in ("fp32", "bf16"):
        raise ValueError(f"precision {config.precision} is not fp32 or bf16")
    split = config.tp * config.pp * config.cp
    if split not in (1, RANKS):
        raise ValueError(f"tp · pp · cp = {split}, but there are {RANKS} ranks")
    check_ranks(config, RANKS)
    return config


def planned(**flags: Any) -> Plan:
    """The planner's prediction for the run with these options of the trainer."""
    config = configured(flags)
    if "activations" in config.offloads():
        raise ValueError("the planner cannot offload activations: predict this rung yourself")
    mesh = config.mesh_sizes(RANKS)
    strategy = Strategy(
        **{axis: mesh[axis] for axis in ("dp", "pp", "cp", "tp")},
        micro_batch=math.ceil(config.batch / mesh["dp"] / config.accumulation_steps()),
        global_batch=config.batch,
        recompute=config.recompute,
        zero=config.zero_stage(),
        sequence_parallel=config.sequence_parallel,
        context=config.context,
        offload="optimizer" if "optimizer" in config.offloads() else "none",
        precision="mixed" if config.precision == "bf16" else "fp32",
        software="eager",
    )
    return plan(Model.of(config.model_config(), config.seq), strategy, MACHINES["laptop"])


def attempt(**flags: Any) -> None:
    """Print how the run ends under the cap."""
    config = configured(flags)
    with Ranks(RANKS, device="cpu", timeout=10) as ranks:  # seconds to wait for a failed rank
        try:
            found = ranks.run(train, None, config, CAP)
        except RankError as error:
            ended = [one.message for one in error.failures.values() if one.kind == "MemoryError"]
            if not ended:
                raise
            print(f"out of memory: a rank {ended[0]}")
        else:
            print(f"it fits: {max(one.peak for one in found) / 1e6:.1f} MB on the fullest rank")


def largest(file: str | Path) -> float | None:
    """Millions of parameters of `largest_model`'s model if it trains under the cap; otherwise print
    the reason and return None."""
    try:
        sizes, flags = Trial(file).alone("largest_model", lambda answer: answer.largest_model())
        config = configured(flags, **sizes)
        with Trial(file).ranks(RANKS) as group:
            group.run("largest_model", train, config, CAP, seconds=SECONDS)
    except NotImplementedError:
        print("largest_model is not written yet.")
    except (Wrong, ValueError) as error:
        print(error)
    else:
        return config.model_config().parameter_count() / 1e6


def table() -> None:
    """Print the rungs of the last check."""
    if not rows:
        print("Run the check first.")
        return
    plain = rows[0].measured
    print(f"{'MB: predicted':>13}{'measured':>10}{'tokens/s':>10}{'of plain':>10}{'loss':>9}")
    for rung in rows:
        found = rung.measured
        print(
            f"{rung.predicted:>13.1f}{found.peak / 1e6:>10.1f}{found.speed:>10,.0f}"
            f"{found.speed / plain.speed:>10.0%}{found.losses[-1]:>9.4f}  {rung.words}"
        )
    kinds = [kind for kind in traces.KINDS if kind != "data"]  # no run has a data loader
    print("\nms per step:" + "".join(f"{kind:>14}" for kind in kinds))
    for rung in rows:
        ms = "".join(f"{getattr(rung.measured.split, kind):>14.0f}" for kind in kinds)
        print(f"{'':<12}{ms}  {rung.words}")


# ---- on a rank


def train(answer: Any, config: TrainConfig, cap: float = math.inf) -> Measured:
    """Take the trainer's steps: the first WATCHED under the memory meter, which stops them at
    `cap`; then, because the meter takes time, one that is only timed and one under the profiler."""
    mesh = make_mesh(**config.mesh_sizes(dist.get_world_size()))
    engine, _ = start(config, torch.device("cpu"), mesh)
    text, taken = corpus.split(corpus.load())[0], []
    gc.collect()
    with Memory(nn.ModuleList(engine.ranks.stages), engine.optimizer, limit=cap) as memory:
        for number in range(WATCHED):
            taken.append(step(engine, config, mesh, text, number))
    with tempfile.TemporaryDirectory() as folder:
        with tracing(folder, steps=config.steps - WATCHED - 1, skip=1) as profiler:
            for number in range(WATCHED, config.steps):
                taken.append(step(engine, config, mesh, text, number))
                profiler.step()
        split = traces.split(*traces.read(folder))
    del engine  # before its process groups, as in the trainer
    gc.collect()
    mesh.close()
    losses, seconds = zip(*taken)
    speed = config.batch * config.seq / min(seconds[WATCHED:])
    return Measured(memory.peak, losses, speed, split)


def step(
    engine: Any, config: TrainConfig, mesh: Mesh, text: torch.Tensor, number: int
) -> tuple[float, float]:
    """Take one step; return its loss and its seconds."""
    began, tokens = time.perf_counter(), config.batch * config.seq
    x, y = corpus.batch(
        text, number, config.batch, config.seq, config.seed, mesh.dp.index, mesh.dp.size
    )
    parts = micro_batches(x, y, config.accumulation_steps())
    loss = torch.tensor(float(engine.backward(parts, tokens)), dtype=torch.float64)
    engine.step(config.clip)
    dist.all_reduce(loss)
    return loss.item() / tokens, time.perf_counter() - began
