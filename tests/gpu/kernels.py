"""AdamW and RMSNorm: how near to the speed of a copy, beside their peers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from tests.bench.bench_memory import large_config
from tests.gpu.child import tried
from tests.gpu.machine import device
from utils.measure import timing
from utils.models.gpt import GPT

RATES = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}

# ---- 1. AdamW: each of `STEPS` makes a function that does a step on all tensors


def torchs(**how: bool) -> Callable:
    return lambda tensors: torch.optim.AdamW(tensors, **RATES, **how).step


def compiled(tensors: list) -> Callable:
    return torch.compile(torch.optim.AdamW(tensors, **RATES, foreach=True).step)


def ours(tensors: list, **how: bool) -> Callable:
    from utils.kernels import AdamWTriton

    return AdamWTriton(tensors, **RATES, **how).step


def apexs(tensors: list) -> Callable:
    from apex.optimizers import FusedAdam

    return FusedAdam(tensors, **RATES, adam_w_mode=True).step


STEPS = {  # name: (what makes the step, type of the weights, bytes that a parameter costs at least)
    "torch, fused": (torchs(fused=True), torch.float32, 28),
    "AdamWTriton": (ours, torch.float32, 28),
    "AdamWTriton, bf16 and master": (ours, torch.bfloat16, 28),
    "AdamWTriton, bf16, stochastic": (
        partial(ours, stochastic_rounding=True), torch.bfloat16, 22,
    ),
    "torch, foreach": (torchs(foreach=True), torch.float32, 28),
    "torch, a loop": (torchs(foreach=False), torch.float32, 28),
    "torch, compiled": (compiled, torch.float32, 28),
    "apex FusedAdam": (apexs, torch.float32, 28),
}


def shapes(rehearse: bool) -> list[torch.Size]:
    """Of the parameters of the 1.3 B model with as many layers as a billion and the memory hold:
    weights, gradients, two moments, and the two copies that foreach makes."""
    if rehearse:
        return [torch.Size((64, 100)), torch.Size((100,))]
    free, _ = torch.cuda.mem_get_info()
    config = large_config(1)
    while config.model_config().parameter_count() > min(1e9, 0.9 * free / (6 * 4)):
        config = replace(config, layers=config.layers - 1)
    return [one.shape for one in GPT.without_memory(config.model_config()).parameters()]


def adamw(rehearse: bool) -> Iterator[tuple[str, dict]]:
    where, sizes = device(rehearse), shapes(rehearse)
    count = sum(size.numel() for size in sizes)
    copy = timing.memory_bandwidth(where, 2**22 if rehearse else 2**32)
    yield "copy", {"bytes_per_s": copy}
    yield "model", {"parameters": count, "tensors": len(sizes)}
    fused = None
    for name, (make, dtype, least) in STEPS.items():
        row = tried(seconds_of_a_step, make, sizes, dtype, where)
        if "seconds" in row:
            fused = fused or row["seconds"]  # the first one
            rate = least * count / row["seconds"]
            row |= {"bytes_per_s": rate, "of_copy": rate / copy}
            row["of_fused"] = fused / row["seconds"]
        yield name, row


def seconds_of_a_step(make: Callable, sizes: list, dtype: torch.dtype, where: torch.device) -> dict:
    tensors = [torch.zeros(size, dtype=dtype, device=where) for size in sizes]
    for tensor in tensors:
        tensor.requires_grad_().grad = torch.randn_like(tensor)
    step = make(tensors)
    step()
    return {"seconds": timing.seconds(step, repeats=9)}


# ---- 2. RMSNorm, forward and backward: reads x, writes y; reads x and dy, writes dx


def triton_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from utils.kernels import rms_norm

    return rms_norm(x, weight)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def liger_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, 1e-5, in_place=False)


NORMS = {
    "torch": torch_norm,
    "utils.kernels": triton_norm,
    "torch, compiled": torch.compile(torch_norm),
    "Liger": liger_norm,
}


def rms_norm(rehearse: bool) -> Iterator[tuple[str, dict]]:
    where = device(rehearse)
    rows, width = (4, 64) if rehearse else (16384, 4096)
    copy = timing.memory_bandwidth(where, 2**22 if rehearse else 2**32)
    for dtype in (torch.bfloat16, torch.float32):
        x, dy = (torch.randn(rows, width, device=where, dtype=dtype) for _ in range(2))
        weight = torch.ones(width, device=where, dtype=dtype, requires_grad=True)
        least = 5 * x.nbytes
        for name, norm in NORMS.items():
            row = tried(seconds_of_a_norm, norm, x.requires_grad_(), weight, dy)
            if "seconds" in row:
                row["bytes_per_s"] = least / row["seconds"]
                row["of_copy"] = row["bytes_per_s"] / copy
            yield f"{name}, {str(dtype).removeprefix('torch.')}", row


def seconds_of_a_norm(norm: Callable, x: torch.Tensor, weight: torch.Tensor, dy) -> dict:
    def both():
        return torch.autograd.grad(norm(x, weight), (x, weight), dy)

    return {"seconds": timing.seconds(both, repeats=9)}
