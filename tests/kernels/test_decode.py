"""The kernels of a decode step equal PyTorch's operators, at even sizes and at odd ones."""

import math
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

from tests.tiers import first
from utils.compression.quantize import quantize
from utils.compression.scheme import INT4, INT8
from utils.kernels import decode, machine_code
from utils.serving.engine.linear import Int4Linear, Int8Linear
from utils.serving.engine.model import Norm

BLOCK = 16
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(mine, truth, dtype):
    """Assert equality within 8 machine epsilons of the largest value or 1."""
    assert mine.dtype == dtype and mine.shape == truth.shape
    size = truth.abs().max().item()
    assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * max(size, 1)


# ---- attention


def cache_of(lengths, K, D, dtype, extra=3):
    """(keys, values, table) with blocks in shuffled order, and NaN where no kernel may read."""
    blocks = [-(-length // BLOCK) for length in lengths]
    width, count = max(blocks) + 1, sum(blocks) + extra
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    keys, values = torch.full((2, count, K, BLOCK, D), math.nan, dtype=dtype)
    table = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
    for row, (length, used) in enumerate(zip(lengths, blocks)):
        mine = [order.pop() for _ in range(used)]
        table[row, :used] = torch.tensor(mine)
        for place, block in enumerate(mine):
            seen = min(BLOCK, length - place * BLOCK)
            keys[block, :, :seen] = drawn(K, seen, D, dtype=dtype, seed=block)
            values[block, :, :seen] = drawn(K, seen, D, dtype=dtype, seed=block + 1000)
    return keys, values, table


def attended(device, q, keys, values, table, lengths, splits):
    given = (one.to(device) for one in (q, keys, values, table, lengths))
    return decode.paged_attention(*given, splits).cpu()


def attention(q, keys, values, table, lengths):
    """The same in fp64, row by row."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        used = table[row, : -(-length // BLOCK)].long()
        k, v = (c[used].double().transpose(0, 1).flatten(1, 2)[:, :length] for c in (keys, values))
        group = q.shape[1] // k.shape[0]
        k, v = (one.repeat_interleave(group, dim=0) for one in (k, v))  # (H, L, D)
        scores = torch.einsum("hd,hld->hl", q[row].double(), k) / math.sqrt(q.shape[2])
        rows.append(torch.einsum("hl,hld->hd", scores.softmax(1), v))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "H, K, D, splits, lengths, dtype",
    first(
        5,
        [
            (4, 2, 16, 1, [1, 15, 16, 17, 300], torch.float32),
            (6, 2, 80, 3, [1, 15, 16, 17, 700], torch.bfloat16),  # one block: some splits are empty
            (3, 1, 96, 5, [33, 127, 128, 129], torch.float16),
            (2, 2, 256, 2, [65, 1, 31], torch.bfloat16),
            (20, 1, 32, 7, [200, 513], torch.float32),
            (8, 1, 128, 64, [1000], torch.bfloat16),
            (5, 5, 64, 1, [2, 400], torch.float16),
        ],
    ),
    ids=str,
)
def test_attention_over_blocks_is_plain_attention(on, H, K, D, splits, lengths, dtype):
    q = drawn(len(lengths), H, D, dtype=dtype)
    keys, values, table = cache_of(lengths, K, D, dtype)
    given = q, keys, values, table, torch.tensor(lengths, dtype=torch.int32)
    close(on(attended, *given, splits), attention(*given), dtype)


def apart(device):
    """Attention of two equal rows that share blocks, over a contiguous and a strided cache."""
    lengths = torch.tensor([40, 40], dtype=torch.int32, device=device)
    q = drawn(1, 4, 16).repeat(2, 1, 1).to(device)
    keys, values, table = (one.to(device) for one in cache_of([40], 2, 16, torch.float32))
    table = table.repeat(2, 1)
    both = torch.stack((keys, values), dim=1)  # (blocks, 2, K, BLOCK, D)
    plain = decode.paged_attention(q, keys, values, table, lengths, 2)
    return plain.cpu(), decode.paged_attention(q, both[:, 0], both[:, 1], table, lengths, 2).cpu()


def test_blocks_may_stand_apart_and_be_shared(on):
    plain, of_both = on(apart)
    assert torch.equal(plain, of_both) and torch.equal(plain[0], plain[1])


@pytest.mark.parametrize(
    "batch, kv_heads, positions, splits",
    [(1, 8, 10000, 33), (1, 8, 100, 2), (16, 8, 10000, 3), (64, 8, 10000, 1), (1, 1, 10**6, 64)],
)
def test_two_programs_for_each_processor(batch, kv_heads, positions, splits):
    assert decode.splits_for(batch, kv_heads, positions, 132) == splits


# ---- keys and values


def kept(device, qkv, cos, sin, positions, table, keys, values, heads):
    given = [one.to(device) for one in (qkv, cos, sin, positions, table, keys, values)]
    q = decode.turn_and_keep(*given, heads)
    return q.cpu(), given[5].cpu(), given[6].cpu()


@pytest.mark.parametrize(
    "H, K, D, dtype, whole",
    first(
        3,
        [
            (4, 2, 16, torch.float32, torch.int32),
            (3, 1, 80, torch.bfloat16, torch.int64),
            (2, 2, 96, torch.float16, torch.int32),
            (2, 1, 256, torch.float32, torch.int64),
        ],
    ),
    ids=str,
)
def test_keys_are_turned_and_kept_where_the_table_says(on, H, K, D, dtype, whole):
    positions = torch.tensor([0, 15, 16, 37], dtype=whole)
    B, table = len(positions), torch.tensor([[3, 9, 9], [0, 9, 9], [9, 1, 9], [9, 9, 7]])
    angles = drawn(40, D // 2)
    cos, sin = angles.cos(), angles.sin()
    qkv = drawn(B, (H + 2 * K) * D, dtype=dtype)
    keys, values = drawn(2, 10, K, BLOCK, D, dtype=dtype)
    q, new_keys, new_values = on(
        kept, qkv, cos, sin, positions, table.int(), keys.clone(), values.clone(), H
    )
    turned = torch.view_as_complex(qkv.double().view(B, H + 2 * K, D // 2, 2))
    turned = turned * torch.polar(torch.ones_like(angles), angles)[positions.long()][:, None]
    turned = torch.view_as_real(turned).flatten(2)
    blocks = table[torch.arange(B), positions.long() // BLOCK]
    where = blocks, slice(None), positions.long() % BLOCK
    close(q, turned[:, :H], dtype)
    close(new_keys[where], turned[:, H : H + K], dtype)
    values[where] = qkv.view(B, -1, D)[:, H + K :]
    keys[where] = new_keys[where]
    assert torch.equal(new_keys, keys) and torch.equal(new_values, values)  # and nothing else


# ---- between the products


def added(device, x, y, weight):
    x, y = x.to(device), None if y is None else y.to(device)
    return decode.add_norm(x, y, weight.to(device), 1e-5).cpu(), x.cpu()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 100), (2, 1025)], ids=str)
def test_a_sum_and_its_norm(on, shape, dtype):
    x, y, weight = (drawn(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[1:])))
    for other, total in ((y, x + y), (None, x)):
        h, sums = on(added, x.clone(), other, weight)
        assert torch.equal(sums, total)
        close(h, Norm(weight.double(), 1e-5)(total.double()), dtype)


def through_gate(device, gate_up):
    return decode.gated(gate_up.to(device)).cpu()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gate(on, dtype):
    gate_up = 3 * drawn(3, 2 * 1030, dtype=dtype)
    gate, up = gate_up.chunk(2, dim=1)
    mine = on(through_gate, gate_up)
    torch.testing.assert_close(mine, F.silu(gate) * up)
    if dtype == torch.bfloat16:  # rounds where PyTorch does
        assert (mine == F.silu(gate) * up).float().mean() > 0.999


# ---- integers


def product(device, name, x, *weights):
    weights = [one.to(device) if isinstance(one, torch.Tensor) else one for one in weights]
    return getattr(decode, name)(x.to(device), *weights).cpu()


SIZES = [(1, 16, 32), (3, 70, 1030), (17, 33, 96), (64, 130, 288)]  # B, N, K


@pytest.mark.parametrize(
    "B, N, K, dtype",
    first(4, [(*size, dtype) for size, dtype in zip(SIZES, [*TYPES, TYPES[0]])]),
    ids=str,
)
def test_8_bits_are_the_engines_to_the_last(on, B, N, K, dtype):
    x, w, bias = drawn(B, K, dtype=dtype), quantize(drawn(N, K), INT8), drawn(N, dtype=dtype)
    x[0, 0] = 0.5 * x[0].abs().max()  # 63.5 steps: a tie, to even
    if B > 1:
        x[1] = 0
    for added in (None, bias):
        theirs = Int8Linear(w.values, w.scale, added, summed=False)(x)
        assert torch.equal(on(product, "int8_product", x, w.values, w.scale, added), theirs)


def test_8_bits_of_two_ranks_have_one_scale(on):
    x, w = drawn(3, 96), quantize(drawn(20, 96), INT8)
    row_scale = x.abs().amax(1, keepdim=True) / 127
    halves = [
        on(product, "int8_product", x[:, part].contiguous(), w.values[:, part].contiguous(),
           w.scale, None, row_scale)
        for part in (slice(0, 50), slice(50, 96))
    ]  # fmt: skip
    whole = Int8Linear(w.values, w.scale, None, summed=False)(x)
    torch.testing.assert_close(halves[0] + halves[1], whole)


@pytest.mark.parametrize(
    "B, N, K, dtype, offset",
    first(
        4,
        [
            (1, 16, 32, torch.float32, 0),
            (3, 70, 1001, torch.bfloat16, 5),
            (17, 33, 96, torch.float16, 31),
            (2, 40, 7, torch.float32, 28),
            (64, 130, 288, torch.bfloat16, 0),
        ],
    ),
    ids=str,
)
def test_4_bits_are_the_engines_within_rounding(on, B, N, K, dtype, offset):
    whole = quantize(drawn(N, offset + K), INT4)
    packed = pack_groups(whole.values)
    x, bias = drawn(B, K, dtype=dtype), drawn(N, dtype=dtype)
    truth = x.double() @ whole.dequantize()[:, offset:].double().t()
    for added, y in ((None, truth), (bias, truth + bias.double())):
        close(on(product, "int4_product", x, packed, whole.scale, offset, added), y, dtype)
        # (it stores the given scales in its own layout)
        close(Int4Linear(packed, whole.scale.clone(), added, False, offset)(x), y, dtype)


def pack_groups(values):
    """The stored form: 16 bytes per group of 32 columns."""
    values = F.pad(values, (0, -values.shape[1] % 32))
    nibbles = (values & 15).to(torch.uint8)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).contiguous()


# ---- the next token


def raced(device, *given):
    return decode.race(*(one.to(device) for one in given)).cpu()


def rows(count, temperature, seed=0):
    """Temperatures, seeds and positions of `count` rows at different positions."""
    return (
        torch.full((count,), temperature),
        torch.full((count,), seed, dtype=torch.int64),
        torch.arange(count, dtype=torch.int32),
    )


@pytest.mark.parametrize("V, dtype", [(1, TYPES[0]), (1025, TYPES[1]), (5000, TYPES[2])], ids=str)
def test_at_temperature_0_the_first_of_the_largest_wins(on, V, dtype):
    logits = drawn(4, V, dtype=dtype)
    logits[1] = logits[1].round()  # has many ties
    logits[2] = -math.inf
    logits[3, V // 2] = math.nan
    truth = logits.masked_fill(logits.isnan(), -math.inf).float().numpy().argmax(axis=1)
    tokens = on(raced, logits, *rows(4, 0.0))
    assert tokens.dtype == torch.int64 and np.array_equal(tokens.numpy(), truth)


@pytest.mark.parametrize("temperature, count", first(1, [(0.5, 150), (1.0, 1000)]))
def test_tokens_are_drawn_as_often_as_their_probability_says(on, temperature, count):
    logits = torch.tensor([0.0, 1.0, 2.0, -3.0, -math.inf])
    tokens = on(raced, logits.repeat(count, 1), *rows(count, temperature, 7))
    share = torch.bincount(tokens, minlength=5) / count
    p = (logits / temperature).softmax(0)
    assert ((share - p).abs() <= 4.5 * (p * (1 - p) / count).sqrt() + 1e-3).all()


def test_a_draw_depends_on_seed_and_position_alone(on):
    logits = drawn(1, 3000).repeat(6, 1)
    temperature = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1e-30])
    seeds = torch.tensor([5, 5, 5, 2**40 + 5, 5, 5])
    positions = torch.tensor([9, 9, 9, 9, 10, 9], dtype=torch.int64)
    tokens = on(raced, logits, temperature, seeds, positions).tolist()
    (alone,) = on(raced, logits[:1], temperature[:1], seeds[:1], positions[:1].int()).tolist()
    assert tokens[0] == tokens[2] == alone and len({tokens[0], *tokens[3:5]}) == 3
    assert tokens[1] == tokens[5] == logits[0].argmax()


# ---- machine code for a GPU


def memory(dtype):
    return torch.empty(1024, dtype=dtype, device="meta")


def compiled(name):
    bf16, fp32, i32, i8, u8 = map(
        memory, (torch.bfloat16, torch.float32, torch.int32, torch.int8, torch.uint8)
    )
    if name == "attention":  # 8 of 32 heads, 128 values per head
        return machine_code(
            decode.attention_kernel, bf16, bf16, bf16, i32, i32, fp32, fp32, 64, 2**14, 2**14, 0.1,
            GROUP=4, D=128, BLOCK=BLOCK, ROWS=4, COLUMNS=128, TILE=64, FP32=False,
        )
    given = {"ROWS": 16, "OUTPUTS": 16, "num_warps": 2}
    if name == "int8":
        return machine_code(
            decode.int8_kernel, i8, fp32, i8, fp32, None, bf16, 4, 4096, 4096, INPUTS=512, **given
        )
    return machine_code(
        decode.int4_kernel, bf16, u8, fp32, None, bf16, 4, 4096, 4096, 128, 0, GROUPS=8,
        FP32=False, **given,
    )


# bytes of keys and values, or of weights, that a program reads per iteration
@pytest.mark.parametrize(
    "name, of_a_turn", [("attention", 2 * 64 * 128 * 2), ("int8", 16 * 512), ("int4", 16 * 128)]
)
def test_what_is_read_most_is_read_by_128_bits(name, of_a_turn):
    code = compiled(name)
    assert code.spills == 0 and code.registers <= 128
    assert code.loads[128] * code.threads * 16 >= of_a_turn
    assert sum(code.loads.values()) - code.loads[128] < 6  # the table, x, scales
    assert re.search("HMMA|IMMA", code.assembly)  # on tensor cores
