"""One rank of a world of thousands, in this process alone: the real code, without the data.

    with world_of(3072, rank=0):                       # torch.distributed believes it
        mesh = make_mesh(dp=6, pp=64, tp=8)
        with fake_numbers():                           # tensors have shapes but no memory
            model = tensor_parallel(GPT(config), mesh.tp)
            …

    seen = observe(config, dp=6, pp=64, tp=8, micro_batches=64, seq=2048, recompute="full")
    seen.memory["activations"], seen.sent("tp")        # bytes of rank 0, of a step

The process group is PyTorch's "fake" backend: every collective returns at once, without any peers.
Under `FakeTensorMode` an operator derives shapes and types and computes nothing. So a model of a
trillion parameters goes through the same functions as on a real cluster – stages, split matrices,
schedule, recomputation, optimizer – and `utils.measure.memory` and `utils.measure.traffic` count on
this rank what they would count there. It cannot tell time, nor the memory used inside a kernel.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from utils import private_api
from utils.measure.memory import Memory
from utils.measure.traffic import Traffic
from utils.memory.checkpointing import recompute as checkpoint_blocks
from utils.models import gpt, ops
from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.parallel.context import context_parallel
from utils.parallel.context.context_parallel import loss_of_own
from utils.parallel.mesh import Mesh, make_mesh
from utils.parallel.parallelize import boundary
from utils.parallel.pipeline import Pipeline
from utils.parallel.stages import make_stages, reduce_tied_gradients
from utils.parallel.tensor import loss_function, reduce_replicated_gradients, tensor_parallel

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def world_of(size: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of `size`. Raises RuntimeError if a group is open."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a world of {size}: give 0 to {size - 1}")
    if dist.is_initialized():
        raise RuntimeError("this process is in a real process group: leave it first")
    dist.init_process_group("fake", rank=rank, world_size=size, store=private_api.fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_numbers() -> Iterator[None]:
    """A context in which tensors have shape, type and device, but neither values nor memory.

    Their device is the CPU. One operation of the model keeps more there than on a GPU: in 16 bits
    PyTorch's norm consists of small operations, which keep copies in fp32, while a GPU has one
    kernel. So the norm here is the workshop's own, which keeps what that kernel keeps: its input
    and a scale.
    """
    before, gpt.rms_norm = gpt.rms_norm, ops.RMSNormFunction.apply
    try:
        with private_api.FakeTensorMode():
            yield
    finally:
        gpt.rms_norm = before


@dataclass(frozen=True)
class Seen:
    """A record of one rank's step.

    phases       {"passes", "gradients" (exchanged), "update": {kind: bytes}}, at the peak of each
    parameters   held by this rank
    traffic      of the step;  mesh: this rank's axes
    seconds      that it took here; they say nothing about a cluster
    """

    phases: dict[str, dict[str, int]]
    parameters: int
    mesh: Mesh = field(repr=False)
    traffic: Traffic = field(repr=False)
    seconds: float = field(repr=False, compare=False)

    @property
    def memory(self) -> dict[str, int]:
        """{kind: bytes} at the peak of the forward and backward passes."""
        return self.phases["passes"]

    @property
    def total(self) -> int:
        """The sum of `memory`."""
        return sum(self.memory.values())

    def calls(self, axis: str) -> int:
        """Messages and collectives of this rank on one axis of the mesh; receives do not count."""
        return sum(event.op != "recv" for event in self._events(axis))

    def sent(self, axis: str) -> float:
        """Bytes that this rank sends on one axis, by the ring algorithms."""
        return float(sum(event.sent for event in self._events(axis)))

    def _events(self, axis):
        group = getattr(self.mesh, axis).group
        return self.traffic.on(group) if group is not None else []


class MixedAdamW:
    """AdamW for parameters in 16 bits: it keeps an fp32 copy and two moments, 12 bytes for each.

    It updates parameters one at a time, so only one gradient at a time is in fp32.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float = 1e-4):
        self.parameters = list(parameters)
        self.copies = [p.detach().to(torch.float32, copy=True) for p in self.parameters]
        self.parts = [torch.optim.AdamW([copy], lr=lr, fused=True) for copy in self.copies]

    def step(self) -> None:
        for parameter, copy, part in zip(self.parameters, self.copies, self.parts):
            copy.grad = parameter.grad.float()
            part.step()
            parameter.detach().copy_(copy)
            copy.grad = None

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def observe(
    config: GPTConfig,
    *,
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    rank: int = 0,
    **options: Any,
) -> Seen:
    """One training step as rank `rank` of a fake world of dp · pp · cp · tp ranks: see
    `one_step`."""
    with world_of(dp * pp * cp * tp, rank):
        mesh = make_mesh(dp=dp, pp=pp, tp=tp, cp=cp)
        with fake_numbers():
            return one_step(config, mesh, **options)


def one_step(
    config: GPTConfig,
    mesh: Mesh,
    *,
    micro_batches: int = 1,
    micro_batch: int = 1,
    seq: int = 2048,
    schedule: str = "1f1b",
    chunks: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = False,
    context: str = "ring",
    precision: str = "bf16",
) -> Seen:
    """What this rank holds and sends in a step, in a real world or a fake one.

    micro_batches   of one pipeline, each of `micro_batch` sequences of `seq` tokens
    context         how attention sees the positions of cp's other ranks: see `context_parallel`
    precision       bf16: weights and gradients in 2 bytes, 12 bytes of optimizer; fp32: 4, 4 and 8
    A small step beforehand creates the optimizer's state. Raises ValueError.
    """
    if precision not in TYPES:
        raise ValueError(f"precision {precision!r} is not one of {', '.join(TYPES)}")
    dtype = TYPES[precision]
    with _default(dtype):  # fake parameters cannot change their type later
        stages = make_stages(GPT(config), mesh.pp, chunks)
    model = torch.nn.ModuleList(stages)
    for stage in stages:
        tensor_parallel(stage, mesh.tp, sequence_parallel)
        context_parallel(stage, mesh.cp, context)
        checkpoint_blocks(stage, recompute)
    parameters = list(model.parameters())
    optimizer = MixedAdamW(parameters)
    if precision == "fp32":
        optimizer = torch.optim.AdamW(parameters, fused=True)
    pipeline = Pipeline(
        stages,
        mesh.pp,
        schedule,
        _loss(stages, mesh.cp),
        boundary=boundary(config, mesh, dtype, sequence_parallel),
    )
    rows = [_rows(micro_batch, seq) for _ in range(micro_batches)]

    def step(rows, phase=lambda name: nullcontext()):
        with phase("passes"):
            pipeline.run(rows)
        with phase("gradients"):
            reduce_tied_gradients(stages, mesh.pp)
            reduce_replicated_gradients(model, mesh.tp)
            for parameter in parameters if mesh.dp_cp.size > 1 else ():
                dist.all_reduce(parameter.grad, group=mesh.dp_cp.group)
        with phase("update"):
            optimizer.step()
            optimizer.zero_grad()

    step(rows[: mesh.pp.size if schedule == "interleaved" else 1])
    began = time.perf_counter()
    memory = Memory(model=model, optimizer=optimizer, device="meta" if _is_fake(rows) else None)
    with memory, Traffic() as traffic:
        step(rows, memory.phase)
    seconds = time.perf_counter() - began
    return Seen(memory.phases, sum(p.numel() for p in parameters), mesh, traffic, seconds)


def _is_fake(rows):
    return isinstance(rows[0][0], private_api.FakeTensor)


@contextmanager
def _default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _rows(rows, seq):
    """(x, y) of one micro-batch: (rows, seq) tokens each."""
    tokens = torch.zeros(rows, seq, dtype=torch.int64)
    return tokens, tokens.clone()


def _loss(stages, cp):
    loss = loss_of_own(loss_function(stages[-1]), cp) if stages[-1].is_last else None
    return lambda logits, y: loss(logits, y, reduction="sum")
