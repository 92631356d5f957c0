"""Given: the data of the figures of lab 03, from your answers and for comparison."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.course.runner import Trial, fractions

WIDTH, LR, MOVE = 512, 0.5, 1e-3  # a move of 1e-3 is an eighth of bf16's step above 1


def fp16_run(file: str | Path, steps: int = 30) -> tuple[list[float], list[bool]]:
    """The scale of each step, and whether it was skipped, in a run with your scaler on 2 ranks. The
    scale starts far too large, so the first steps are skipped."""
    rows = Trial(file).on_ranks(2, _fp16, steps)[0]
    return [scale for scale, _ in rows], [not made for _, made in rows]


def _fp16(answer: Any, steps: int) -> list[tuple[float, bool]]:
    """On a rank: train with DDP in fp16; return each step's scale and whether it was taken."""
    scaler, rows = answer.LossScaler(init_scale=2.0**22, growth_interval=5), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x, y = fractions(10 * step + dist.get_rank(), 4, 9).float().split([6, 3], 1)
        with torch.autocast("cpu", torch.float16):
            out = model(x)
        loss, scale = (out.float() - y).square().mean(), float(scaler.scale)
        scaler.scale_loss(loss).backward()
        rows.append((scale, bool(scaler.step(optimizer))))
        optimizer.zero_grad()
    return rows


def walk(file: str | Path, steps: int = 400, move: float = MOVE) -> list[float]:
    """The mean of 512 bf16 weights that start at 1 and should rise by `move` per step."""
    return Trial(file).alone("a walk", _walk, steps, move)


def _walk(answer: Any, steps: int, move: float) -> list[float]:
    weight, means = torch.nn.Parameter(torch.ones(WIDTH).bfloat16()), [1.0]
    for step in range(steps):
        weight.grad = torch.full_like(weight, -move / LR)
        answer.sgd_step([weight], LR, step, 0)
        means.append(weight.detach().float().mean().item())
    return means


def nearest(steps: int) -> float:
    """The value of a bf16 weight of 1 after `steps` updates by MOVE, each rounded to nearest."""
    weight = torch.ones(1).bfloat16()
    for _ in range(steps):
        weight += MOVE
    return weight.item()
