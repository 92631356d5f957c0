"""The grid of ranks: positions, groups that really communicate, clear errors."""

import itertools

import pytest
import torch
import torch.distributed as dist

from utils.parallel import mesh as meshes
from utils.ranks import Ranks

SIZES = [
    (dp, pp, tp, ep, cp)
    for dp, pp, tp, cp in itertools.product((1, 2, 4), (1, 3), (1, 2, 4), (1, 2, 3))
    for ep in range(1, dp + 1)
    if dp % ep == 0
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(8, device="cpu") as group:
        yield group


def test_a_ranks_number_follows_the_formula_and_each_axis_has_every_rank_once():
    for dp, pp, tp, ep, cp in SIZES:
        ranks, edp = meshes.grid(dp, pp, tp, ep, cp), dp // ep
        assert ranks.shape == (pp, edp, ep, cp, tp) and ranks.dtype == torch.int64
        for p, d, e, c, t in itertools.product(*(range(size) for size in ranks.shape)):
            assert ranks[p, d, e, c, t] == (((p * edp + d) * ep + e) * cp + c) * tp + t
        lengths = {"pp": pp, "dp": dp, "ep": ep, "edp": edp, "cp": cp, "tp": tp}
        lengths |= {"dp_cp": dp * cp, "edp_cp": edp * cp}
        for axis in meshes.AXES:
            groups = meshes.lines(ranks, axis)
            assert {len(group) for group in groups} == {lengths[axis]}
            assert sorted(rank for group in groups for rank in group) == list(range(ranks.numel()))
            assert all(list(group) == sorted(group) for group in groups)


def sums(dp, pp, tp, ep, cp):
    """For each axis: (ranks, index, all-reduced sum of the global ranks)."""
    mesh = meshes.make_mesh(dp, pp, tp, ep, cp, timeout=60)
    found = {}
    for name in meshes.AXES:
        axis = getattr(mesh, name)
        total = torch.tensor(float(dist.get_rank()))
        if axis.group is not None:
            dist.all_reduce(total, group=axis.group)
            assert dist.get_process_group_ranks(axis.group) == list(axis.ranks)
        found[name] = (axis.ranks, axis.index, total.item(), axis.size, axis.is_first, axis.is_last)
    assert mesh.size == 8
    dist.barrier()
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("dp", "pp", "tp", "ep", "cp"),
    [
        (2, 2, 2, 2, 1), (8, 1, 1, 4, 1), (1, 1, 1, 1, 8), (4, 1, 1, 2, 2), (2, 2, 1, 1, 2),
    ],
)
def test_each_axis_is_a_group_of_its_own(ranks, dp, pp, tp, ep, cp):
    expected = meshes.grid(dp, pp, tp, ep, cp)
    for rank, found in enumerate(ranks.run(sums, dp, pp, tp, ep, cp)):
        for name, (members, index, total, size, first, last) in found.items():
            assert members in meshes.lines(expected, name) and members[index] == rank
            assert total == sum(members) and size == len(members)
            assert (first, last) == (index == 0, index == size - 1)


def refused(**sizes):
    try:
        meshes.make_mesh(**sizes)
    except ValueError as error:
        return str(error)


def test_sizes_that_do_not_fit_the_world_are_named(ranks):
    assert set(ranks.run(refused, dp=2, pp=3, tp=2)) == {
        "world size 8 is not dp·tp·pp = 2·2·3 = 12: start 12 ranks, or change the sizes"
    }
    assert set(ranks.run(refused, dp=2, cp=3)) == {
        "world size 8 is not dp·cp·tp·pp = 2·3·1·1 = 6: start 6 ranks, or change the sizes"
    }
    with pytest.raises(ValueError, match="world size 1 is not dp·tp·pp = 2·1·1 = 2"):
        meshes.make_mesh(dp=2)
    with pytest.raises(ValueError, match=r"ep 3 does not divide dp 4: .* one of 1, 2, 4"):
        meshes.grid(dp=4, ep=3)
    with pytest.raises(ValueError, match="tp 0 is not a number of ranks"):
        meshes.grid(tp=0)
    with pytest.raises(ValueError, match="no axis is named 'sp'"):
        meshes.lines(meshes.grid(), "sp")


def test_one_rank_needs_no_process_group():
    mesh = meshes.make_mesh()
    assert mesh == meshes.one_rank() and mesh.size == 1
    for name in meshes.AXES:
        axis = getattr(mesh, name)
        assert (axis.name, axis.ranks, axis.index, axis.group) == (name, (0,), 0, None)
        assert axis.is_first and axis.is_last


def device_mesh():
    mesh = meshes.make_mesh(dp=2, pp=2, tp=2)
    dp = meshes.mesh_of(mesh.dp, "cpu")
    whole = dist.tensor.distribute_tensor(torch.arange(6.0), dp, [dist.tensor.Shard(0)])
    found = dp.mesh.tolist(), dp.mesh_dim_names, whole.to_local().tolist()
    same_group = dp.get_group() is mesh.dp.group
    dist.barrier()
    mesh.close()
    mesh = meshes.make_mesh(dp=8)
    assert mesh.dp.group is mesh.edp.group is mesh.dp_cp.group is dist.group.WORLD
    assert mesh.tp.group is None and mesh.cp.group is None
    alone = meshes.mesh_of(mesh.tp, "cpu")
    assert alone.mesh.tolist() == [dist.get_rank()] and alone.get_group().size() == 1
    mesh.close()
    dist.barrier()  # the world still works
    return found, same_group


def test_torchs_libraries_take_an_axis(ranks):
    for rank, (found, same_group) in enumerate(ranks.run(device_mesh)):
        place = rank // 2 % 2
        partners = [rank - 2 * place, rank - 2 * place + 2]
        assert found == (partners, ("dp",), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]][place])
        assert same_group


