"""Attention over the positions of several ranks: ours, DeepSpeed-Ulysses, torch, and one rank.

    python -m tests.bench.bench_context                       2 ranks, 1,024 to 4,096 positions
    python -m tests.bench.bench_context --ranks 4 --lengths 8192,32768,131072 --store result.json

All compute causal attention over the same sequence, forward and backward, without projections or
MLP. They take turns on the same ranks, in a new order each round, and ratios are taken within a
round. "one rank" is PyTorch's own attention over the whole sequence on rank 0 while the others
wait: with a core or a GPU per rank, N ranks could be N times as fast. Memory is the highest peak of
any rank, by `utils.measure.memory`. "torch" is PyTorch's experimental context_parallel, for GPUs.
"""

import argparse
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F

from tests.bench.bench_memory import HEAD, in_turn, show, store, summary, this_device
from tests.bench.memory_contenders import Absent
from utils.models.gpt import causal_attention
from utils.parallel.context import WAYS, own_positions
from utils.parallel.mesh import make_mesh, mesh_of
from utils.ranks import Ranks
from utils.shares import share
from utils.training.deepspeed import import_deepspeed


def contender(name, way, whole, axis):
    """Return (step, no model, no optimizer); `whole` is q, k and v of all positions."""
    length, device = whole[0].shape[1], whole[0].device
    if name == "ours":
        mine = [own_positions(x, axis).requires_grad_() for x in whole]
        return backward_of(lambda: WAYS[way](*mine, axis=axis, length=length), mine), None, None
    if name == "one rank":
        alone = [x.clone().requires_grad_() for x in whole]
        step = backward_of(lambda: causal_attention(*alone), alone)
        return (step if axis.is_first else lambda x, y: None), None, None
    neighbours = slice(*share(length, axis.index, axis.size))
    mine = [x[:, neighbours].clone().requires_grad_() for x in whole]
    if name == "deepspeed":
        return backward_of(deepspeed_ulysses(mine, axis, device), mine), None, None
    if device.type != "cuda":
        raise Absent("torch's context_parallel has no kernel for CPUs")
    return torch_context_parallel(whole, axis), None, None


def backward_of(attend, inputs):
    """Return a step that computes attend() and its gradients and ignores its arguments."""

    def step(x, y):
        for tensor in inputs:
            tensor.grad = None
        attend().sum().backward()

    return step


def deepspeed_ulysses(mine, axis, device):
    kv_heads = mine[1].shape[2]
    if kv_heads < axis.size:
        raise Absent(f"DeepSpeed refuses {kv_heads} key-value heads on {axis.size} ranks")
    deepspeed = import_deepspeed(device)
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
    from deepspeed.sequence.layer import DistributedAttention

    def local(q, k, v):
        return causal_attention(q, k, v).unflatten(2, (q.shape[2], -1))

    attention = DistributedAttention(local, axis.group, scatter_idx=2, gather_idx=1)
    return lambda: attention(*mine, 0)


def torch_context_parallel(whole, axis):
    """As in torch's tutorial; needs GPUs."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = mesh_of(axis, whole[0].device.type)

    def step(x, y):
        inputs = [x.transpose(1, 2).contiguous() for x in whole]
        with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2, 2, 2]):
            for tensor in inputs:
                tensor.requires_grad_()
            y = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
            y.sum().backward()

    return step


def compare(way, names, length, heads, kv_heads, size, dtype, rounds):
    """Measure each contender with `in_turn`, on every rank."""
    device, axis = this_device(), make_mesh(cp=dist.get_world_size()).cp
    torch.manual_seed(0)
    whole = [
        torch.randn(1, length, count, size, dtype=dtype).to(device)
        for count in (heads, kv_heads, kv_heads)
    ]

    def build(name):
        return contender(name, way, whole, axis)

    return in_turn(names, build, None, None, device, rounds)


def rows_of(pool, way, sizes):
    """Return {contender: figures}; sizes: (length, heads, kv_heads, head_size, dtype, rounds)."""
    names = ["ours", "one rank"] + ["deepspeed", "torch"] * (way == "ulysses")
    by_rank = pool.run(compare, way, names, *sizes)
    work = SimpleNamespace(batch=1, seq=sizes[0])
    return {who: summary(who, by_rank, work) for who in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"ranks": 2, "heads": 8, "kv_heads": 4, "head_size": 64, "rounds": 7}
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--lengths", default="1024,4096", help="positions, joined by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--store", help="write the figures to this JSON file")
    chosen = parser.parse_args()
    rows = {}
    print(f"{chosen.heads} heads of {chosen.head_size}, {chosen.kv_heads} of keys and values, "
          f"{chosen.dtype}; {chosen.ranks} ranks; {chosen.rounds} rounds")
    print(HEAD)
    with Ranks(chosen.ranks, timeout=300) as pool:
        for length in map(int, chosen.lengths.split(",")):
            for way in WAYS:
                heads = chosen.heads, chosen.kv_heads, chosen.head_size
                kind = getattr(torch, chosen.dtype)
                found = rows_of(pool, way, (length, *heads, kind, chosen.rounds))
                rows[f"{way}, {length}"] = found
                show(f"{way}, {length:,} positions", found)
    if chosen.store:
        store(chosen, "contexts", rows)


if __name__ == "__main__":
    main()
