"""AdamW and RMSNorm: speed relative to a copy, with their peers and variants.

`seconds` is the time of one optimizer step that is waited for, Python and launches included;
`queued_seconds` is the time per step of a queue, where Python may be ahead of the GPU. Norms are
always queued.
"""

import linecache
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import ModuleType

import torch
from torch.nn import functional as F

from tests.bench.bench_memory import large_config
from tests.gpu.child import tried
from tests.gpu.machine import device
from utils.measure import timing
from utils.models.gpt import GPT
from utils.paths import ROOT

RATES = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
QUEUED = 0.1  # seconds of queued calls


def changed(name: str, *changes: tuple[str, str]) -> str:
    """The source of `utils.kernels.<name>` with replacements (old, new), to try variants without
    options in the kernel. Raises ValueError if an old text is missing."""
    text = source(name)
    for old, new in changes:
        if old not in text:
            raise ValueError(f"{old!r} is not in {name}.py any more: bring its variants up to date")
        text = text.replace(old, new)
    return text


def source(name: str) -> str:
    return (ROOT / "utils" / "kernels" / f"{name}.py").read_text()


@cache  # made on demand: Triton may be missing
def module_of(text: str) -> ModuleType:
    file = f"<variant {hash(text)}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file  # Triton reads it there
    module = ModuleType(file)
    exec(compile(text, file, "exec"), module.__dict__)
    return module


# ---- 1. AdamW: each of `STEPS` makes a function that takes a step on all tensors


def torchs(**how: bool) -> Callable:
    return lambda tensors: torch.optim.AdamW(tensors, **RATES, **how).step


def compiled(tensors: list) -> Callable:
    return torch.compile(torch.optim.AdamW(tensors, **RATES, foreach=True).step)


def ours(tensors: list, text: str = "", **how: bool) -> Callable:
    from utils.kernels import adamw

    module = module_of(text) if text else adamw
    return module.AdamWTriton(tensors, **RATES, **how).step


def apexs(tensors: list) -> Callable:
    from apex.optimizers import FusedAdam

    return FusedAdam(tensors, **RATES, adam_w_mode=True).step


STEPS = {  # name: (maker of the step, type of the weights, least bytes per parameter)
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
RULE = "tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps)"
BODY = "    tensor = tl.load(tensor_of"


def in_turns() -> list[tuple[str, str]]:
    """Changes for a persistent grid: 8 programs per SM (132), which process blocks in turn."""
    body = BODY + source("adamw").split(BODY)[1].split("\n\n\n# ----")[0]
    turns = body.replace("tl.program_id(0)", "program").replace("\n    ", "\n        ")
    return [
        (body, f"    for program in range(tl.program_id(0), programs, 1056):\n    {turns}"),
        ("table, hyper, tensor_of, seed,", "table, hyper, tensor_of, seed, programs,"),
        ("                self.seed,", "                self.seed, sum(programs),"),
        ("adamw_many[(sum(programs),)]", "adamw_many[(min(sum(programs), 1056),)]"),
    ]


VARIANTS = {  # of AdamWTriton on fp32
    "blocks of 512": [("BLOCK = 1024", "BLOCK = 512")],
    "blocks of 2048": [("BLOCK = 1024", "BLOCK = 2048")],
    "8 warps": [("WARPS = 4", "WARPS = 8")],
    "blocks of 2048, 8 warps": [("BLOCK = 1024", "BLOCK = 2048"), ("WARPS = 4", "WARPS = 8")],
    "fast divisions": [(RULE, "m / (tl.sqrt(v) / root + eps)")],
    "one exact division": [(RULE, "tl.div_rn(m, tl.sqrt_rn(v) * (1 / root) + eps)")],
    "read once": [("_ptr, mask)", '_ptr, mask, eviction_policy="evict_first")')],
    "a grid that stays": in_turns(),
}


def shapes(rehearse: bool) -> list[torch.Size]:
    """Shapes of the 1.3 B model's parameters, with as many layers as fit into 1e9 parameters and
    into memory (weights, gradients, two moments, and two copies that foreach makes)."""
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
    cases = {name: (*how, sizes) for name, how in STEPS.items()}
    for name, changes in VARIANTS.items():
        make = partial(ours, text=changed("adamw", *changes))
        cases[f"AdamWTriton: {name}"] = make, torch.float32, 28, sizes
    flat = torch.Size((-(-count // 16) * 16,))
    cases["AdamWTriton: one flat tensor"] = ours, torch.float32, 28, [flat]
    fused = None
    for name, (make, dtype, least, given) in cases.items():
        row = tried(seconds_of_a_step, make, given, dtype, where)
        if "seconds" in row:
            fused = fused or row["seconds"]  # the first one
            rate = least * count / row["seconds"]
            row |= {"bytes_per_s": rate, "of_copy": rate / copy}
            row["queued_of_copy"] = least * count / row["queued_seconds"] / copy
            row["of_fused"] = fused / row["seconds"]
        yield name, row


def seconds_of_a_step(make: Callable, sizes: list, dtype: torch.dtype, where: torch.device) -> dict:
    tensors = [torch.zeros(size, dtype=dtype, device=where) for size in sizes]
    for tensor in tensors:
        tensor.requires_grad_().grad = torch.randn_like(tensor)
    step = make(tensors)
    step()
    queued = timing.seconds(step, 5, shortest=QUEUED)
    return {"seconds": timing.seconds(step, repeats=9), "queued_seconds": queued}


# ---- 2. RMSNorm, forward and backward: reads x, writes y; reads x and dy, writes dx


def triton_norm(text: str) -> Callable:
    return lambda x, weight: module_of(text).rms_norm(x, weight)


def torch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, 1e-5)


def liger_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, 1e-5, in_place=False)


NORMS = {
    "torch": torch_norm,
    "utils.kernels": triton_norm(source("rms_norm")),
    "torch, compiled": torch.compile(torch_norm, dynamic=False),
    "Liger": liger_norm,
}
NORM_VARIANTS = {
    "8 numbers a thread": [("block // 512)", "block // 256)"), ("WARPS = 16", "WARPS = 32")],
    "no row ahead": [("1 + min(2,", "1 + min(0,")],
    "one row ahead": [("1 + min(2,", "1 + min(1,")],
    "half the programs": [("WARPS = 16", "WARPS = 8")],
    "twice the programs": [("WARPS = 16", "WARPS = 32")],
}


def rms_norm(rehearse: bool) -> Iterator[tuple[str, dict]]:
    where, width = device(rehearse), 64 if rehearse else 4096
    copy = timing.memory_bandwidth(where, 2**22 if rehearse else 2**32)
    variants = {
        f"utils.kernels: {name}": triton_norm(changed("rms_norm", *changes))
        for name, changes in NORM_VARIANTS.items()
    }
    few, many = (4, 8) if rehearse else (2**14, 2**16)
    for rows, norms in ((few, NORMS), (many, NORMS | variants)):
        for dtype in (torch.bfloat16, torch.float32):
            x, dy = (torch.randn(rows, width, device=where, dtype=dtype) for _ in range(2))
            weight = torch.ones(width, device=where, dtype=dtype, requires_grad=True)
            for name, norm in norms.items():
                row = tried(seconds_of_a_norm, norm, x.requires_grad_(), weight, dy)
                if "seconds" in row:
                    row["bytes_per_s"] = 5 * x.nbytes / row["seconds"]
                    row["of_copy"] = row["bytes_per_s"] / copy
                name = f"{name}, {str(dtype).removeprefix('torch.')}"
                yield name if rows == few else f"{name}, {rows} rows", row


def seconds_of_a_norm(norm: Callable, x: torch.Tensor, weight: torch.Tensor, dy) -> dict:
    def both():
        return torch.autograd.grad(norm(x, weight), (x, weight), dy)

    forward = timing.seconds(lambda: norm(x, weight), repeats=9)
    return {"seconds": timing.seconds(both, repeats=9), "forward_seconds": forward}
