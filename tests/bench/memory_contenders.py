"""The contenders of `tests/bench/bench_memory.py`: each builds a function that takes one step.

`contender(name, config, device)` returns (step, model, optimizer) with step(x, y) -> None: "ours"
and "deepspeed" use the engines of `utils.train`, "torch" the usual code with torch's own tools. All
have the same model, AdamW, clipping and rows.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from utils.models.gpt import GPT, Block, cross_entropy
from utils.parallel.mesh import make_mesh
from utils.training.step import make_engine
from utils.training.train import micro_batches

CONTENDERS = ("ours", "torch", "deepspeed")


class Absent(Exception):
    """A contender has no such technique; the message says why."""


def with_engine(config, device, name):
    """Our own loop's step, on either engine."""
    torch.manual_seed(0)
    config = replace(config, engine="torch" if name == "ours" else "deepspeed")
    mesh = make_mesh(dp=dist.get_world_size())
    with device:  # where a billion weights are drawn quickly
        model = GPT(config.model_config())
    engine = make_engine(model, config, device, mesh)
    engine.set_lr(1.0)
    tokens = config.batch * config.seq

    def step(x, y):
        engine.backward(micro_batches(x, y, config.accumulate), tokens)
        engine.step(config.clip)

    if name == "ours":
        return step, engine.ranks.stages[0], engine.optimizer
    return step, engine.model, engine.adamw


def plain_torch(config, device):
    """The usual code with torch's own tools."""
    ranks, level, offload = dist.get_world_size(), config.zero_stage(), config.offload
    if offload == "activations" and device.type == "cpu":
        raise Absent("save_on_cpu moves nothing where the CPU is the device")
    if offload == "optimizer":
        raise Absent("torch has no optimizer in other memory, unless the parameters go too")
    torch.manual_seed(0)
    model = GPT(config.model_config()).to(device)
    if config.recompute == "full":
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    elif config.recompute == "selective":
        raise Absent("torch leaves the choice of operators to its user")
    mixed = config.precision == "bf16"
    autocast = torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()
    saved = torch.autograd.graph.save_on_cpu if offload == "activations" else nullcontext
    if level >= 2:
        options = {
            "reshard_after_forward": level == 3,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
            if offload == "parameters"
            else OffloadPolicy(),
        }
        for block in model.model.layers:
            fully_shard(block, **options)
        parallel = fully_shard(model, **options)
    else:
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    rate = {"lr": config.peak_lr(), "betas": (0.9, 0.95), "weight_decay": 0.0, "fused": True}
    if level == 1:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **rate)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **rate)
    tokens = config.batch * config.seq

    def step(x, y):
        for number, (micro_x, micro_y) in enumerate(micro_batches(x, y, config.accumulate), 1):
            last = number == config.accumulate
            with nullcontext() if last or level >= 2 else parallel.no_sync():
                with saved(), autocast:
                    logits = parallel(micro_x)
                loss = cross_entropy(logits, micro_y, reduction="sum")
                (loss * (ranks / tokens)).backward()
        clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer.optim if level == 1 else optimizer


def contender(name, config, device):
    if name == "torch":
        return plain_torch(config, device)
    return with_engine(config, device, name)
