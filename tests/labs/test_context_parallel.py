"""Lab 07: the answers that its checks must accept and reject, and its pieces."""

import itertools

import pytest
import torch

from tests.labs.answers import Lab
from tests.labs.lab_tests import LabTests

EXERCISES = {
    "merge": "check_merge", "ring": "check_ring", "backward": "check_ring",
    "zigzag": "check_ring", "ulysses": "check_ulysses",
}  # fmt: skip
LAB = Lab(
    "07_context_parallel",
    {name: (module, name, "context.py") for name, module in EXERCISES.items()},
    {"utils.course.trial.HANG": 12.0},  # next to none hangs; a busy machine must not look so
)
TASKS = {"merge": 0, "ring": 2, "backward": 3, "zigzag": 4, "ulysses": 6}

OTHERS = {
    "merge: the larger one first": """
def merge(out, lse, more, more_lse):
    largest = torch.maximum(lse, more_lse)
    base = largest.masked_fill(largest == -torch.inf, 0.0)
    first, second = (lse - base).exp(), (more_lse - base).exp()
    total = first + second
    share = (second / total.masked_fill(total == 0, 1.0))[..., None]
    merged = out.to(lse.dtype) * (1 - share) + more.to(lse.dtype) * share
    return merged.to(out.dtype), base + total.log()
""",
    "merge: a sigmoid": """
def merge(out, lse, more, more_lse):
    share = torch.sigmoid(more_lse - lse).masked_fill(more_lse == -torch.inf, 0.0)[..., None]
    merged = (1 - share) * out + share * more
    return merged.to(out.dtype), torch.logaddexp(lse, more_lse)
""",
    "merge: side by side": """
def merge(out, lse, more, more_lse):
    total = torch.logsumexp(torch.stack((lse, more_lse)), dim=0)
    base = total.masked_fill(total == -torch.inf, 0.0)
    merged = (lse - base).exp()[..., None] * out
    return (merged + (more_lse - base).exp()[..., None] * more).to(out.dtype), total
""",
    "merge: where nothing was seen, by where": """
def merge(out, lse, more, more_lse):
    total = torch.logaddexp(lse, more_lse)
    first = torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total)).unsqueeze(-1)
    second = torch.where(more_lse == -torch.inf, 0.0, torch.exp(more_lse - total)).unsqueeze(-1)
    return [torch.addcmul(out * first, more, second).to(out.dtype), total]
""",
    "ring: a batch": """
def pass_on(block, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    coming = torch.empty(2, block.shape[1], length, *block.shape[3:], dtype=block.dtype)
    return coming, dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, coming, (rank - 1) % size),
        dist.P2POp(dist.isend, block, (rank + 1) % size),
    ])
""",
    "ring: keys and values apart": """
def pass_on(block, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    coming = block.new_zeros(2, block.shape[1], length, *block.shape[3:])
    works = [dist.irecv(one, (rank - 1) % size) for one in coming]
    works += [dist.isend(one, (rank + 1) % size) for one in block]
    return coming, works
""",
    "ring: nothing travels that nobody sees": """
def ring_attention(q, k, v, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, block = shares(length, size), torch.stack((k, v))
    for turn in range(rank + 1):
        works = []
        if rank < size - 1:
            works.append(dist.isend(block, rank + 1))
        if turn < rank:
            coming = block.new_empty(2, len(k), sizes[rank - turn - 1], *k.shape[2:])
            works.append(dist.irecv(coming, rank - 1))
        part = attend(q, *block, causal=turn == 0)
        found = merge(*found, *part) if turn else part
        wait(works)
        block = coming if turn < rank else None
    return found
""",
    "ring: two buffers": """
def ring_attention(q, k, v, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = shares(length, size)
    buffers = [k.new_empty(2 * len(k) * max(sizes) * k[0, 0].numel()) for _ in range(2)]
    def view(buffer, owner):
        shape = torch.Size((2, len(k), sizes[owner % size], *k.shape[2:]))
        return buffer[: shape.numel()].view(shape)
    block = view(buffers[0], rank)
    block[0], block[1] = k, v
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for turn in range(size):
        owner = (rank - turn) % size
        works = []
        if turn < size - 1:
            coming = view(buffers[(turn + 1) % 2], owner - 1)
            works = [dist.irecv(coming, (rank - 1) % size), dist.isend(block, (rank + 1) % size)]
        if owner <= rank:
            out, lse = merge(out, lse, *attend(q, *block, causal=turn == 0))
        wait(works)
        block = coming if works else block
    return out, lse
""",
    "ring: the CPU's kernel": """
def attend(q, k, v, causal):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)
""",
    "ring: einsum, head by head": """
def attend(q, k, v, causal):
    outs, sums = [], []
    for head in range(q.shape[2]):
        own = head // (q.shape[2] // k.shape[2])
        scores = torch.einsum("btd,bsd->bts", q[:, :, head] / q.shape[-1] ** 0.5, k[:, :, own])
        if causal:
            scores = scores + torch.full(scores.shape[1:], -torch.inf).triu(1).to(scores.dtype)
        sums.append(scores.logsumexp(-1))
        outs.append(torch.bmm(scores.softmax(-1), v[:, :, own]))
    return torch.stack(outs, 2), torch.stack(sums, 2)
""",
    "backward: a batch, receives first": """
def pass_on(block, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    coming = torch.zeros(2, block.shape[1], length, *block.shape[3:], dtype=block.dtype)
    return coming, dist.batch_isend_irecv([
        dist.P2POp(dist.irecv, coming, (rank - 1) % size),
        dist.P2POp(dist.isend, block, (rank + 1) % size),
    ])
""",
    "backward: one rank after the other in a list": """
def ring_attention_backward(dout, q, k, v, out, lse, length, given=ring_attention_backward):
    return list(given(dout, q, k, v, out, lse, length))
""",
    "backward: keys and values apart, gradients in advance": """
def ring_attention_backward(dout, q, k, v, out, lse, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    sizes, keys, values = shares(length, size), k.contiguous(), v.contiguous()
    dq, come, works = torch.zeros_like(q), None, []
    for turn in range(size):
        owner = (rank - turn) % size
        coming, moving = None, []
        if turn < size - 1:
            shape = len(k), sizes[owner - 1], *k.shape[2:]
            coming = k.new_empty(shape), k.new_empty(shape)
            moving = [dist.irecv(one, before) for one in coming]
            moving += [dist.isend(one, after) for one in (keys, values)]
        dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
        if owner <= rank:
            more, dk, dv = attend_backward(dout, q, keys, values, out, lse, turn == 0)
            dq += more
        for work in works:
            work.wait()
        if come:
            dk, dv = dk + come[0], dv + come[1]
        if size == 1:
            return dq, dk, dv
        dk, dv = dk.contiguous(), dv.contiguous()
        shape = len(k), sizes[owner - 1], *k.shape[2:]
        come = k.new_empty(shape), k.new_empty(shape)
        works = [dist.isend(one, after) for one in (dk, dv)]
        works += [dist.irecv(one, before) for one in come]
        for work in moving:
            work.wait()
        if coming:
            keys, values = coming
    for work in works:
        work.wait()
    return dq, *come
""",
    "backward: the CPU's kernel": """
def attend_backward(dout, q, k, v, out, lse, causal):
    heads = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = kernel(*heads, lse.transpose(1, 2).contiguous(), 0.0, causal)
    return [x.transpose(1, 2) for x in found]
""",
    "ring: sums in fp64": """
def ring_attention(q, k, v, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes, block = shares(length, size), torch.stack((k, v))
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=torch.float64)
    for turn in range(size):
        owner, works = (rank - turn) % size, []
        if turn < size - 1:
            coming, works = pass_on(block, sizes[owner - 1])
        if owner <= rank:
            part = attend(q, *block, causal=turn == 0)
            out, lse = merge(out, lse, *(x.double() for x in part))
        wait(works)
        block = coming if works else block
    return out.to(q.dtype), lse.to(q.dtype)
""",
    "backward: einsum for each product": """
def attend_backward(dout, q, k, v, out, lse, causal):
    scores = _scores(q, k, causal)
    weights = (scores - lse.transpose(1, 2)[..., None]).exp()
    dweights = torch.einsum("bthd,bhsd->bhts", dout, _heads_first(v, q))
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    dscores = weights * (dweights - delta) / q.shape[-1] ** 0.5
    dq = torch.einsum("bhts,bhsd->bthd", dscores, _heads_first(k, q))
    dk = torch.einsum("bhts,bthd->bshd", dscores, q)
    dv = torch.einsum("bhts,bthd->bshd", weights, dout)
    return dq, *(x.unflatten(2, (k.shape[2], -1)).sum(3) for x in (dk, dv))
""",
    "zigzag: lists of numbers": """
def zigzag_positions(length, ranks):
    ends = torch.tensor([0, *shares(length, 2 * ranks)]).cumsum(0).tolist()
    def block(i):
        return list(range(ends[i], ends[i + 1]))
    return tuple((block(rank), block(2 * ranks - 1 - rank)) for rank in range(ranks))
""",
    "zigzag: its own blocks in three products": """
def attend(q, k, v, causal, given=attend):
    if not causal or dist.get_world_size() == 1 or q.shape[1] < 2:
        return given(q, k, v, causal)
    half = q.shape[1] // 2
    first = given(q[:, :half], k[:, :half], v[:, :half], True)
    second = given(q[:, half:], k[:, half:], v[:, half:], True)
    second = merge(*second, *given(q[:, half:], k[:, :half], v[:, :half], False))
    return [torch.cat(pair, dim=1) for pair in zip(first, second)]
""",
    "zigzag: halves of their own": """
def zigzag_attention(q, k, v, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    places = zigzag_positions(length, size)
    e = len(places[rank][0])
    block = torch.stack((k, v))
    for turn in range(size):
        owner = (rank - turn) % size
        works = []
        if turn < size - 1:
            coming, works = pass_on(block, sum(map(len, places[owner - 1])))
        first = len(places[owner][0])
        if turn == 0:
            early = attend(q[:, :e], k[:, :e], v[:, :e], True)
            late = merge(*attend(q[:, e:], k[:, e:], v[:, e:], True),
                         *attend(q[:, e:], k[:, :e], v[:, :e], False))
        else:
            late = merge(*late, *attend(q[:, e:], *block[:, :, :first], False))
        if owner < rank:
            early = merge(*early, *attend(q[:, :e], *block[:, :, :first], False))
        elif owner > rank:
            late = merge(*late, *attend(q[:, e:], *block[:, :, first:], False))
        wait(works)
        if works:
            block = coming
    return torch.cat((early[0], late[0]), 1), torch.cat((early[1], late[1]), 1)
""",
    "zigzag: a batch": """
def pass_on(block, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    coming = torch.empty(2, block.shape[1], length, *block.shape[3:], dtype=block.dtype)
    return coming, dist.batch_isend_irecv([
        dist.P2POp(dist.isend, block, (rank + 1) % size),
        dist.P2POp(dist.irecv, coming, (rank - 1) % size),
    ])
""",
    "ulysses: q, k and v apart, torch's attention": """
def ulysses_attention(q, k, v, length):
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = shares(length, size)
    queries, keys = heads_of_ranks(q.shape[2], k.shape[2], size)
    whole = []
    for x, heads in ((q, queries), (k, keys), (v, keys)):
        shapes = [(len(x), t, len(heads[rank]), x.shape[3]) for t in lengths]
        whole.append(torch.cat(all_to_all([x[:, :, one] for one in heads], shapes), 1))
    group = q.shape[2] // k.shape[2]
    looks_at = [head // group - keys[rank][0] for head in queries[rank]]
    wide = (whole[0], whole[1][:, :, looks_at], whole[2][:, :, looks_at])
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in wide), is_causal=True).transpose(1, 2)
    shapes = [(*q.shape[:2], len(one), q.shape[3]) for one in queries]
    return torch.cat(all_to_all(list(out.split(lengths, 1)), shapes), 2)
""",
    "ulysses: one rank says nothing": """
def ulysses_attention(q, k, v, length, given=ulysses_attention):
    if dist.get_world_size() == 1:
        return attend(q, k, v, True)[0]
    return given(q, k, v, length)
""",
    "ulysses: started, and waited for": """
def all_to_all(parts, shapes):
    send = [part.numel() for part in parts]
    receive = [torch.Size(shape).numel() for shape in shapes]
    arrived = parts[0].new_empty(sum(receive))
    rows = torch.cat([part.reshape(-1) for part in parts])
    dist.all_to_all_single(arrived, rows, receive, send, async_op=True).wait()
    return [part.view(shape) for part, shape in zip(arrived.split(receive), shapes)]
""",
    "ulysses: tuples and ranges": """
def heads_of_ranks(heads, kv_heads, ranks):
    if heads < ranks:
        raise ValueError(f"heads {heads} < ranks {ranks}")
    ends = [0, *itertools.accumulate(shares(heads, ranks))]
    group = heads // kv_heads
    queries = [range(a, b) for a, b in itertools.pairwise(ends)]
    keys = [range(mine[0] // group, mine[-1] // group + 1) for mine in queries]
    return tuple(map(list, queries)), tuple(map(list, keys))


import itertools
""",
}


class TestLab(LabTests):
    lab, others, least, each = LAB, OTHERS, 80, (14, 7, 4)

    def task(self, exercise, tasks):
        return tasks[TASKS[exercise]]


# ── the pieces ────────────────────────────────────────────────────────────────────────────────


def test_the_reference_is_torch_s():
    from labs.support.context_parallel import scenarios

    case = {
        "length": 7, "batch": 2, "heads": 6, "kv_heads": 2, "width": 4, "dtype": torch.float32,
        "seed": 3, "scale": 1.0, "zigzag": False, "sliced": False,
    }  # fmt: skip
    right, made = scenarios.right(case), scenarios.whole(case)
    q, k, v = (made[name].double().transpose(1, 2).requires_grad_() for name in "qkv")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    gradients = torch.autograd.grad(out, (q, k, v), made["dout"].double().transpose(1, 2))
    torch.testing.assert_close(right["out"], out.transpose(1, 2))
    for name, gradient in zip(("dq", "dk", "dv"), gradients):
        torch.testing.assert_close(right[name], gradient.transpose(1, 2))


@pytest.mark.parametrize("zigzag", [False, True])
def test_cases_are_as_uneven_as_they_say(zigzag):
    from labs.support.context_parallel import judging, scenarios
    from utils.course.trial import Trial

    for size, seed in itertools.product((1, 2, 3, 4, 5, 6), range(6)):
        parts = size * (1 + zigzag)
        uneven, even = judging.cases(Trial("context.py", seed), size, zigzag, least=size)
        assert (uneven["length"] % parts > 0) is (parts > 1) and even["length"] % parts == 0
        assert {uneven["dtype"], even["dtype"]} == {torch.float32, torch.float64}
        for case in (uneven, even):
            places = scenarios.places_of(case, size)
            held = sorted(itertools.chain.from_iterable(places))
            assert held == list(range(case["length"]))
            assert all(places) and case["heads"] % case["kv_heads"] == 0 and case["heads"] >= size


def test_what_is_sent_is_what_the_formulas_say(tmp_path):
    from labs.support.context_parallel.measurements import LENGTH, WIDTH, drawn_heads, measured

    thrifty = OTHERS["ring: nothing travels that nobody sees"].replace("def ", "def thrifty_")
    (tmp_path / "context.py").write_text(LAB.source("ring") + thrifty)
    heads, size = drawn_heads(4), 4
    assert heads == drawn_heads(4) and heads.query % size == 0
    found = measured(size, tmp_path / "context.py", heads)
    assert len(found) == 4 and all(way["right"] for way in found.values())
    number = LENGTH * WIDTH * torch.float32.itemsize  # bytes of one head
    ring = (size - 1) * 2 * heads.key_value * number
    both = 2 * (heads.query + max(heads.key_value, size))
    assert found["ring_attention"]["sent"] == found["zigzag_attention"]["sent"] == ring
    assert found["thrifty_ring_attention"]["sent"] == ring / 2
    assert found["ulysses_attention"]["sent"] == (size - 1) * both * number / size
    assert found["ring_attention"]["work"] == [0.1, 0.2, 0.3, 0.4]
    assert found["zigzag_attention"]["work"] == found["ulysses_attention"]["work"] == [0.25] * size


def test_nothing_is_measured_before_it_is_written(tmp_path):
    from labs.support.context_parallel.measurements import drawn_heads, measured
    from utils.paths import ROOT
    from utils.workshop.labs import generated

    copy = generated(LAB.solution / "context.py", ROOT)
    (tmp_path / "context.py").write_text(copy)
    assert measured(2, tmp_path / "context.py", drawn_heads(0)) == {}
