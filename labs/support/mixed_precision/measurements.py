"""Given: what the figures of lab 03 show, of your answers and of those that they are beside."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.course.assertions import a_number
from utils.course.runner import Trial, fractions

# the scale is far too large at first, so that steps are skipped
OPTIONS = {"init_scale": 2.0**22, "growth_interval": 3}
WIDTH, LR, MOVE = 512, 0.5, 1e-3  # a move of 1e-3 is an eighth of bf16's step above 1


def fp16_run(file: str | Path, steps: int = 30, **options) -> tuple[list[float], list[bool]]:
    """The scales and the skipped steps of a run with your scaler on 2 ranks."""
    options = OPTIONS | {"growth_interval": 5} | options
    rows = Trial(file).on_ranks(2, _fp16, options, steps)[0]
    return [row["scale"] for row in rows], [not row["stepped"] for row in rows]


def _fp16(answer: Any, options: dict, steps: int) -> list[dict]:
    return train(answer.LossScaler(**options), None, 0, steps)


def walk(file: str | Path, steps: int = 400, move: float = MOVE) -> list[float]:
    """The mean of 512 bf16 weights that start at 1 and should rise by `move` in each step."""
    return Trial(file).alone("a walk", _walk, steps, move)


def _walk(answer: Any, steps: int, move: float) -> list[float]:
    weight, means = torch.nn.Parameter(torch.ones(WIDTH).bfloat16()), [1.0]
    for step in range(steps):
        weight.grad = torch.full_like(weight, -move / LR)
        answer.sgd_step([weight], LR, step, 0)
        means.append(weight.detach().float().mean().item())
    return means


def nearest(steps: int) -> float:
    """Where a bf16 weight of 1 ends after so many updates of MOVE, rounded to the nearest."""
    weight = torch.ones(1).bfloat16()
    for _ in range(steps):
        weight += MOVE
    return weight.item()


class GradScaler:
    """torch.amp.GradScaler with the names of the exercise."""

    def __init__(self, **options: float):
        self.scaler = torch.amp.GradScaler("cpu", **options)
        self.scale_loss = self.scaler.scale

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> bool:
        parameters = optimizer.param_groups[0]["params"]
        good = all(p.grad.isfinite().all() for p in parameters)
        self.scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        return good


def train(scaler: Any, clip: float | None, seed: int, steps: int) -> list[dict]:
    """On a rank: DDP in fp16 with a scaler; of each step the scale, "stepped" and the weights."""
    rank, rows = dist.get_rank(), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x, y = fractions(seed + 10 * step + rank, 4, 9).float().split([6, 3], 1)
        with torch.autocast("cpu", torch.float16):
            out = parallel(x)
        loss = (out.float() - y).square().mean()
        row = {"scale": a_number(f"step {step + 1}", "the scale", scaler.scale)}
        scaler.scale_loss(loss).backward()
        row["stepped"] = bool(scaler.step(optimizer, clip))
        optimizer.zero_grad()
        row["weights"] = torch.cat([p.detach().flatten() for p in model.parameters()])
        rows.append(row)
    return rows
