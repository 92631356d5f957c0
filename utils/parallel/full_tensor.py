"""Full tensors and shards: a rank's part of a tensor, and how the parts are assembled.

    full_tensor(tensor, parameter)   assembled from every rank that has a shard
    shard_of(tensor, parameter)      this rank's shard of a full tensor; nothing is sent

A parameter may be split in two ways, one inside the other. Tensor parallelism takes a slice of it
and leaves a note, `parameter.tp_split`; ZeRO-2 and 3 shard that over the data-parallel ranks,
and the parameter is then a DTensor with a note, `parameter.zero_axis`. The optimizer's state is
split as its parameter is.
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
    """A parameter, or a state of the same shape, assembled from all ranks on each of them.

    The state may be a plain tensor with this rank's shard. Unsplit tensors are returned as is.
    """
    if tensor.ndim == 0:  # a count is not split
        return tensor
    if isinstance(parameter, DTensor):
        tensor = _gather_shards(tensor, parameter)
    split = split_of(parameter)
    return split.full_tensor(tensor) if split else tensor


def shard_of(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's shard of a whole tensor, split as the parameter is; nothing is sent."""
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
    """The offset of this rank's shard in the whole tensor, in each dimension."""
    offset, split = [0] * parameter.ndim, split_of(parameter)
    if split:
        if split.packed > 1:
            raise ValueError("a packed matrix has several slices on a rank: save whole tensors")
        offset[split.dim] = split.start
    if isinstance(parameter, DTensor):
        axis, rows = parameter.zero_axis, parameter.shape[0]
        offset[0] += min(rows, axis.index * -(-rows // axis.size))  # as in torch.chunk
    return tuple(offset)


def full_size(parameter: nn.Parameter) -> int:
    """The number of elements of the whole parameter of which this rank holds a slice."""
    split = split_of(parameter)
    if not split:
        return parameter.numel()
    return parameter.numel() // parameter.shape[split.dim] * sum(split.sizes)


def split_of(parameter: torch.Tensor) -> Any:
    """The slice that tensor parallelism took of it (`utils.parallel.tensor.Split`), or None."""
    return getattr(parameter, "tp_split", None)


def keep_splits(parameters: Iterable[nn.Parameter], others: Iterable[nn.Parameter]) -> None:
    """Copy the notes of split parameters to the parameters that replace them."""
    for parameter, other in zip(parameters, others, strict=True):
        if split_of(parameter):
            other.tp_split = parameter.tp_split


def _gather_shards(tensor, parameter):
    """One all-gather over `parameter.zero_axis`. DTensor's own is not used: torch caches device
    meshes, and may pick one of the same ranks whose groups are closed."""
    axis, shape = parameter.zero_axis, parameter.shape
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.to(parameter.device_mesh.device_type)
    if axis.group is None:
        return local
    rows = -(-shape[0] // axis.size)  # of each rank except the last ones, which are padded
    filled = local.new_zeros(rows, *shape[1:])
    filled[: len(local)] = local
    everything = local.new_empty(axis.size * rows, *shape[1:])
    all_gather(everything, filled, group=axis.group)
    return everything[: shape[0]]


# ---- all tensors of a model


class OnRankZero:
    """Brings whole tensors to rank 0, one at a time, wherever a model's shards are.

    named      {name: parameter} of this rank's stages
    scattered  whether rank 0 may lack some of them
    All ranks create it and then request the same names in the same order.
    """

    def __init__(self, named: dict[str, nn.Parameter], device: torch.device, scattered: bool):
        self.named, self.device, self.holders = named, device, None
        if scattered:
            held = [None] * dist.get_world_size()
            dist.all_gather_object(held, list(named))
            # the first of the ranks that have a tensor sends it
            self.holders = {n: r for r, names in reversed([*enumerate(held)]) for n in names}

    def bring(
        self, name: str, tensor: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The whole tensor on rank 0; on other ranks their own tensor, or None.

        tensor   a parameter or optimizer state of this rank; None if `name` is not here
        shape    of the whole tensor
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
    """Plain tensors that share memory with this rank's shard of each parameter and its gradient."""
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
    """Scale the gradients so that their norm over all parameters is at most `largest` (0: any).

    parts     this rank's plain tensors
    counted   those of them that this rank counts, so that copies on several ranks count once;
              None: this rank holds all gradients
    Returns the norm before clipping, equal on every rank. If each rank used the norm of its own
    shard, ranks would scale their gradients by different factors.
    """
    seen = parts if counted is None else counted
    norm = get_total_norm([part.grad for part in seen if part.grad is not None]).to(device)
    if counted is not None:
        squares = norm.square().to(parts[0].dtype)  # the norm of nothing would be fp32
        dist.all_reduce(squares)
        norm = squares.sqrt()
    clip_grads_with_norm_(parts, largest or math.inf, norm)
    return norm
