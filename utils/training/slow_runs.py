"""Small training runs, each slow for one planted reason: the cases of lesson 11.

    ranks.run(slow_runs.train, "traces", "C")    # on two ranks: five steps, three of them traced
    report("traces").findings                    # what utils.measure.findings says about it

`CAUSES` says why each run is slow: guess first. "sound" is the same run with nothing planted. The
work is real, a small GPT on random tokens; only the data set of one run sleeps, to simulate a disk.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from utils.measure import profile
from utils.measure.machine import cores
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, cross_entropy
from utils.parallel.mesh import make_mesh
from utils.parallel.pipeline import Pipeline
from utils.parallel.stages import make_stages

CAUSES = {  # {run: the kind of finding that names its cause}
    "A": "small collectives",
    "B": "straggler",
    "C": "threads",
    "D": "wait",
    "E": "data",
    "F": "stages",
}
CONFIG = GPTConfig(hidden_size=128, layers=4, heads=4)
ROWS, SEQ = 8, 64  # rows of a rank's batch, tokens per row


class Rows(Dataset):
    """Rows of random tokens; fetching each takes `seconds`."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        generator = torch.Generator().manual_seed(index)
        return torch.randint(CONFIG.vocab_size, (SEQ + 1,), generator=generator)


def train(folder: str | Path, run: str = "sound", *, steps: int = 3, stacks: bool = False) -> None:
    """Train on both ranks of a group of two: two steps, then `steps` steps under the profiler.

    Writes a trace per rank to `folder`. Raises ValueError for an unknown run.
    """
    usual = torch.get_num_threads()
    try:
        step = make_step(run)
        with profile.tracing(folder, steps=steps, stacks=stacks) as profiler:
            for _ in range(steps + 2):
                step()
                profiler.step()
    finally:
        torch.set_num_threads(usual)


def make_step(run: str = "sound") -> Callable[[], None]:
    """The function that takes a step of this run; every rank calls it. Raises ValueError."""
    if run not in (*CAUSES, "sound"):
        raise ValueError(f"run {run!r} is not one of sound, {', '.join(CAUSES)}")
    torch.manual_seed(0)
    return _pipeline() if run == "F" else _data_parallel(run)


def _data_parallel(run):
    rank, model = dist.get_rank(), GPT(CONFIG)
    parallel = model if run == "A" else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = _batches(run, rank)
    if run == "C":
        torch.set_num_threads(4 * int(cores()))

    def step():
        if run == "D":
            _in_turn(parallel, next(batches), rank)
        else:
            _backward(parallel, next(batches))
        if run == "A":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _batches(run, rank) -> Iterator[torch.Tensor]:
    rows = 3 * ROWS if (run, rank) == ("B", 1) else ROWS
    return iter(DataLoader(Rows(0.02 if run == "E" else 0.0), batch_size=rows))


def _backward(model, rows):
    loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:])
    loss.backward()
    return loss.detach()


def _in_turn(model, rows, rank):
    """Four micro-batches, alternately long and short: every rank does the same work in total."""
    sizes = (ROWS // 8, 3 * ROWS // 8) * 2
    for number, part in enumerate(rows.split(sizes if rank else sizes[::-1])):
        model.require_backward_grad_sync = number == 3  # as no_sync() sets it
        loss = _backward(model, part)
        mean = functional.all_reduce(loss, "avg", dist.group.WORLD)
        mean.item()  # for the log


def _pipeline():
    mesh = make_mesh(pp=dist.get_world_size())
    model = GPT(replace(CONFIG, layers=6))
    [stage] = make_stages(model, mesh.pp, layers=[range(1), range(1, 6)])
    pipeline = Pipeline([stage], mesh.pp, "1f1b", cross_entropy)
    optimizer = torch.optim.AdamW(stage.parameters(), fused=True)
    batches = iter(DataLoader(Rows(), batch_size=ROWS))

    def step():
        rows = next(batches)
        pipeline.run([(part[:, :-1], part[:, 1:]) for part in rows.chunk(8)])
        optimizer.step()
        optimizer.zero_grad()

    return step
