"""Traffic counts exactly what is sent: against formulas and against an independent reference.

The reference is PyTorch's flight recorder, which notes every collective inside the C++ process
group.
"""

import json
import math
import warnings

import pytest
import torch
import torch.distributed as dist

from utils.measure.traffic import OPERATIONS, Traffic
from utils.ranks import Ranks

FLOAT = 4  # bytes of a float32


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request):
    with Ranks(request.param) as group:
        yield group


def counted(traffic: Traffic) -> dict:
    """A rank's {operation: (calls, payload, sent)}."""
    return {
        op: (traffic.calls(op), traffic.payload(op), traffic.sent(op))
        for op in OPERATIONS
        if traffic.calls(op)
    }


def recorded() -> list[tuple[str, list]]:
    """This process's flight recorder so far: [(operation, input sizes)]."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    entries = json.loads(_dump_fr_trace_json()).get("entries", [])
    return [(e["profiling_name"].split(":")[-1], e["input_sizes"]) for e in entries]


# ── each operation by itself ──────────────────────────────────────────────────────────────────


def each_operation(length: int) -> dict:
    """Run every operation once on `length` floats; returns this rank's {name: counted}."""
    warnings.simplefilter("ignore", FutureWarning)  # two names changed between torch 2.11 and 2.13
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.ones(length)
    parts = [torch.ones(length) for _ in range(size)]
    flat = torch.ones(length * size)
    last = size - 1
    operations = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce async": lambda: dist.all_reduce(x, async_op=True).wait(),
        "broadcast": lambda: dist.broadcast(x, src=last),
        "reduce": lambda: dist.reduce(x, dst=last),
        "all_gather": lambda: dist.all_gather(parts, x),
        "all_gather flat": lambda: dist.all_gather_into_tensor(flat, x),
        "reduce_scatter": lambda: dist.reduce_scatter(x, parts),
        "reduce_scatter flat": lambda: dist.reduce_scatter_tensor(x, flat),
        "gather": lambda: dist.gather(x, parts if rank == last else None, dst=last),
        "scatter": lambda: dist.scatter(x, parts if rank == last else None, src=last),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(flat), flat),
        "barrier": lambda: dist.barrier(),
    }
    result = {}
    for name, operation in operations.items():
        with Traffic() as traffic:
            operation()
        result[name] = counted(traffic)
    return result


@pytest.mark.parametrize("length", [7, 0])
def test_each_operation_is_exact(ranks, length):
    size, last, whole = ranks.size, ranks.size - 1, length * FLOAT
    ring = 2 * (size - 1) * whole / size
    for rank, result in enumerate(ranks.run(each_operation, length)):
        chain = whole * ((rank + 1) % size != last)  # the rank before the root ends the chain
        to_root = whole * (rank != last)
        total, root_total = size * whole, size * whole * (rank == last)
        expected = {
            "all_reduce": (1, whole, ring),
            "all_reduce async": (1, whole, ring),
            "broadcast": (1, whole, chain),
            "reduce": (1, whole, to_root),
            "all_gather": (1, whole, (size - 1) * whole),
            "all_gather flat": (1, whole, (size - 1) * whole),
            "reduce_scatter": (1, total, (size - 1) * whole),
            "reduce_scatter flat": (1, total, (size - 1) * whole),
            "gather": (1, whole, to_root),
            "scatter": (1, root_total, root_total * (size - 1) // size),
            "all_to_all": (1, total, (size - 1) * whole),
            "barrier": (1, 0, 0),
        }
        assert result == {name: {name.split()[0]: count} for name, count in expected.items()}


def uneven_all_to_all() -> dict:
    """Rank r sends k + 1 floats to rank k."""
    rank, size = dist.get_rank(), dist.get_world_size()
    splits = [k + 1 for k in range(size)]
    with Traffic() as traffic:
        dist.all_to_all_single(
            torch.empty(size * (rank + 1)), torch.ones(sum(splits)), [rank + 1] * size, splits
        )
    return counted(traffic)


def test_uneven_all_to_all_leaves_out_the_own_part(ranks):
    total = sum(range(1, ranks.size + 1)) * FLOAT
    for rank, result in enumerate(ranks.run(uneven_all_to_all)):
        assert result == {"all_to_all": (1, total, total - (rank + 1) * FLOAT)}


def messages_around_the_ring() -> tuple[dict, list]:
    """One blocking, one asynchronous and one batched message to the next rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    x, y = torch.ones(5, dtype=torch.float64), torch.empty(5, dtype=torch.float64)
    with Traffic() as traffic:
        if rank % 2 == 0 and rank + 1 < size:
            dist.send(x, following)
            dist.isend(x, following).wait()
        elif rank % 2 == 1:
            dist.recv(y, previous)
            dist.irecv(y, previous).wait()
        if size > 1:
            ops = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, y, previous)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        dist.barrier()
    return counted(traffic), [(e.op, e.peer) for e in traffic.events if e.peer is not None]


def test_messages_are_counted_with_their_peer(ranks):
    size, message = ranks.size, 5 * 8
    for rank, (result, peers) in enumerate(ranks.run(messages_around_the_ring)):
        pair_sends = 2 * (rank % 2 == 0 and rank + 1 < size)
        pair_receives = 2 * (rank % 2 == 1)
        sends, receives = pair_sends + (size > 1), pair_receives + (size > 1)
        expected = {"barrier": (1, 0, 0)}
        if sends:
            expected["send"] = (sends, sends * message, sends * message)
        if receives:
            expected["recv"] = (receives, receives * message, 0)
        assert result == expected
        assert {peer for op, peer in peers if op == "send"} <= {(rank + 1) % size}
        assert {peer for op, peer in peers if op == "recv"} <= {(rank - 1) % size}


# ── collectives of DDP, hooks, DTensor and FSDP2 ──────────────────────────────────────────────


def training_steps(kind: str) -> tuple[dict, list, list, list]:
    """Four training steps: Traffic's counts and events, the reference's notes, async flags."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(6)])
    before = len(recorded())
    with Traffic() as traffic:
        if kind == "fsdp2":
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        else:
            model = DistributedDataParallel(
                model, bucket_cap_mb=1 if kind.endswith("powersgd") else 0.002
            )
        if kind == "ddp with a hook":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if kind == "ddp with powersgd":
            state = powerSGD_hook.PowerSGDState(
                None, 1, start_powerSGD_iter=2, min_compression_rate=1
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(4):
            skip = kind == "ddp without sync" and step < 3
            with model.no_sync() if skip else warnings.catch_warnings():
                model(torch.ones(3, 16)).sum().backward()
    judge = recorded()[before:]
    sizes = [(e.op, e.payload) for e in traffic.events]
    return counted(traffic), sizes, judge, [e.asynchronous for e in traffic.events]


KINDS = ["ddp", "ddp with a hook", "ddp with powersgd", "ddp without sync", "fsdp2"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_missed_and_nothing_counted_twice(ranks, kind):
    # gloo runs a reduce-scatter as an all-reduce, and its recorder says so
    names = {"all_reduce": "reduce_scatter"} if kind == "fsdp2" else {}
    for _, events, judge, _ in ranks.run(training_steps, kind):
        assert [op for op, _ in events] == [names.get(name, name) for name, _ in judge]
        if kind != "ddp with a hook":  # whose elements are not four bytes
            reduced = ("all_reduce", "reduce_scatter")
            ours = [payload for op, payload in events if op in reduced]
            theirs = [math.prod(sizes[0]) * FLOAT for name, sizes in judge if name in reduced]
            assert ours == theirs


def test_ddp_sends_each_gradient_once(ranks):
    """In four steps the all-reduces' payload is four times the model, half of that with fp16."""
    model = 6 * (16 * 16 + 16) * FLOAT
    for counts, _, _, asynchronous in ranks.run(training_steps, "ddp"):
        calls, payload, sent = counts["all_reduce"]
        assert calls > 4  # several buckets
        assert payload == 4 * model
        assert sent == 2 * (ranks.size - 1) * payload / ranks.size
        assert all(asynchronous)
    for counts, *_ in ranks.run(training_steps, "ddp with a hook"):
        assert counts["all_reduce"][1] == 4 * model // 2
    for counts, *_ in ranks.run(training_steps, "ddp without sync"):
        assert counts["all_reduce"][1] == model


def tensor_parallel_step() -> dict:
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8 * size), torch.nn.Linear(8 * size, 8))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = torch.ones(3, 8, requires_grad=True)
    with Traffic() as traffic:
        model(x).sum().backward()
    return counted(traffic)


def test_collectives_inside_dtensor_are_counted_once(ranks):
    """A column-parallel and a row-parallel layer: one all-reduce of (3, 8) floats in each pass."""
    for result in ranks.run(tensor_parallel_step):
        if ranks.size > 1:
            assert result["all_reduce"][:2] == (2, 2 * 3 * 8 * FLOAT)


def subgroup() -> dict | None:
    """An all-reduce over the first two ranks only."""
    group = dist.new_group([0, 1])
    with Traffic() as traffic:
        if dist.get_rank() < 2:
            dist.all_reduce(torch.ones(6), group=group)
    return counted(traffic)


def test_a_group_counts_with_its_own_size(ranks):
    if ranks.size == 3:
        assert ranks.run(subgroup) == [{"all_reduce": (1, 24, 24)}] * 2 + [{}]


# ── the context manager ───────────────────────────────────────────────────────────────────────


def entered_twice() -> tuple[int, int, str, list]:
    traffic = Traffic()
    with traffic:
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))  # outside: not counted
    with traffic:
        dist.all_reduce(torch.ones(3), async_op=True).wait()
    flags = [event.asynchronous for event in traffic.events]
    return traffic.calls(), traffic.payload("all_reduce"), str(traffic), flags


def test_counts_go_on_and_stop_outside(ranks):
    for calls, payload, table, flags in ranks.run(entered_twice):
        assert (calls, payload) == (2, 24)
        assert flags == [False, True]
        lines = table.splitlines()
        assert lines[0].split() == ["operation", "calls", "payload", "bytes", "bytes", "sent"]
        assert lines[1].split()[:3] == ["all_reduce", "2", "24"]


def test_an_unknown_name_is_one_clear_sentence():
    with pytest.raises(ValueError, match="no operation is named 'allreduce': use one of all_red"):
        Traffic().calls("allreduce")
    assert str(Traffic()) == "no communication"
