"""The contenders of `tests/bench/bench_parallel.py`: each builds a function that takes one step.

`contender(name, config, device, mesh)` returns (step, module, optimizer) with step(x, y) -> None:

    ours        the engine of `utils.train`
    torch       parallelize_module (DTensor) for --tp, torch.distributed.pipelining for --pp,
                fully_shard (FSDP2) for --dp, composed as usual
    deepspeed   PipelineModule for --pp, ZeRO for --dp

All have the same model (ours), the same rows and number of micro-batches, and AdamW.
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from tests.bench.memory_contenders import Absent
from utils.models.gpt import GPT, Block, cross_entropy, rotary_tables
from utils.parallel.stages import make_stages
from utils.training.deepspeed import import_deepspeed, settings
from utils.training.step import make_engine
from utils.training.train import micro_batches


def contender(name, config, device, mesh):
    torch.manual_seed(0)
    model = GPT(config.model_config())
    return {"ours": ours, "torch": with_torch, "deepspeed": with_deepspeed}[name](
        model, config, device, mesh
    )


def ours(model, config, device, mesh):
    engine = make_engine(model, config, device, mesh)
    engine.set_lr(1.0)
    tokens = config.batch * config.seq

    def step(x, y):
        engine.backward(micro_batches(x, y, config.accumulation_steps()), tokens)
        engine.step(config.clip)

    return step, nn.ModuleList(engine.ranks.stages), engine.optimizer


# ---- torch's own tools

PLAN = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "model.layers.*.self_attn.q_proj": ColwiseParallel(),
    "model.layers.*.self_attn.k_proj": ColwiseParallel(),
    "model.layers.*.self_attn.v_proj": ColwiseParallel(),
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
}
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


def with_torch(model, config, device, mesh):
    if config.zero_stage() == 1:
        raise Absent("torch's ZeRO-1 is an optimizer for DDP, which goes with whole models only")
    if config.ep > 1:
        raise Absent("torch has no layer for expert parallelism")
    sizes = (config.pp, mesh.dp.size, config.tp)
    grid = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    model.to(device)
    stages = make_stages(model, mesh.pp, config.stages_per_rank()) if config.pp > 1 else [model]
    for stage in stages:
        if config.tp > 1:
            names = {name for name, _ in stage.named_modules()}
            plan = {k: how for k, how in PLAN.items() if "*" in k or k in names}
            parallelize_module(stage, grid["tp"], plan)
        if mesh.dp.size > 1:
            options = {"mesh": grid["dp"], "reshard_after_forward": config.zero_stage() == 3}
            for block in (m for m in stage.modules() if isinstance(m, Block)):
                fully_shard(block, **options)
            fully_shard(stage, **options)
    groups = {}  # a fused update takes parameters of a single device mesh
    for parameter in (p for stage in stages for p in stage.parameters()):
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups.values()],
        lr=config.peak_lr(), betas=(0.9, 0.95), weight_decay=0.0, fused=True,
    )
    tokens = config.batch * config.seq

    def loss_of(logits, y):
        if isinstance(logits, DTensor):  # there is no sum over Shard(-1): mean times tokens
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()) * y.numel()
        else:
            loss = cross_entropy(logits, y, reduction="sum")
        return loss * (mesh.dp.size / tokens)

    run = pipelined(stages, config, device, mesh, grid, loss_of) if config.pp > 1 else None

    def step(x, y):
        with loss_parallel() if config.tp > 1 else nullcontext():
            if run:
                run(x, y)
            else:
                for micro_x, micro_y in micro_batches(x, y, config.accumulation_steps()):
                    loss_of(model(micro_x), micro_y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, nn.ModuleList(stages), optimizer


def pipelined(stages, config, device, mesh, grid, loss_of):
    """Return a function (x, y) that runs torch's schedule over all micro-batches."""
    count, group = config.pp * config.stages_per_rank(), grid["pp"].get_group()
    parts = [
        PipelineStage(stage, mesh.pp.index + chunk * config.pp, count, device, group=group)
        for chunk, stage in enumerate(stages)
    ]
    several = config.schedule in ("interleaved", "zero-bubble")
    schedule = SCHEDULES[config.schedule](
        parts if several else parts[0],
        config.accumulation_steps(),
        loss_fn=loss_of,
        scale_grads=False,
    )

    def run(x, y):
        arguments = (x,) if mesh.pp.is_first else ()
        schedule.step(*arguments, target=y if mesh.pp.is_last else None)

    return run


# ---- DeepSpeed


class Embed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.embed_tokens = model.model.embed_tokens

    def forward(self, tokens):
        return self.embed_tokens(tokens)


class Layer(nn.Module):
    def __init__(self, model, number):
        super().__init__()
        self.block, self.config = model.model.layers[number], model.config

    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        cos, sin = rotary_tables(self.config, positions, x.dtype)
        return self.block(x, cos[:, None], sin[:, None])


class Head(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x):
        return self.lm_head(self.norm(x))


def with_deepspeed(model, config, device, mesh):
    if config.tp > 1 or config.ep > 1:
        raise Absent("DeepSpeed leaves splitting the matrices to Megatron")
    if config.pp == 1:
        raise Absent("without --pp see bench_memory")
    if config.schedule != "1f1b" or config.zero_stage() > 1:
        raise Absent("its PipelineModule has 1F1B, with ZeRO-1 at most")
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False)
    layers = [Layer(model, number) for number in range(config.layers)]
    module = deepspeed.pipe.PipelineModule(
        layers=[Embed(model), *layers, Head(model)],
        num_stages=config.pp,
        loss_fn=cross_entropy,
        partition_method="type:Layer",
    )
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=config.peak_lr(), betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    options = settings(
        device,
        mesh.dp.size,
        config.model_config().parameter_count(),
        zero_stage=config.zero_stage(),
        accumulation_steps=config.accumulation_steps(),
        precision=config.precision,
        offload=config.offloads(),
    )
    rows = config.batch // mesh.dp.size // config.accumulation_steps()
    options.update(
        train_micro_batch_size_per_gpu=rows,
        train_batch_size=config.batch,
        gradient_clipping=0.0,
    )
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=options, dist_init_required=False
    )

    def step(x, y):
        engine.train_batch(iter(micro_batches(x, y, config.accumulation_steps())))

    return step, engine.module, optimizer
