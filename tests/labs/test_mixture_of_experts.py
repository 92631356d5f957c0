"""Lab 09: the answers that its checks must accept and reject, and its pieces."""

import itertools

import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests
from utils.course.trial import Trial

LAB = Lab(
    "09_mixture_of_experts",
    {
        "all_to_all": ("check_dispatch", "all_to_all", "dispatch.py"),
        "dispatch": ("check_dispatch", "dispatching", "dispatch.py"),
        "combine": ("check_dispatch", "combining", "dispatch.py"),
    },
    {"utils.course.trial.HANG": 6.0},
)

OTHERS = {
    "all_to_all: one function for both ways, waited for": """
def exchange(rows, send, receive):
    if dist.get_world_size() == 1:
        return rows.clone()
    arrived = rows.new_zeros(sum(receive), rows.shape[1])
    dist.all_to_all_single(arrived, rows.clone(memory_format=torch.contiguous_format), receive,
                           send, async_op=True).wait()
    return arrived


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.lists = receive, send
        return exchange(rows, send, receive)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, *ctx.lists), None, None
""",
    "dispatch: counts by an all-gather, sorted the other way": """
def tell(counts):
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone = [torch.empty_like(counts) for _ in range(size)]
    dist.all_gather(everyone, counts)
    return torch.stack(everyone).view(size, size, -1)[:, rank]


def dispatch(tokens, chosen, experts):
    size, k = dist.get_world_size(), chosen.shape[1]
    places = [(int(e), i) for i, e in enumerate(chosen.flatten())]
    order = [i for e, i in sorted(places, key=lambda pair: (pair[0], -pair[1]))]
    order = torch.tensor(order, dtype=torch.long)
    counts = torch.tensor([sum(e == x for e, _ in places) for x in range(experts)])
    arriving = tell(counts).tolist()
    send = counts.view(size, -1).sum(1).tolist()
    receive = [sum(row) for row in arriving]
    rows = AllToAll.apply(tokens.index_select(0, order // k), send, receive)
    owner = torch.tensor([e for row in arriving for e, n in enumerate(row) for _ in range(n)])
    by_expert = owner.long().argsort()
    loads = torch.tensor(arriving).sum(0).tolist()
    return rows[by_expert], Way(order, send, receive, by_expert, loads)
""",
    "all_to_all: tuples in ctx, a buffer of zeros": """
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.lists, ctx.width = (tuple(send), tuple(receive)), rows.size(1)
        out = torch.zeros((sum(receive), ctx.width), dtype=rows.dtype, device=rows.device)
        flat = rows.detach().clone(memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, flat, output_split_sizes=list(receive),
                               input_split_sizes=list(send))
        return out

    @staticmethod
    def backward(ctx, gradient):
        send, receive = map(list, ctx.lists)
        out = torch.empty((sum(send), ctx.width), dtype=gradient.dtype)
        dist.all_to_all_single(out, gradient.reshape(-1).view(-1, ctx.width).clone(), send, receive)
        return out, None, None
""",
    "all_to_all: numbers in place of rows": """
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, send, receive):
        ctx.send, ctx.receive, width = send, receive, rows.shape[1]
        arrived = rows.new_empty(width * sum(receive))
        dist.all_to_all_single(arrived, rows.contiguous().flatten(), [width * n for n in receive],
                               [width * n for n in send])
        return arrived.view(-1, width)

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.receive, ctx.send), None, None
""",
    "all_to_all: lists kept as tensors by setup_context": """
class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(rows, send, receive):
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        work = dist.all_to_all_single(arrived, rows.contiguous(), receive, send, async_op=True)
        work.wait()
        return arrived

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.send, ctx.receive = map(torch.tensor, inputs[1:])

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.forward(gradient, ctx.receive.tolist(), ctx.send.tolist()), None, None
""",
    "dispatch: counts in 32 bits, sizes as tuples": """
def tell(counts):
    small = counts.int()
    arriving = torch.empty_like(small)
    dist.all_to_all_single(arriving, small, async_op=True).wait()
    return arriving.view(dist.get_world_size(), -1).long()


class AllToAll(AllToAll):
    @staticmethod
    def forward(ctx, rows, send, receive):
        return super(AllToAll, AllToAll).forward(ctx, rows, list(send), list(receive))


_dispatch = dispatch

def dispatch(tokens, chosen, experts):
    rows, way = _dispatch(tokens, chosen, experts)
    way.loads, way.send, way.receive = map(tuple, (way.loads, way.send, way.receive))
    return rows, way
""",
    "dispatch: an expert at a time": """
def dispatch(tokens, chosen, experts):
    size, k = dist.get_world_size(), chosen.shape[1]
    order = torch.cat([(chosen.flatten() == e).nonzero().flatten() for e in range(experts)])
    counts = torch.stack([(chosen == e).sum() for e in range(experts)])
    arriving = tell(counts)
    send, receive = counts.view(size, -1).sum(1).tolist(), arriving.sum(1).tolist()
    rows = AllToAll.apply(tokens.repeat_interleave(k, dim=0)[order], send, receive)
    starts = arriving.flatten().cumsum(0).view_as(arriving) - arriving
    by_expert = torch.cat([
        torch.arange(int(starts[r, e]), int(starts[r, e] + arriving[r, e]))
        for e in range(arriving.shape[1]) for r in range(size)
    ])
    return rows[by_expert], Way(order, send, receive, by_expert, arriving.sum(0).tolist())
""",
    "dispatch: no message of one rank": """
_tell = tell

def tell(counts):
    return counts[None].clone() if dist.get_world_size() == 1 else _tell(counts)
""",
    "combine: a matrix product for each token": """
def combine(results, weights, way):
    arrived = torch.empty_like(results)
    arrived[way.by_expert] = results
    rows = AllToAll.apply(arrived, way.receive, way.send)
    back = torch.empty_like(way.order)
    back[way.order] = torch.arange(len(way.order))
    choices = rows[back].view(*weights.shape, rows.shape[1])
    return torch.einsum("sk,skc->sc", weights, choices)
""",
    "combine: weighted where they come home": """
def combine(results, weights, way):
    rows = AllToAll.apply(results[torch.argsort(way.by_expert)], way.receive, way.send)
    rows = rows * weights.reshape(-1, 1)[way.order]
    return rows[way.order.argsort()].reshape(*weights.shape, rows.shape[1]).sum(1)
""",
    "combine: choice by choice": """
def combine(results, weights, way):
    rows = AllToAll.apply(results[way.by_expert.argsort()], way.receive, way.send)
    choices = rows[way.order.argsort()].unflatten(0, weights.shape)
    y = torch.zeros_like(choices[:, 0])
    for k in reversed(range(weights.shape[1])):
        y = y + weights[:, k, None] * choices[:, k]
    return y
""",
    "combine: scattered to its places": """
def combine(results, weights, way):
    arrived = torch.zeros_like(results).index_copy(0, way.by_expert, results)
    rows = AllToAll.apply(arrived, way.receive, way.send)
    weighed = rows * weights.flatten()[way.order, None]
    y = rows.new_zeros(len(weights), rows.shape[1])
    return y.index_add(0, way.order // weights.shape[1], weighed)
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 65, (12, 6, 4)

    def task(self, exercise, tasks):
        return tasks[{"all_to_all": 0, "dispatch": 2, "combine": 3}[exercise]]


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_cases_are_as_uneven_as_they_say():
    from labs.support.mixture_of_experts.check_dispatch import _layers, _tables
    from labs.support.mixture_of_experts.scenarios import EXAMPLE

    for size, seed in itertools.product((1, 2, 3, 6), range(5)):
        trial = Trial("dispatch.py", seed)
        odd, idle, equal = _tables(trial, size)
        assert size == 1 or all(sum(odd.send(r)) % size for r in range(size))
        assert len({count for row in equal.counts for count in row}) == 1
        assert any(not sum(idle.send(r)) or not sum(idle.receive(r)) for r in range(size))
        for case in (*_layers(trial, size), EXAMPLE):
            assert case.size == 1 or 0 in case.tokens or min(case.tokens) > 255
            chosen = torch.cat([case.chosen_of(rank) for rank in range(case.size)])
            assert all(len(set(row)) == case.choices for row in chosen.tolist())
            assert case.wanted is None or set(chosen.flatten().tolist()) <= set(case.wanted)
