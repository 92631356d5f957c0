"""Sharded data parallelism: every rank keeps a shard of the state instead of a copy (ZeRO).

    stage   each rank keeps 1/N of   how                                         arXiv:1910.02054
    1       optimizer state          `Zero1`, on `FlatParameters`                P_os
    2       also gradients           `FullySharded`: FSDP2, gathered per step    P_os+g
    3       also parameters          `FullySharded`: FSDP2, gathered as needed   P_os+g+p

With Ψ parameters, a step without accumulation sends and receives about 2Ψ at stages 1 and 2 (a
reduce-scatter of gradients, an all-gather of parameters) and 3Ψ at stage 3 (parameters are gathered
for the forward pass and again for the backward pass). Plain data parallelism's all-reduce also
moves 2Ψ.

Both classes have the methods of `utils.parallel.ddp.DataParallel`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from utils.memory.precision import DTYPES, is_mixed
from utils.models.moe import is_expert, moe_layers
from utils.parallel.ddp import DataParallel, Named, by_axis
from utils.parallel.full_tensor import full_size, full_tensor, keep_splits, shard_of
from utils.parallel.mesh import Axis, Mesh
from utils.parallel.tp_ops import all_gather, reduce_scatter

# ---- stage 1: whole parameters, each with one owner


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The owner of each parameter, chosen by size so that the ranks' loads are nearly equal.

    The largest come first, each to the rank with the least so far. Every rank gets the same result.
    """
    load, owner = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owner[index] = min(range(ranks), key=load.__getitem__)
        load[owner[index]] += sizes[index]
    return owner


def everyone() -> Axis:
    """The axis of all ranks."""
    ranks = tuple(range(dist.get_world_size()))
    return Axis("dp", ranks, dist.get_rank(), dist.group.WORLD)


class FlatParameters:
    """All parameters of an axis in one buffer: a rank computes with all and updates its own.

    Parameters are whole, so an optimizer that needs whole matrices (Muon) works unchanged. All of
    them live in one buffer of N rows; row r holds what rank r owns, padded to the longest row.
    Their gradients live in a second buffer. Each exchange is thus one collective on one tensor:

        gradients   reduce-scatter   row r, summed over the ranks, arrives at rank r
        parameters  all-gather       after the step every rank receives all rows

    Gradients stay on the rank until the last micro-batch of a step. Unlike with DDP, the exchange
    does not overlap with the backward pass.
    """

    def __init__(self, model: nn.Module | Named, axis: Axis | None = None):
        """model: a module, or {name: parameter}; axis: the ranks that take part, None: all."""
        self.axis = axis or everyone()
        self.rank, ranks = self.axis.index, self.axis.size
        self.named = model if isinstance(model, dict) else dict(model.named_parameters())
        if len(self.named) < ranks:
            raise ValueError(
                f"{ranks} ranks cannot split {len(self.named)} parameters, each of which has one "
                "owner: take --shard 2 or 3, or fewer ranks"
            )
        # by whole sizes, so that tensor-parallel ranks, with unequal slices, agree on the owners
        owner = owners([full_size(parameter) for parameter in self.named.values()], ranks)
        self.owner = dict(zip(self.named, owner))
        self.owned = {n: p for n, p in self.named.items() if self.owner[n] == self.rank}
        self._lay_out(ranks)

    def _lay_out(self, ranks):
        used, places = [0] * ranks, {}
        for name, parameter in self.named.items():
            owner = self.owner[name]
            places[name] = owner, slice(used[owner], used[owner] + parameter.numel())
            used[owner] += parameter.numel()
        like = next(iter(self.named.values())).detach()
        self.parameters = like.new_zeros(ranks, max(used))
        self.gradients = torch.zeros_like(self.parameters)
        for name, parameter in self.named.items():
            self.parameters[places[name]].copy_(parameter.detach().flatten())
            parameter.data = self.parameters[places[name]].view_as(parameter)
            parameter.grad = self.gradients[places[name]].view_as(parameter)

    def reduce_gradients(self) -> None:
        """Sum over all ranks the gradients that this rank owns; only those are valid afterwards."""
        if self.axis.group is not None:
            own, everything = self.gradients[self.rank], self.gradients.view(-1)
            reduce_scatter(own, everything, group=self.axis.group)

    def gather_parameters(self) -> None:
        """Give every rank the parameters that their owners have updated in the optimizer's step."""
        if self.axis.group is not None:
            own, everything = self.parameters[self.rank], self.parameters.view(-1)
            all_gather(everything, own, group=self.axis.group)

    def zero_grad(self) -> None:
        self.gradients.zero_()

    def from_owner(self, key: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """A tensor of the optimizer's state on every rank, from its owner.

        key     "<parameter name>/<key>"
        state   {key: tensor} that this rank owns
        """
        name, kind = key.rsplit("/", 1)
        like, source = self.named[name], self.axis.ranks[self.owner[name]]
        shape, format = ((), torch.float32) if kind == "step" else (like.shape, like.dtype)
        tensor = torch.empty(shape, dtype=format, device=like.device)
        if self.owner[name] == self.rank:
            tensor.copy_(state[key])
        if self.axis.group is not None:
            dist.broadcast(tensor, src=source, group=self.axis.group)
        return tensor

    def release(self) -> None:
        """Give each parameter its own memory again."""
        for parameter in self.named.values():
            parameter.data, parameter.grad = parameter.detach().clone(), None


class Zero1(DataParallel):
    """ZeRO-1: gradients are summed at their owners, which step and send out the new parameters."""

    replicates = False

    def __init__(self, stages: Sequence[nn.Module], mesh: Mesh, device: torch.device):
        super().__init__(stages, mesh, device)
        self.flat = [FlatParameters(named, axis) for named, axis in by_axis(self.named, mesh)]
        self.owned = {name: p for flat in self.flat for name, p in flat.owned.items()}

    def reduce(self) -> None:
        for flat in self.flat:
            flat.reduce_gradients()

    def after_step(self) -> None:
        for flat in self.flat:
            flat.gather_parameters()

    def zero_grad(self) -> None:
        for flat in self.flat:
            flat.zero_grad()

    def counts(self, name: str) -> bool:
        return True  # a rank has only the gradients that it owns

    def state(self, key: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
        name = key.rsplit("/", 1)[0]
        return next(flat for flat in self.flat if name in flat.named).from_owner(key, state)

    def release(self) -> None:
        for flat in self.flat:
            flat.release()


# ---- stages 2 and 3: FSDP2


class FullySharded(DataParallel):
    """ZeRO-2 and 3 by FSDP2: parameters are gathered block by block when they are needed, and their
    gradients are reduce-scattered at once. Whole gradients are never stored, so every micro-batch
    reduces its own.

    zero_stage, precision, offload   as in `shard`
    """

    replicates = False
    shards_parameters = True

    def __init__(
        self,
        stages: Sequence[nn.Module],
        mesh: Mesh,
        device: torch.device,
        zero_stage: int,
        precision: str = "fp32",
        offload: bool = False,
    ):
        self.averages_over, self.zero_stage = mesh.dp_cp.size, zero_stage
        meshes = list(device_meshes(mesh, device))
        for stage in stages:  # block by block: a device need not hold the whole stage
            shard(stage, zero_stage, device, precision, offload, mesh, meshes)
        self._take(stages, mesh)

    def micro_batch(self, last: bool) -> AbstractContextManager:
        self.module.set_reshard_after_backward(last or self.zero_stage == 3)
        return nullcontext()

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        for stage in self.stages:
            stage.set_reshard_after_backward(self.zero_stage == 3)
        yield
        self.after_evaluation()

    def before_backward(self, stage: nn.Module, last: bool) -> None:
        stage.set_is_last_backward(last)

    def reduce(self) -> None:
        """Scale the experts' gradients, averaged over edp_cp, to match those of the rest."""
        for stage in self.stages if self.mesh.ep.size > 1 else ():
            for layer in moe_layers(stage):
                for parameter in layer.experts.parameters():
                    parameter.grad.to_local().div_(self.mesh.ep.size)

    def after_evaluation(self) -> None:
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def counts(self, name: str) -> bool:
        return True  # no two ranks have the same shard


def device_meshes(grid: Mesh | None, device: torch.device) -> Iterator[DeviceMesh]:
    """The DeviceMeshes that `shard` needs, for dp_cp and edp_cp; every rank must create them.

    FSDP2 needs a group even for one rank. All ranks create all groups of one, in the same order.
    """
    kind = torch.device(device).type
    groups = []
    for axis in (grid.dp_cp, grid.edp_cp) if grid else (everyone(),) * 2:
        if axis.group is None and not groups:
            groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        group = axis.group or groups[dist.get_rank()]
        yield DeviceMesh.from_group(group, kind, mesh_dim_names=(axis.name,))


def shard(
    model: nn.Module,
    zero_stage: int,
    device: torch.device,
    precision: str = "fp32",
    offload: bool = False,
    grid: Mesh | None = None,
    meshes: Sequence[DeviceMesh] | None = None,
) -> nn.Module:
    """Shard every parameter of a GPT, or of a pipeline stage of one, over ranks, in place, with
    FSDP2; return the model.

    zero_stage 2: gathered for the forward pass, kept until the backward pass is over
               3: freed after the forward pass of its block, gathered again for the backward pass
    precision  bf16, fp16: gathered and multiplied in 16 bits, so half the bytes travel; the shards
               and the sums of gradients stay in fp32
    offload    the shards, their gradients and thus the optimizer's state live in host memory
    grid       a `utils.parallel.mesh.Mesh`: parameters are sharded over its dp_cp, and experts over
               its edp_cp if ep has split them before; None: everything over all ranks
    meshes     the grid's `device_meshes`, if several stages use the same ones

    A block is gathered as a whole while the previous block still computes. The embedding is a unit
    too; the last norm and lm_head form a unit that is kept, because the backward pass begins with
    it.
    """
    plain = list(model.parameters())
    kind = torch.device(device).type
    axis = grid.dp_cp if grid else everyone()
    mesh, experts_mesh = meshes or device_meshes(grid, device)
    policy = MixedPrecisionPolicy()
    if is_mixed(precision):
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[precision], reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    offload_policy = CPUOffloadPolicy(pin_memory=kind != "cpu")
    options = {
        "mp_policy": policy,
        "offload_policy": offload_policy if offload else OffloadPolicy(),
    }
    if grid is not None and grid.ep.size > 1:
        _shard_experts(model, experts_mesh, reshard_after_forward=zero_stage == 3, **options)
    options["mesh"] = mesh
    first, last = model.model.embed_tokens, model.lm_head  # a pipeline stage may lack them
    for block in model.model.layers:
        fully_shard(block, reshard_after_forward=zero_stage == 3, **options)
    if first is None or last is None or not model.config.tie_embeddings:
        if first is not None:
            fully_shard(first, reshard_after_forward=zero_stage == 3, **options)
        if last is not None:
            fully_shard([model.model.norm, last], reshard_after_forward=False, **options)
    # a tied matrix belongs to both ends, and hence to the root
    fully_shard(model, reshard_after_forward=False, **options)
    keep_splits(plain, model.parameters())
    for name, parameter in model.named_parameters():
        parameter.zero_axis = grid.edp_cp if grid and grid.ep.size > 1 and is_expert(name) else axis
    return model


def _shard_experts(model, mesh, **options):
    """Shard this rank's experts over edp_cp only. FSDP2 then averages their gradients over edp_cp,
    which is ep times the mean over dp_cp: see `reduce`."""
    for layer in moe_layers(model):
        experts = [*layer.experts.values()]
        fully_shard(experts, mesh=mesh, **options)


# ---- Muon for matrices that are split over ranks


class ShardedMuon(torch.optim.Muon):
    """`torch.optim.Muon` for shards of matrices, from ZeRO-2 and 3 or from tensor parallelism, with
    the same results as on one rank.

    Muon needs the whole matrix to orthogonalize its update. torch's own class also runs on split
    matrices, but sums partial products in bf16 across ranks, so its update depends on their number.
    Here each rank keeps its shard of the momentum, gathers the update of one matrix at a time,
    orthogonalizes it as a single rank would, and takes its own shard. Every rank does the whole
    computation, as in data-parallel training; the saving is memory.
    """

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, group)

    def _step_one(self, parameter, group):
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        change = _orthogonal_change(full_tensor(update, parameter), group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(shard_of(change, parameter))


def _orthogonal_change(update, group):
    """The change that torch's Muon would add to a whole matrix for this update: a step from zero,
    without momentum."""
    matrix = torch.zeros_like(update).requires_grad_()
    matrix.grad = update
    same = {key: group[key] for key in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
    torch.optim.Muon([matrix], weight_decay=0.0, momentum=0.0, nesterov=False, **same).step()
    return matrix.detach()
