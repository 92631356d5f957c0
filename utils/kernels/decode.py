"""A decode step of a served Llama-layout model, except its floating-point matrix products: the
operations of each layer on a few rows.

    h = add_norm(x, y, weight, eps)                      # x += y, and the RMSNorm of the sum
    q = turn_and_keep(qkv, cos, sin, positions, table, keys, values, heads)
    y = paged_attention(q, keys, values, table, positions + 1, splits)
    h = gated(gate_up)                                   # silu(gate) · up
    y = int8_product(h, values, scale)                   # 8-bit weights; int4_product: 4-bit
    tokens = race(logits, temperature, seeds, positions)

A step reads every weight, and every key and value it needs, once, and computes little with them:
its time is that of its bytes and its launches. All functions can be captured in a CUDA graph:
shapes fix the grids, and everything that changes from step to step is read from tensors.

Shapes: B rows (one token per sequence), H query heads, K key-value heads, D head size, W blocks in
a row of the table, V vocabulary; in products K inputs and N outputs. Keys and values are stored in
blocks of BLOCK positions, (blocks, K, BLOCK, D) each; `table` (B, W) int32 lists each sequence's
blocks (Kwon et al. 2023, arXiv:2309.06180). Tensors are contiguous except for the stride between
blocks. x, q, logits, keys and values are fp32, bf16 or fp16; sums are in fp32, and with fp32 inputs
so are all products.
"""

import math

import torch

from utils.kernels.language import INTERPRETED, check_device, rounded, tl, triton

# ---- 1. attention: few queries, many keys
#
# A program serves the query heads that share one key-value head, so that keys are read once. If
# there are few sequences, each is split over several programs, each with its own softmax; their
# results are merged using the logarithms of the sums (Dao et al. 2023, "Flash-Decoding").


@triton.jit
def attention_kernel(
    q_ptr, keys_ptr, values_ptr, table_ptr, lengths_ptr, y_ptr, sums_ptr,
    width, key_block, value_block, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr, FP32: tl.constexpr,
):
    """Program (b, k, s): part s of the positions of sequence b, for the GROUP queries of head k.

    y_ptr       (B, H, splits, D): softmax(q·kᵀ)·v of this part
    sums_ptr    (B, H, splits): log2 of the sum of 2^score, -inf for a part without positions;
                None with a single split
    width       blocks in a row of the table;   key_block, value_block: strides between blocks
    scale       log2(e) / √D, since the hardware computes powers of 2
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    queries = tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    number = (row * tl.num_programs(1) + head) * GROUP + queries  # index of a query among all B·H
    mine = (queries < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + number[:, None] * D + d[None, :], mine, other=0.0)
    q = q.to(tl.float32) if FP32 else q

    length = tl.load(lengths_ptr + row)
    part = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    stop = tl.minimum(length, (split + 1) * part)
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(split * part, stop, TILE):
        positions = start + tl.arange(0, TILE)
        seen = positions < stop
        block = tl.load(table_ptr + row * width + positions // BLOCK, seen, other=0).to(tl.int64)
        inside = (head * BLOCK + positions % BLOCK) * D
        mask = seen[:, None] & (d < D)[None, :]
        k = tl.load(keys_ptr + (block * key_block + inside)[:, None] + d[None, :], mask, other=0.0)
        v = tl.load(
            values_ptr + (block * value_block + inside)[:, None] + d[None, :], mask, other=0.0
        )
        k = k.to(tl.float32) if FP32 else k
        v = v.to(tl.float32) if FP32 else v

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # (ROWS, TILE)
        scores = tl.where(seen[None, :], scores, -float("inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
        shrunk = tl.exp2(largest - now)
        total = total * shrunk + tl.sum(weights, 1)
        y = y * shrunk[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = now

    y = y / tl.maximum(total, 1.0)[:, None]  # total ≥ 1, or 0 without positions
    place = number * splits + split
    tl.store(y_ptr + place[:, None] * D + d[None, :], rounded(y, y_ptr), mine)
    if sums_ptr is not None:
        tl.store(sums_ptr + place, largest + tl.log2(total), queries < GROUP)


@triton.jit
def combine_kernel(
    parts_ptr, sums_ptr, y_ptr, splits,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Program i: merge the parts of query i, weighted by their sums, as row i of y_ptr (B·H, D)."""
    query = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    place = query * splits + part
    sums = tl.load(sums_ptr + place, part < splits, other=-float("inf"))
    weights = tl.exp2(sums - tl.max(sums, 0))
    weights = weights / tl.sum(weights, 0)
    mask = (part < splits)[:, None] & (d < D)[None, :]
    parts = tl.load(parts_ptr + place[:, None] * D + d[None, :], mask, other=0.0)
    y = tl.sum(parts * weights[:, None], 0)
    tl.store(y_ptr + query * D + d, rounded(y, y_ptr), d < D)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    splits: int,
) -> torch.Tensor:
    """Attention of each row's query heads to the first `lengths` positions of its sequence:
    (B, H, D).

    q        (B, H, D);   keys, values  (blocks, K, BLOCK, D), BLOCK a power of two
    table    (B, W) int32: blocks of each row;   lengths  (B,) int32, 1 or more
    splits   programs that divide a row's positions, see `splits_for`
    """
    _check(q, keys, values)
    B, H, D = q.shape
    K, block = keys.shape[1:3]
    columns = max(16, triton.next_power_of_2(D))  # tensor cores need at least 16
    tile = min(128, max(16, 2**14 // (columns * q.element_size())))  # 16 KiB of keys
    fp32 = INTERPRETED or q.dtype == torch.float32  # the interpreter has no bf16 products
    # a single split has the result's type and needs no merging
    parts = q.new_empty(B, H, splits, D, dtype=torch.float32 if splits > 1 else q.dtype)
    sums = q.new_empty(B, H, splits, dtype=torch.float32) if splits > 1 else None
    attention_kernel[(B, K, splits)](
        q, keys, values, table, lengths, parts, sums, table.shape[1], keys.stride(0),
        values.stride(0), math.log2(math.e) / math.sqrt(D), GROUP=H // K, D=D, BLOCK=block,
        ROWS=triton.next_power_of_2(H // K), COLUMNS=columns, TILE=tile, FP32=fp32,
    )
    if splits == 1:
        return parts[:, :, 0]
    y = torch.empty_like(q)
    rows = max(16, triton.next_power_of_2(splits))
    combine_kernel[(B * H,)](parts, sums, y, splits, D=D, ROWS=rows, COLUMNS=columns)
    return y


def splits_for(batch: int, kv_heads: int, max_positions: int, processors: int) -> int:
    """How many programs divide a row's positions, so that each processor (SM) gets about two.

    More than one per 64 positions would be idle, and more than 64 are not worth merging.
    """
    wanted = -(-2 * processors // (batch * kv_heads))
    return max(1, min(wanted, -(-max_positions // 64), 64))


# ---- 2. keys and values into the cache


@triton.jit
def turn_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, table_ptr, keys_ptr, values_ptr, q_ptr,
    width, key_block, value_block,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Program (b, h): one head of row b, for queries, keys or values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, COLUMNS)
    x = tl.load(qkv_ptr + (row * (H + 2 * K) + head) * D + d, d < D, other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + row).to(tl.int64)
    if head < H + K:
        half = tl.arange(0, COLUMNS // 2)
        cos = tl.load(cos_ptr + position * (D // 2) + half, half < D // 2, other=0.0)
        sin = tl.load(sin_ptr + position * (D // 2) + half, half < D // 2, other=0.0)
        real, imaginary = tl.split(tl.reshape(x, (COLUMNS // 2, 2)))
        turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
        x = tl.reshape(turned, (COLUMNS,))
    block = tl.load(table_ptr + row * width + position // BLOCK).to(tl.int64)
    inside = position % BLOCK * D
    if head < H:
        tl.store(q_ptr + (row * H + head) * D + d, rounded(x, q_ptr), d < D)
    elif head < H + K:
        place = block * key_block + (head - H) * BLOCK * D + inside
        tl.store(keys_ptr + place + d, rounded(x, keys_ptr), d < D)
    else:
        place = block * value_block + (head - H - K) * BLOCK * D + inside
        tl.store(values_ptr + place + d, rounded(x, values_ptr), d < D)


def turn_and_keep(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Rotate queries and keys by position, write keys and values into their blocks, and return the
    queries (B, H, D).

    qkv         (B, (H + 2·K)·D): elements 2i and 2i + 1 of each head form a complex number, which
                is multiplied by cos + i·sin of its position
    cos, sin    (P, D/2) fp32;   positions  (B,) int32 or int64
    table, keys, values   as in `paged_attention`;   heads  H
    """
    _check(qkv, keys, values)
    K, block, D = keys.shape[1:]
    B = len(qkv)
    q = qkv.new_empty(B, heads, D)
    turn_kernel[(B, heads + 2 * K)](
        qkv, cos, sin, positions, table, keys, values, q, table.shape[1], keys.stride(0),
        values.stride(0), H=heads, K=K, D=D, BLOCK=block, COLUMNS=triton.next_power_of_2(D),
        num_warps=1,
    )
    return q


# ---- 3. between the products


@triton.jit
def add_norm_kernel(x_ptr, y_ptr, w_ptr, h_ptr, d, eps, BLOCK: tl.constexpr):
    """Program i: row i of (B, d)."""
    columns = tl.arange(0, BLOCK)
    mask = columns < d
    offsets = tl.program_id(0).to(tl.int64) * d + columns
    x = tl.load(x_ptr + offsets, mask, other=0.0).to(tl.float32)
    if y_ptr is not None:
        x += tl.load(y_ptr + offsets, mask, other=0.0).to(tl.float32)
        sums = rounded(x, x_ptr)
        tl.store(x_ptr + offsets, sums, mask)
        x = sums.to(x_ptr.dtype.element_ty).to(tl.float32)  # as the next layer will see it
    w = tl.load(w_ptr + columns, mask, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt_rn(tl.sum(x * x, 0) / d + eps)
    tl.store(h_ptr + offsets, rounded(x * inverse * w, h_ptr), mask)


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add y to x in place, unless y is None; return RMSNorm(x)·weight. x, y and result (B, d)."""
    _check(x)
    h, d = torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(d)
    warps = min(16, max(1, block // 512))
    add_norm_kernel[(len(x),)](x, y, weight, h, d, eps, BLOCK=block, num_warps=warps)
    return h


@triton.jit
def gated_kernel(gate_up_ptr, y_ptr, M, BLOCK: tl.constexpr):
    """Program (b, i): block i of row b."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < M
    gate = tl.load(gate_up_ptr + row * 2 * M + columns, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * M + columns, mask, other=0.0).to(tl.float32)
    gate = rounded(gate / (1 + tl.exp(-gate)), y_ptr).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * M + columns, rounded(gate * up, y_ptr), mask)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of (B, 2·M), gate first: (B, M). silu is rounded as in PyTorch."""
    _check(gate_up)
    B, M = len(gate_up), gate_up.shape[1] // 2
    y = gate_up.new_empty(B, M)
    gated_kernel[(B, triton.cdiv(M, 1024))](gate_up, y, M, BLOCK=1024)
    return y


# ---- 4. integer weights times few rows
#
# A program computes some outputs and reads their weights once for all rows. It uses the tensor
# cores, which need at least 16 rows.


@triton.jit
def quantize_kernel(x_ptr, scale_ptr, values_ptr, K, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Program i: row i of (B, K) in 8 bits, scaled by its largest value or the GIVEN scale."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    if GIVEN:
        scale = tl.load(scale_ptr + row)
    else:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, K, BLOCK):
            x = tl.load(x_ptr + row * K + start + columns, start + columns < K, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        scale = tl.div_rn(tl.max(largest, 0), 127.0)
        tl.store(scale_ptr + row, scale)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, scale), 0.0)
    for start in range(0, K, BLOCK):
        mask = start + columns < K
        x = tl.load(x_ptr + row * K + start + columns, mask, other=0.0).to(tl.float32)
        # beyond 2^23 fp32 has only integers: the addition rounds, ties to even
        whole = x * inverse + 12582912.0 - 12582912.0
        tl.store(values_ptr + row * K + start + columns, whole.to(tl.int8), mask)


@triton.jit
def int8_kernel(
    x_ptr, row_scale_ptr, values_ptr, scale_ptr, bias_ptr, y_ptr, B, N, K,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):
    """Program i: OUTPUTS columns of y (B, N) from x (B, K) and values (N, K), both int8."""
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = tl.zeros((ROWS, OUTPUTS), tl.int32)
    for start in tl.range(0, K, INPUTS, num_stages=4):
        inputs = start + tl.arange(0, INPUTS)
        x = tl.load(
            x_ptr + rows[:, None] * K + inputs[None, :],
            (rows < B)[:, None] & (inputs < K)[None, :], other=0,
        )
        w = tl.load(
            values_ptr + outputs.to(tl.int64)[:, None] * K + inputs[None, :],
            (outputs < N)[:, None] & (inputs < K)[None, :], other=0,
        )
        sums = tl.dot(x, tl.trans(w), sums, out_dtype=tl.int32)
    row_scale = tl.load(row_scale_ptr + rows, rows < B, other=0.0)
    scale = tl.load(scale_ptr + outputs, outputs < N, other=0.0)
    y = sums.to(tl.float32) * row_scale[:, None] * scale[None, :]
    write(y, bias_ptr, y_ptr, rows, outputs, B, N)


@triton.jit
def int4_kernel(
    x_ptr, packed_ptr, scale_ptr, bias_ptr, y_ptr, B, N, K, G, offset,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr, FP32: tl.constexpr,
):
    """Program i: OUTPUTS columns of y (B, N) from x (B, K) and packed (N, G·16), GROUPS at once."""
    rows = tl.arange(0, ROWS)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    sums = tl.zeros((GROUPS, ROWS, OUTPUTS), tl.float32)
    for first in tl.range(0, G, GROUPS, num_stages=4):
        pairs = first * 16 + tl.arange(0, GROUPS * 16)
        packed = tl.load(
            packed_ptr + (outputs.to(tl.int64) * (G * 16))[:, None] + pairs[None, :],
            (outputs < N)[:, None] & (pairs < G * 16)[None, :], other=0,
        )
        columns = first * 32 + tl.arange(0, GROUPS * 32) - offset
        x = tl.load(
            x_ptr + rows[:, None] * K + columns[None, :],
            (rows < B)[:, None] & ((columns >= 0) & (columns < K))[None, :], other=0.0,
        )
        groups = first + tl.arange(0, GROUPS)
        scale = tl.load(
            scale_ptr + outputs[None, :] * G + groups[:, None],
            (outputs < N)[None, :] & (groups < G)[:, None], other=0.0,
        )
        packed = tl.permute(tl.reshape(packed, (OUTPUTS, GROUPS, 16)), (1, 2, 0))
        low = (packed << 4).to(tl.int8, bitcast=True) >> 4  # sign-extended
        high = packed.to(tl.int8, bitcast=True) >> 4
        x = x.to(tl.float32) if FP32 else x
        even, odd = tl.split(tl.reshape(x, (ROWS, GROUPS, 16, 2)))
        products = tl.dot(tl.permute(even, (1, 0, 2)), low.to(x.dtype), input_precision="ieee")
        products = tl.dot(
            tl.permute(odd, (1, 0, 2)), high.to(x.dtype), products, input_precision="ieee"
        )
        sums += products * scale[:, None, :]  # per group: the weights themselves stay integers
    write(tl.sum(sums, 0), bias_ptr, y_ptr, rows, outputs, B, N)


@triton.jit
def write(y, bias_ptr, y_ptr, rows, outputs, B, N):
    """Write fp32 sums to y_ptr (B, N); the bias is added after rounding, as in PyTorch."""
    y = rounded(y, y_ptr)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + outputs, outputs < N, other=0.0).to(tl.float32)
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32) + bias[None, :]
        y = rounded(y, y_ptr)
    mask = (rows < B)[:, None] & (outputs < N)[None, :]
    tl.store(y_ptr + rows.to(tl.int64)[:, None] * N + outputs[None, :], y, mask)


def int8_product(
    x: torch.Tensor,
    values: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (B, K) times 8-bit weights: (B, N). Each row of x is quantized to 8 bits; sums are exact.

    values      (N, K) int8;   scale  (N,) or (N, 1) fp32;   bias  (N,)
    row_scale   (B, 1) fp32, a row's largest absolute value / 127, if other ranks also have columns;
                None: computed from the columns here
    """
    _check(x)
    (B, K), N = x.shape, len(values)
    whole = torch.empty_like(x, dtype=torch.int8)
    given = row_scale is not None
    if not given:
        row_scale = x.new_empty(B, 1, dtype=torch.float32)
    exact = {"enable_fp_fusion": False}  # a fused product and sum would be rounded only once
    block = min(4096, triton.next_power_of_2(K))
    quantize_kernel[(B,)](
        x, row_scale, whole, K, GIVEN=given, BLOCK=block, num_warps=8, **exact
    )
    y = x.new_empty(B, N)
    rows, outputs, warps = _tiles(B, N)
    int8_kernel[(triton.cdiv(N, outputs),)](
        whole, row_scale, values, scale, bias, y, B, N, K, ROWS=rows, OUTPUTS=outputs,
        INPUTS=max(256, 8192 // outputs), num_warps=warps, **exact,
    )
    return y


def int4_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    offset: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (B, K) times 4-bit weights: (B, N). x is not quantized.

    packed  (N, G·16) uint8, as stored: two columns per byte, the even one in its low four bits
    scale   (N, G) fp32, one per 32 columns;   bias  (N,)
    offset  number of columns of the first group that are on another rank
    """
    _check(x)
    (B, K), (N, G) = x.shape, scale.shape
    y = x.new_empty(B, N)
    rows, outputs, warps = _tiles(B, min(N, 2**14))  # more would not fit into registers
    int4_kernel[(triton.cdiv(N, outputs),)](
        x, packed, scale, bias, y, B, N, K, G, offset, ROWS=rows, OUTPUTS=outputs,
        GROUPS=128 // rows, FP32=INTERPRETED or x.dtype == torch.float32, num_warps=warps,
    )
    return y


def _tiles(B, N):
    """(rows, outputs, warps) of a program: enough programs for a large GPU, if N allows it."""
    rows = max(16, triton.next_power_of_2(B))
    outputs = 16 if rows == 16 and N <= 2**13 else 32 if N <= 2**14 else 64
    return rows, outputs, outputs // 8 if outputs < 64 else 4


# ---- 5. the next token
#
# A token drawn from the softmax of logits / temperature is the argmax of logits + temperature ·
# noise, where the noise is minus the logarithm of an exponential time (the Gumbel-max trick:
# Maddison et al. 2014, arXiv:1411.0030). At temperature 0 it is the largest logit.


@triton.jit
def race_kernel(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, best_ptr, token_ptr, V,
    BLOCK: tl.constexpr,
):
    """Program (b, i): the best score in block i of row b, and its token."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits_ptr + row * V + tokens, tokens < V, other=-float("inf"))
    scores = scores.to(tl.float32)
    scores = tl.where(scores == scores, scores, -float("inf"))  # NaN never wins
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        zero = tokens * 0
        random, _, _, _ = tl.philox(seed, tokens, position.to(tl.int32) + zero, zero, zero)
        u = (random.to(tl.float32) + 0.5) * 2.3283064e-10  # 2^-32: between 0 and 1
        # an exponential time is -log(1 - u); the winner's is small, and 1 - u would lose its digits
        time = tl.where(u < 0.01, u * (1 + u * (0.5 + u * (1 / 3 + u / 4))), -tl.log(1 - u))
        scores -= temperature * tl.log(time)
    best, place = tl.max(scores, 0, return_indices=True)
    tl.store(best_ptr + row * tl.num_programs(1) + chunk, best)
    tl.store(token_ptr + row * tl.num_programs(1) + chunk, chunk * BLOCK + place)


@triton.jit
def winner_kernel(best_ptr, token_ptr, winner_ptr, chunks, BLOCK: tl.constexpr):
    """Program b: the best token among a row's blocks."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * chunks + places, places < chunks, other=-float("inf"))
    _, place = tl.max(best, 0, return_indices=True)
    tl.store(winner_ptr + row, tl.load(token_ptr + row * chunks + place).to(tl.int64))


def race(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A token for each row of logits (B, V): (B,) int64. NaN is never chosen.

    temperature   (B,) fp32; 0: the token with the largest logit, the first in a tie; otherwise a
                  draw from the softmax of logits / temperature
    seeds         (B,) int64;   positions  (B,) int32 or int64: with the token's id they determine
                  the noise, so that a row draws the same in any batch
    """
    _check(logits)
    B, V = logits.shape
    chunks = triton.cdiv(V, 1024)
    best = logits.new_empty(B, chunks, dtype=torch.float32)
    tokens = logits.new_empty(B, chunks, dtype=torch.int32)
    winners = logits.new_empty(B, dtype=torch.int64)
    race_kernel[(B, chunks)](
        logits, temperature, seeds, positions, best, tokens, V, BLOCK=1024
    )
    winner_kernel[(B,)](best, tokens, winners, chunks, BLOCK=triton.next_power_of_2(chunks))
    return winners


def _check(x, *caches):
    """Raise ValueError for tensors that the kernels would misread."""
    check_device(x.device, "PyTorch's operators")
    for tensor in (x, *(cache[0] for cache in caches)):
        if tensor.dtype != x.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} is {tensor.dtype} with strides "
                f"{tensor.stride()}: the kernel needs contiguous {x.dtype}"
            )
