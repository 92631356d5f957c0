"""The ranks in a grid of pipeline, data, expert, context and tensor parallelism.

    mesh = make_mesh(dp=2, pp=2, tp=2)      every rank calls it, with the same sizes
    mesh.tp.ranks, mesh.tp.index            (4, 5), 1: this rank's group, and its index there
    dist.all_reduce(x, group=mesh.tp.group)

The grid is a reshaped arange. Tensor parallelism varies fastest, so its ranks have consecutive
numbers and share a node, where links are fast. Context parallelism, which also communicates in
every layer, comes next. Pipeline parallelism, which sends the least, varies slowest (Narayanan et
al., arXiv:2104.04473, 3.2; with context parallelism: Llama 3, arXiv:2407.21783, 3.3.2):

    rank = (((pp · EDP + edp) · EP + ep) · CP + cp) · TP + tp

The ranks of cp work on the same rows, each on some of the positions, with the same parameters.
Gradients of dense parameters are therefore summed over dp and cp together, `dp_cp`, over which ZeRO
also shards its state. Experts live inside data parallelism, dp = edp · ep: they are split over ep,
and their gradients are summed over `edp_cp`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("pp", "edp", "ep", "cp", "tp")  # of a `grid`
TOGETHER = {"dp": ("edp", "ep"), "dp_cp": ("edp", "ep", "cp"), "edp_cp": ("edp", "cp")}
AXES = (*DIMENSIONS, *TOGETHER)


@dataclass(frozen=True)
class Axis:
    """One direction of the grid from one rank's view: the ranks that differ from it only there."""

    name: str  # of AXES
    ranks: tuple[int, ...]  # global ranks of the group, in order
    index: int  # this rank's index among them
    group: dist.ProcessGroup | None  # None if the axis has only one rank

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


@dataclass(frozen=True)
class Mesh:
    """A rank's axes. `dp` is `edp` and `ep` together, `dp_cp` is `dp` and `cp` together."""

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    ep: Axis
    edp: Axis
    dp_cp: Axis
    edp_cp: Axis

    @property
    def size(self) -> int:
        """The total number of ranks."""
        return self.pp.size * self.dp_cp.size * self.tp.size

    def close(self) -> None:
        """Destroy the process groups of this mesh; every rank calls it. Needed only if many meshes
        are made in turn, because each group keeps threads and connections."""
        for group in dict.fromkeys(getattr(self, name).group for name in AXES):
            if group not in (None, dist.group.WORLD):
                dist.destroy_process_group(group)


def grid(dp: int = 1, pp: int = 1, tp: int = 1, ep: int = 1, cp: int = 1) -> torch.Tensor:
    """Every rank's place: int64 (pp, edp, ep, cp, tp) of global ranks. Raises ValueError."""
    for name, size in {"dp": dp, "pp": pp, "cp": cp, "tp": tp, "ep": ep}.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} {size!r} is not a number of ranks: give at least 1")
    if dp % ep:
        raise ValueError(
            f"ep {ep} does not divide dp {dp}: experts are split over data-parallel ranks, "
            f"so take one of {', '.join(str(n) for n in range(1, dp + 1) if dp % n == 0)}"
        )
    return torch.arange(pp * dp * cp * tp, device="cpu").reshape(pp, dp // ep, ep, cp, tp)


def lines(ranks: torch.Tensor, axis: str) -> list[tuple[int, ...]]:
    """All groups of one axis of a `grid`, each a tuple of global ranks; they cover all ranks."""
    if axis not in AXES:
        raise ValueError(f"no axis is named {axis!r}: use one of {', '.join(AXES)}")
    places = [DIMENSIONS.index(name) for name in TOGETHER.get(axis, (axis,))]
    last = ranks.movedim(places, [*range(-len(places), 0)]).flatten(-len(places))
    return [tuple(line) for line in last.reshape(-1, last.shape[-1]).tolist()]


def make_mesh(
    dp: int = 1,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    cp: int = 1,
    timeout: float | None = None,
) -> Mesh:
    """Create this rank's axes and their process groups. Every rank calls it with the same sizes.

    timeout   seconds after which a collective of the new groups fails; None: torch's own limit
    Raises ValueError if the sizes do not multiply to the world size. Without torch.distributed the
    world has one rank.
    """
    ranks = grid(dp, pp, tp, ep, cp)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if ranks.numel() != world:
        names, sizes = "dp·tp·pp", f"{dp}·{tp}·{pp}"
        if cp > 1:
            names, sizes = "dp·cp·tp·pp", f"{dp}·{cp}·{tp}·{pp}"
        raise ValueError(
            f"world size {world} is not {names} = {sizes} = {ranks.numel()}: "
            f"start {ranks.numel()} ranks, or change the sizes"
        )
    if world == 1:
        return one_rank()
    axes = {name: _axis(name, lines(ranks, name), timeout) for name in ("pp", "dp", "cp", "tp")}
    if ep == 1:  # then edp equals dp and needs no group of its own
        axes["ep"] = Axis("ep", (dist.get_rank(),), 0, None)
        axes["edp"] = replace(axes["dp"], name="edp")
    else:
        axes |= {name: _axis(name, lines(ranks, name), timeout) for name in ("ep", "edp")}
    for name, alone in (("dp_cp", "dp"), ("edp_cp", "edp")):
        if cp == 1:
            axes[name] = axes[alone]
        elif name == "edp_cp" and ep == 1:
            axes[name] = axes["dp_cp"]
        else:
            axes[name] = _axis(name, lines(ranks, name), timeout)
    return Mesh(**axes)


def _axis(name: str, groups: list[tuple[int, ...]], timeout: float | None) -> Axis:
    """This rank's axis. All ranks create all groups in the same order, as torch requires.

    An axis of all ranks uses the existing group, except for experts and context: their exchanges
    inside a pass would queue behind those of gradients.
    """
    me, mine = dist.get_rank(), None
    limit = None if timeout is None else timedelta(seconds=timeout)
    for ranks in groups:
        group = None
        if len(ranks) == dist.get_world_size() and name not in ("ep", "cp"):
            group = dist.group.WORLD
        elif len(ranks) > 1:
            group = dist.new_group(list(ranks), timeout=limit)
        if me in ranks:
            mine = Axis(name, ranks, ranks.index(me), group)
    return mine


def one_rank() -> Mesh:
    """The mesh of a program that runs alone, without torch.distributed."""
    return Mesh(**{name: Axis(name, (0,), 0, None) for name in AXES})


def mesh_of(axis: Axis, device_type: str) -> DeviceMesh:
    """An axis as a DeviceMesh for DTensor and FSDP2, on "cpu" or "cuda"."""
    group = axis.group
    if group is None:  # they need a group even for one rank
        group = dist.new_group(list(axis.ranks), use_local_synchronization=True)
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(axis.name,))
