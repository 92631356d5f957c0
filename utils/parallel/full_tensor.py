"""Full tensors and shards: what a rank holds of a tensor, and how all of it comes together.

    full_tensor(tensor, parameter)   put together from every rank that has a part of it
    shard_of(tensor, parameter)      this rank's part of a full tensor; nothing is sent

A parameter may be a part in two ways, one inside the other. Tensor parallelism cuts a slice out of
it and leaves a note, `parameter.tp_split`; ZeRO-2 and 3 cut what is there over the data-parallel
ranks, and the parameter is a DTensor with a note, `parameter.zero_axis`. A state of the optimizer
is cut as its parameter is.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.parallel.tp_ops import all_gather

# ---- one tensor


@torch.no_grad()
def full_tensor(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """A parameter, or a state of the same shape, put together from all ranks on each of them.

    The state may be a plain tensor of this rank's part. What is not split comes back as it is.
    """
    if tensor.ndim == 0:  # a count has no parts
        return tensor
    if isinstance(parameter, DTensor):
        tensor = _gather_shards(tensor, parameter)
    split = split_of(parameter)
    return split.full_tensor(tensor) if split else tensor


def shard_of(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a whole tensor, split as the parameter is; nothing is sent."""
    if tensor.ndim == 0:
        return tensor
    split = split_of(parameter)
    if split:
        tensor = split.part(tensor).contiguous()
    if not isinstance(parameter, DTensor):
        return tensor
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor.to(mesh.device_type), mesh, placements, src_data_rank=None)


def offset_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Where in the whole tensor this rank's part of it begins, in each dimension."""
    offset, split = [0] * parameter.ndim, split_of(parameter)
    if split:
        if split.packed > 1:
            raise ValueError("a packed matrix has several parts on a rank: save whole tensors")
        offset[split.dim] = split.start
    if isinstance(parameter, DTensor):
        axis, rows = parameter.zero_axis, parameter.shape[0]
        offset[0] += min(rows, axis.index * -(-rows // axis.size))  # as torch.chunk cuts them
    return tuple(offset)


def full_size(parameter: nn.Parameter) -> int:
    """How many values the whole has of which this plain parameter is this rank's slice."""
    split = split_of(parameter)
    if not split:
        return parameter.numel()
    return parameter.numel() // parameter.shape[split.dim] * sum(split.sizes)


def split_of(parameter: torch.Tensor) -> Any:
    """The slice that tensor parallelism cut out of it (`utils.parallel.tensor.Split`), or None."""
    return getattr(parameter, "tp_split", None)


def keep_splits(parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
    """Hands the notes of split parameters on to those that have taken their places."""
    for parameter, other in zip(parameters, others, strict=True):
        if split_of(parameter):
            other.tp_split = parameter.tp_split


def _gather_shards(tensor, parameter):
    """One all-gather over `parameter.zero_axis`. Not DTensor's own, over its device mesh: torch
    keeps device meshes for later, and takes one of the same ranks whose groups may be closed."""
    axis, shape = parameter.zero_axis, parameter.shape
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.to(parameter.device_mesh.device_type)
    if axis.group is None:
        return local
    rows = -(-shape[0] // axis.size)  # of each rank but the last ones, which are filled up
    filled = local.new_zeros(rows, *shape[1:])
    filled[: len(local)] = local
    everything = local.new_empty(axis.size * rows, *shape[1:])
    all_gather(everything, filled, group=axis.group)
    return everything[: shape[0]]


# ---- all tensors of a model


class OnRankZero:
    """Brings whole tensors to rank 0, one after the other, wherever a model's pieces are.

    named      {name: parameter} of this rank's stages
    scattered  whether rank 0 may lack some of them
    All ranks make it, and then ask for the same names in the same order.
    """

    def __init__(self, named: dict[str, nn.Parameter], device: torch.device, scattered: bool):
        self.named, self.device, self.holders = named, device, None
        if scattered:
            held = [None] * dist.get_world_size()
            dist.all_gather_object(held, list(named))
            # of the ranks that have a tensor the first one sends it
            self.holders = {n: r for r, names in reversed([*enumerate(held)]) for n in names}

    def bring(
        self, name: str, tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The whole tensor on rank 0; on the others what they have of it, or None.

        tensor   a parameter, or a state of the optimizer, of this rank; None without `name` here
        shape    of the whole
        """
        if name in self.named:
            tensor = full_tensor(tensor, self.named[name])
        source = self.holders[name] if self.holders else 0
        rank = dist.get_rank() if source else 0
        if source and rank == 0:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            dist.recv(tensor, src=source)
        elif source and rank == source:
            dist.send(tensor.to(self.device).contiguous(), dst=0)
        return tensor


def full_model(config: GPTConfig, weights: Iterable[tuple[str, torch.Tensor]]) -> GPT | None:
    """A GPT on rank 0's CPU made of (name, whole tensor) pairs; None on the other ranks."""
    first = dist.get_rank() == 0
    state = {name: tensor.detach().cpu() for name, tensor in weights if first}
    if not first:
        return None
    model = GPT.without_memory(config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie()
    return model


# ---- gradients


def local_shards(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Plain tensors on the memory of this rank's part of each parameter, with its gradient."""
    return [_local_shard(parameter) for parameter in parameters]


def _local_shard(parameter):
    if not isinstance(parameter, DTensor):
        return parameter
    part = parameter.to_local().detach()
    if parameter.grad is not None:
        part.grad = parameter.grad.to_local()
    return part


def clip_gradients(
    parts: list[torch.Tensor],
    largest: float,
    device: torch.device,
    counted: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scales the gradients so that their norm over all parameters is at most `largest` (0: any).

    parts     this rank's plain tensors
    counted   those of them that no other rank counts: what several ranks hold alike is counted by
              one of them; None: this rank holds all there is
    Returns the norm before, equal on every rank. A rank that went by the norm of its own part would
    scale its gradients by another number than its neighbours do theirs.
    """
    seen = parts if counted is None else counted
    norm = get_total_norm([part.grad for part in seen if part.grad is not None]).to(device)
    if counted is not None:
        squares = norm.square().to(parts[0].dtype)  # of nothing it would be fp32
        dist.all_reduce(squares)
        norm = squares.sqrt()
    clip_grads_with_norm_(parts, largest or math.inf, norm)
    return norm
