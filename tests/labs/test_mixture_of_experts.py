"""Lab 09: the answers that its checks must accept and reject, and its pieces."""

import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

LAB = Lab(
    "09_mixture_of_experts",
    {
        "all_to_all": ("check_dispatch", "all_to_all", "dispatch.py"),
        "dispatch": ("check_dispatch", "dispatching", "dispatch.py"),
        "combine": ("check_dispatch", "combining", "dispatch.py"),
    },
    {"utils.course.checks.HANG": 6.0},
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
    lab, others, least = LAB, OTHERS, 30

    def task(self, exercise, tasks):
        return tasks[{"all_to_all": 0, "dispatch": 2, "combine": 3}[exercise]]


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_loads_are_as_uneven_as_they_say():
    from labs.support.mixture_of_experts.scenarios import CASES, ODD, PER_RANK, TABLE, chosen_of

    assert all(sum(row[:size]) % size for size in (2, 3, 4) for row in ODD[:size])
    assert sum(TABLE[1]) == 0 and sum(row[1] for row in TABLE[:2]) == 0
    assert any(0 in case.tokens for case in CASES)
    for case in CASES:
        for size in (1, 2, 3, 4):
            chosen = torch.cat([chosen_of(case, rank, size) for rank in range(size)])
            assert all(len(set(row)) == case.choices for row in chosen.tolist())
            if case.wanted and size > 1:
                assert chosen.max() < PER_RANK  # all on rank 0
            elif size > 1:
                assert not (chosen == 1).any()
