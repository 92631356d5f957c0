"""Data parallelism: every rank has the model and its own rows; gradients are averaged.

Every variant has the same methods, so a training step need not know which one it uses:

    ranks = DDP(stages, mesh, device)               prepares the model
    for number, (x, y) in enumerate(micro_batches):
        with ranks.micro_batch(last=number == len(micro_batches) - 1):
            (loss(ranks.module(x), y) * ranks.averages_over).backward()
    ranks.reduce()                                  after the last backward pass of a step
    optimizer.step()                                an optimizer of `ranks.owned`
    ranks.after_step()
    ranks.zero_grad()

    variant           gradients travel                              chosen for
    DataParallel      never                                         one rank
    DDP               all-reduce, during the last backward pass     whole models
    SummedGradients   all-reduce, after the last backward pass      pipelines and experts
    Zero1             reduce-scatter, after the last backward pass  ZeRO-1           (zero.py)
    FullySharded      reduce-scatter, during each backward pass     ZeRO-2 and 3     (zero.py)

`utils.parallel.parallelize.data_parallel` chooses.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from utils.models.moe import is_expert
from utils.parallel.mesh import Axis, Mesh

BUCKET = 25 * 2**20  # bytes of gradients that travel together, as in DDP

Named = dict[str, nn.Parameter]


class DataParallel:
    """A single rank, which exchanges nothing; also the base class of all variants.

    stages          this rank's modules: the model, or its stages of a pipeline
    module          called for a forward pass if there is no pipeline
    named           {name: parameter} of this rank, under the names of the whole model
    owned           those that its optimizer updates
    averages_over   number of ranks over which gradients are averaged; 1: they are summed, or there
                    is only one rank
    """

    averages_over = 1
    replicates = True  # whether every rank of dp_cp ends with all gradients
    shards_parameters = False  # whether this rank holds only shards of parameters

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, device: torch.device):
        for stage in stages:
            stage.to(device)
        self._take(stages, mesh)

    def _take(self, stages: Sequence[nn.Module], mesh: Mesh) -> None:
        self.stages, self.mesh, self.module = list(stages), mesh, stages[0]
        self.named = self.owned = named_parameters(stages)

    # ---- one step

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """A context for the forward *and* the backward pass of one micro-batch."""
        return nullcontext()

    def pipeline(self) -> AbstractContextManager:
        """A context for all passes of a step in a pipeline."""
        return nullcontext()

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        """In a pipeline, called before each backward pass of a stage; last: the last one."""

    def reduce(self) -> None:
        """Complete the gradients of `owned`, after the last backward pass of a step."""

    def after_step(self) -> None:
        """Distribute the updated parameters to all ranks, after the optimizer's step."""

    def zero_grad(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def after_evaluation(self) -> None:
        """Clean up after forward passes without a backward pass."""

    # ---- the state and the end

    def counts(self, name: str) -> bool:
        """Whether this rank counts its shard of a parameter in sums over all ranks: of several
        copies, the first rank's counts."""
        return self._replicas(name).is_first

    def state(self, key: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """A tensor of the optimizer's state, from its owner; all ranks of the axis call this.

        key     "<parameter name>/<key>"
        state   {key: tensor} that this rank owns
        """
        return state[key]

    def release(self) -> None:
        """Give each parameter its own memory again."""

    def _replicas(self, name: str) -> Axis:
        return self.mesh.edp_cp if is_expert(name) else self.mesh.dp_cp


class DDP(DataParallel):
    """torch's DistributedDataParallel: buckets of gradients travel during the backward pass.

    Gradients are views of the buckets, not copies. DDP decides in the forward pass whether the
    backward pass will communicate: entering `micro_batch` after that has no effect.
    """

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, device: torch.device):
        super().__init__(stages, mesh, device)
        group = mesh.dp_cp.group
        self.module = DistributedDataParallel(
            stages[0], process_group=group, gradient_as_bucket_view=True
        )
        self.averages_over = mesh.dp_cp.size

    def micro_batch(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.module.no_sync()


class SummedGradients(DataParallel):
    """Sums gradients after all backward passes: for pipelines, where DDP does not see all of them,
    and for experts, whose partners differ from those of the other parameters."""

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, device: torch.device):
        super().__init__(stages, mesh, device)
        self.axes = by_axis(self.named, mesh)
        self.owned = {name: p for named, _ in self.axes for name, p in named.items()}

    def reduce(self) -> None:
        for named, axis in self.axes:
            all_reduce_gradients(named.values(), axis)


def named_parameters(stages: Sequence[nn.Module]) -> Named:
    """{name: parameter} of a rank's stages, under the names of the whole model."""
    return {name: p for stage in stages for name, p in stage.named_parameters()}


def by_axis(named: Named, mesh: Mesh) -> list[tuple[Named, Axis]]:
    """({name: parameter}, the axis whose ranks all have them): experts may have a different one."""
    if mesh.ep.size == 1:
        return [(named, mesh.dp_cp)]
    experts = {name: p for name, p in named.items() if is_expert(name)}
    dense = {name: p for name, p in named.items() if not is_expert(name)}
    return [(dense, mesh.dp_cp), (experts, mesh.edp_cp)]


def all_reduce_gradients(parameters: Sequence[nn.Parameter], axis: Axis) -> None:
    """Replace each gradient by its sum over the axis's ranks, `BUCKET` bytes at a time."""
    if axis.group is None:
        return
    for gradients in _buckets([p.grad for p in parameters if p.grad is not None]):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=axis.group)
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(total.view_as(gradient))


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Lists of tensors, in order, of at most `BUCKET` bytes or one tensor."""
    bucket, size = [], 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
