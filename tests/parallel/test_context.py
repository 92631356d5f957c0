"""Context parallelism: one sequence on N ranks matches one rank, with the formula's traffic."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from utils.measure.traffic import Traffic
from utils.models.gpt import GPT, GPTConfig, causal_attention, cross_entropy
from utils.parallel.context import WAYS, context_parallel, own_positions
from utils.parallel.context import blocks as block
from utils.parallel.context.context_parallel import loss_of_own
from utils.parallel.context.positions import held, in_order, pairs, positions, products
from utils.parallel.context.ring import Ring, attention_over
from utils.parallel.context.ulysses import heads_of_ranks
from utils.parallel.mesh import Axis, make_mesh
from utils.ranks import Ranks

SIZES = (2, 3, 4)


@pytest.fixture(scope="module", params=SIZES)
def pool(request):
    with Ranks(request.param, device="cpu", timeout=60) as ranks:
        yield ranks


def on(sizes, what, values, **options):
    """Parametrize a test with `what`, on a pool of each of `sizes`."""
    cases = [(size, *value) for size in sizes for value in values]
    return pytest.mark.parametrize(f"pool, {what}", cases, indirect=["pool"], **options)


# ---- 1. positions


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 7, 16, 29])
def test_every_position_is_held_once_and_seen_by_those_behind_it(length, ranks, balanced):
    places = positions(length, ranks, balanced)
    whole = [n for mine in places for one in mine for n in one]
    assert sorted(whole) == list(range(length))
    assert max(map(held, places)) - min(map(held, places)) <= (2 if balanced else 1)
    seen = torch.zeros(length, length, dtype=torch.int64)
    for mine, theirs in itertools.product(places, places):
        queries = torch.tensor([n for one in mine for n in one], dtype=torch.int64)
        keys = torch.tensor([n for one in theirs for n in one], dtype=torch.int64)
        for rows, columns, causal in products(mine, theirs):
            looked = torch.ones(len(queries[rows]), len(keys[columns]), dtype=torch.int64)
            looked = looked.tril() if causal else looked
            assert looked.numel()  # no kernel gets an empty block
            seen[queries[rows, None], keys[None, columns]] += looked
        assert pairs(mine, theirs) == (queries[:, None] >= keys[None]).sum()
    assert torch.equal(seen, torch.ones_like(seen).tril())


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_balanced_ranks_do_equal_work_in_every_turn(ranks):
    for balanced in (True, False):
        places = positions(24 * ranks, ranks, balanced)
        turns = [
            {pairs(places[rank], places[(rank - turn) % ranks]) for rank in range(ranks)}
            for turn in range(ranks)
        ]
        assert all(len(equal) == 1 for equal in turns) is balanced
        if not balanced:
            assert all(0 in unequal for unequal in turns[1:])  # some ranks wait


def test_a_whole_sequence_is_put_together_again():
    whole = torch.arange(2 * 13 * 3).view(2, 13, 3)
    for ranks in (1, 2, 5, 8):
        parts = [
            own_positions(whole, Axis("cp", tuple(range(ranks)), r, None)) for r in range(ranks)
        ]
        assert torch.equal(in_order(parts, 13), whole)


# ---- 2. attention in blocks


def heads_of(dtype, rows=2, length=7, heads=4, kv_heads=2, size=8, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, length, count, size) for count in (heads, kv_heads, kv_heads))
    return [
        (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for shape in shapes
    ]


def by_kernel(monkeypatch, name):
    """Let blocks use the CPU's kernel, or the formula written out as on other devices."""
    if name == "written out":
        names = ("_written_out", "_written_out_backward")
        forward, backward = (getattr(block, each) for each in names)
        for each, function in (
            ("_scaled_dot_product_flash_attention_for_cpu",
             lambda q, k, v, p, causal: forward(q, k, v, causal)),
            ("_scaled_dot_product_flash_attention_for_cpu_backward",
             lambda dout, q, k, v, out, lse, p, causal: backward(dout, q, k, v, out, lse, causal)),
        ):
            monkeypatch.setattr(block.Kernel, each, function, raising=False)


@pytest.mark.parametrize("kernel", ["fused", "written out"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("cut", [1, 4, 6])
def test_two_blocks_of_keys_are_one_attention(monkeypatch, kernel, heads, kv_heads, cut):
    by_kernel(monkeypatch, kernel)
    q, k, v = heads_of(torch.float64, heads=heads, kv_heads=kv_heads)
    dout = torch.randn(q.shape, dtype=q.dtype)
    parts = [
        block.attend(q, k[:, some], v[:, some], False) for some in (slice(cut), slice(cut, None))
    ]
    out, lse = block.merge(*parts[0], *parts[1])
    found = [
        block.attend_backward(dout, q, k[:, some], v[:, some], out, lse, False)
        for some in (slice(cut), slice(cut, None))
    ]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in inputs), enable_gqa=True
    ).transpose(1, 2)
    expected.backward(dout)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = (
        found[0][0] + found[1][0],
        *(torch.cat(pair, 1) for pair in zip(found[0][1:], found[1][1:])),
    )
    for gradient, x in zip(gradients, inputs):
        torch.testing.assert_close(gradient, x.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_scores_do_not_overflow(dtype):
    q, k, v = heads_of(dtype, scale=40.0)
    parts = [block.attend(q, k[:, some], v[:, some], False) for some in (slice(3), slice(3, None))]
    out, lse = block.merge(*parts[0], *parts[1])
    whole, whole_lse = block.attend(q, k, v, False)
    assert lse.max() > 100  # exp(lse) overflows fp32
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.to(dtype), whole, rtol=2e-2, atol=1e-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_blocks_on_cuda_are_those_of_the_cpu(dtype, causal):
    q, k, v = heads_of(dtype, length=64, heads=8, size=64)
    dout = torch.randn_like(q)
    found = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device) for x in (q, k, v)]
        out, lse = block.attend(*inputs, causal)
        gradients = block.attend_backward(dout.to(device), *inputs, out, lse, causal)
        found.append([x.cpu().float() for x in (out, lse, *gradients)])
    near = 1e-4 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found[1], found[0], rtol=near, atol=near)


# ---- 3. attention over ranks


def attention(way, dtype, length, heads, kv_heads, count=False):
    """Return (out, [dq, dk, dv]) of this rank; with `count`, also its forward, backward events."""
    axis = make_mesh(cp=dist.get_world_size()).cp
    whole = heads_of(dtype, length=length, heads=heads, kv_heads=kv_heads)
    mine = [own_positions(x, axis).clone().requires_grad_() for x in whole]
    dout = torch.randn(
        whole[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    with Traffic() as traffic:
        out = WAYS[way](*mine, axis=axis, length=length)
        forward = len(traffic.on(axis.group))
        out.backward(own_positions(dout, axis).flatten(2).to(dtype))
    events = [(event.op, event.payload) for event in traffic.on(axis.group)]
    result = out.detach(), [x.grad for x in mine]
    return (*result, events[:forward], events[forward:]) if count else result


def attention_alone(dtype, length, heads, kv_heads):
    inputs = heads_of(dtype, length=length, heads=heads, kv_heads=kv_heads)
    inputs = [x.requires_grad_() for x in inputs]
    dout = torch.randn(
        inputs[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64
    )
    out = causal_attention(*inputs)
    out.backward(dout.flatten(2).to(dtype))
    return out.detach(), [x.grad for x in inputs]


CASES = [  # positions that divide unevenly; fewer key-value heads than ranks, and more
    (torch.float64, 25, 6, 2),
    (torch.float32, 25, 6, 2),
    (torch.bfloat16, 25, 6, 2),
    (torch.float64, 17, 6, 1),
    (torch.float64, 7, 12, 4),
]


@on(SIZES, "way", [(way,) for way in WAYS])
def test_attention_of_n_ranks_is_that_of_one(pool, way):
    results = pool.run(lambda: [attention(way, *case) for case in CASES])
    for number, case in enumerate(CASES):
        dtype, length, *_ = case
        near = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
        expected, gradients = attention_alone(*case)
        found = in_order([result[number][0] for result in results], length)
        torch.testing.assert_close(found, expected, rtol=near, atol=near)
        for place, gradient in enumerate(gradients):
            found = in_order([result[number][1][place] for result in results], length)
            torch.testing.assert_close(found, gradient, rtol=near, atol=2 * near)


def test_more_ranks_than_heads_are_named():
    with pytest.raises(ValueError, match=r"cp 4 is more than the 3 .* --context ring"):
        heads_of_ranks(3, 1, 4)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"), [(8, 4, 4), (8, 2, 4), (6, 2, 4), (7, 7, 3)]
)
def test_each_head_is_computed_once_with_its_own_keys(heads, kv_heads, ranks):
    queries, keys = heads_of_ranks(heads, kv_heads, ranks)
    assert [head for own in queries for head in own] == list(range(heads))
    for mine, theirs in zip(queries, keys):
        group = len(mine) // len(theirs)
        assert [theirs[n // group] for n in range(len(mine))] == [
            h * kv_heads // heads for h in mine
        ]


# ---- 4. traffic


@on((2, 4), "length, heads, kv_heads", [(24, 4, 2), (25, 4, 1)])
def test_messages_and_bytes_are_those_of_the_formula(pool, length, heads, kv_heads):
    ranks, rows, size, value = pool.size, 2, 8, 8
    sizes = [held(place) for place in positions(length, ranks)]

    def kv(tokens):  # bytes of their keys and values
        return 2 * rows * tokens * kv_heads * size * value

    for rank, (_, _, forward, backward) in enumerate(
        pool.run(attention, "ring", torch.float64, length, heads, kv_heads, count=True)
    ):
        there = [kv(sizes[(rank - turn) % ranks]) for turn in range(ranks)]
        assert [sent for op, sent in forward if op == "send"] == there[:-1]
        sent = [sent for op, sent in backward if op == "send"]
        assert sorted(sent) == sorted(there[:-1] + there)  # keys and values, and all gradients
        assert len(backward) == 2 * len(sent)  # a receive for each send

    longest = max(sizes)
    for _, _, forward, backward in pool.run(
        attention, "gather", torch.float64, length, heads, kv_heads, count=True
    ):
        assert forward == [("all_gather", kv(longest))]
        assert backward == [("all_gather", kv(longest)), ("reduce_scatter", ranks * kv(longest))]

    queries, keys = heads_of_ranks(heads, kv_heads, ranks)
    for rank, (_, _, forward, backward) in enumerate(
        pool.run(attention, "ulysses", torch.float64, length, heads, kv_heads, count=True)
    ):
        mine, theirs = queries[rank], keys[rank]
        to_heads = rows * size * value * sizes[rank] * (heads + 2 * sum(map(len, keys)))
        to_places = rows * size * value * length * len(mine)
        assert forward == [("all_to_all", to_heads), ("all_to_all", to_places)]
        back = rows * size * value * sizes[rank] * heads
        home = rows * size * value * length * (len(mine) + 2 * len(theirs))
        assert backward == [("all_to_all", back), ("all_to_all", home)]


# ---- 5. memory


def saved_bytes(config, way, length, ranks):
    """Bytes kept for the backward pass of one row, without parameters, each storage once."""
    model = GPT(config)
    if ranks > 1:
        context_parallel(model, make_mesh(cp=ranks).cp, way)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    tokens = torch.zeros(1, length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(tokens)
        loss = F.cross_entropy(logits[0], torch.zeros(logits.shape[1], dtype=torch.int64))
    loss.backward()
    return sum(size for size, _ in kept.values())


SMALL = GPTConfig(vocab_size=61, hidden_size=24, layers=2, heads=4)
LONG = GPTConfig(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, max_positions=4096)


@on((4,), "way", [(way,) for way in WAYS])
def test_a_rank_keeps_its_share_of_the_activations(pool, way):
    """Ulysses keeps the result in both orders and copies shared key-value heads."""
    length, ranks, size = 1024, pool.size, LONG.head_size
    expected = saved_bytes(LONG, way, length, 1) / ranks
    if way == "ulysses":
        _, keys = heads_of_ranks(LONG.heads, LONG.kv_heads, ranks)
        copied = 2 * (len(keys[0]) * length - LONG.kv_heads * length // ranks)
        expected += 4 * LONG.layers * size * (LONG.heads * length // ranks + copied)
    for kept in pool.run(saved_bytes, LONG, way, length, ranks):
        assert kept == pytest.approx(expected, rel=1e-3)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the number of elements of the largest tensor made inside."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.values = max(self.values, tensor.numel())
        return result


def largest(way, length):
    axis = make_mesh(cp=dist.get_world_size()).cp
    inputs = [own_positions(x, axis).requires_grad_() for x in heads_of(torch.float32, 1, length)]
    with Largest() as seen:
        WAYS[way](*inputs, axis=axis, length=length).sum().backward()
    return seen.values


@on((4,), "way, heads", [("ring", 4), ("gather", 4 * (2 + 2)), ("ulysses", 4 * (1 + 1 + 1))])
def test_no_rank_ever_has_the_scores(pool, way, heads):
    """The largest tensor grows linearly with the positions: in the ring, the queries of a rank's
    positions; gathered, keys and values of all; with Ulysses, one head each of q, k, v of all."""
    assert max(pool.run(largest, way, 256)) == heads * 8 * 256 // 4


def out_of_balance(length):
    """Ring attention over contiguous positions."""
    axis = make_mesh(cp=dist.get_world_size()).cp
    mine = positions(length, axis.size, balanced=False)[axis.index][0]
    inputs = [x[:, mine.start : mine.stop] for x in heads_of(torch.float64, length=length)]
    return attention_over(*inputs, axis, length, Ring, balanced=False)


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_the_ring_works_out_of_balance_too(pool):
    parts = pool.run(out_of_balance, 13)
    expected = causal_attention(*heads_of(torch.float64, length=13))
    torch.testing.assert_close(torch.cat(parts, 1), expected)


# ---- 6. bad input


def refused(way, length):
    axis = make_mesh(cp=dist.get_world_size()).cp
    model = context_parallel(GPT(SMALL), axis, way)
    try:
        model(torch.zeros(1, length, dtype=torch.int64))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("pool", [3], indirect=True)
def test_what_cannot_be_shared_is_named(pool):
    [said] = set(pool.run(refused, "ring", 2))
    assert said.startswith("a sequence of 2 tokens leaves some of 3 context-parallel ranks")
    [said] = set(pool.run(refused, "ring", 3000))
    assert said == "sequence of 3000 tokens is longer than max_positions 2048"
    with pytest.raises(ValueError, match="context 'rings' is not one of ring, gather, ulysses"):
        context_parallel(GPT(SMALL), make_mesh().cp, "rings")


def test_one_rank_is_left_alone():
    model = GPT(SMALL)
    axis = make_mesh().cp
    x = torch.zeros(1, 5, dtype=torch.int64)
    before = model(x)
    assert torch.equal(context_parallel(model, axis)(x), before)
    assert loss_of_own(cross_entropy, axis) is cross_entropy and own_positions(x, axis) is x
