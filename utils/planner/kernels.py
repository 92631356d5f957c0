"""Seconds that a device computes: matrix products by their shapes, the rest by its bytes.

A product of (m, k) and (k, n) takes 2mnk FLOPs at the rate `peak · sustained`, reduced by its
shape:

* its result is split into tiles, computed `processors` at a time; in the last round half of the
  processors idle on average: mn / (mn + ½ processors · tile). So small micro-batches and much
  tensor parallelism make every FLOP more expensive;
* each tile begins and ends with loads and stores, RAMP seconds without multiplications. The faster
  a processor, the longer k must be: on an A100 RAMP is worth 123 values of k, on an H100 in fp8
  544.

A product never takes less than reading and writing its matrices. Everything else in a layer (norms,
activation functions, dropout, softmax, sums) computes little on many bytes and runs at memory
speed: `STREAM` of the data sheet's. How often each tensor is read and written is counted below.
Experts are assumed to be equally busy.
"""

import numpy as np

from utils.planner.machine import Machine
from utils.planner.model import Model
from utils.planner.strategy import Columns, Numbers

RAMP = 3.5e-6  # seconds: start and end of a tile
STREAM = 0.8  # fraction of the memory's bandwidth that simple kernels reach
FUSED = (
    0.6  # fraction of a product's speed that fused attention reaches (arXiv:2307.08691, section 4)
)


def matmul(
    machine: Machine,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    count: Numbers = 1.0,
    value_bytes: float = 2.0,
    rate: Numbers | None = None,
) -> Numbers:
    """Seconds of `count` products (m, k) · (k, n) that run as one kernel; rate: FLOP/s of very
    large ones, None: the machine's."""
    rate = machine.peak * machine.sustained if rate is None else rate
    tiles = count * m * n
    full = tiles / (tiles + 0.5 * machine.processors * machine.tile) * steady(machine, k, rate)
    compute = 2 * tiles * k / (rate * full)
    return np.maximum(compute, stream(machine, value_bytes * count * (m * n + m * k + n * k)))


def steady(machine: Machine, k: Numbers, rate: Numbers) -> Numbers:
    """The fraction of a tile's time between its start and end. The rest, RAMP seconds, is as
    long as RAMP · rate / (2 tile · processors) values of k."""
    return k / (k + RAMP * rate / (2 * machine.tile * machine.processors))


def both_gradients(
    machine: Machine,
    m: Numbers,
    n: Numbers,
    k: Numbers,
    count: Numbers = 1.0,
    value_bytes: float = 2.0,
    rate: Numbers | None = None,
) -> tuple[Numbers, Numbers]:
    """Seconds of the backward pass of that product: (gradient of the input, of the weight)."""
    return (
        matmul(machine, m, k, n, count, value_bytes, rate),
        matmul(machine, k, n, m, count, value_bytes, rate),
    )


def stream(machine: Machine, size: Numbers) -> Numbers:
    """Seconds to read or write `size` bytes."""
    return size / (machine.bandwidth * STREAM)


# ---- one layer


def layer(machine: Machine, model: Model, c: Columns, value_bytes: float) -> dict[str, np.ndarray]:
    """Seconds of one layer and one micro-batch on a rank: a dictionary of arrays

    forward     all of it, without communication
    selective   the part of it that selective recomputation repeats: attention's core in the GPT
                layout, norms and activation functions in the gated one
    backward    without recomputation
    attention, attention backward   the parts of both that queries and keys take
    products    the part of the forward pass that multiplies matrices, during which messages can
                travel
    inputs, weights     the same for the backward pass: gradients of inputs, of weights

    In fp8 products run at the rate of 8-bit values. Their inputs are cast: 16 bits are read and 8
    written twice, once transposed for the backward pass; gradients of results too.
    """
    tokens = c.tokens(model)
    routed = tokens * model.experts_per_token
    experts = model.experts / c.ep
    keys = np.maximum(model.key_width, c.tp * model.head_size)
    columns = (2 if model.gated else 1) * model.mlp_size
    products = [  # (m, n, k, count)
        (tokens, (model.query_width + 2 * keys) / c.tp, model.hidden_size, 1.0),
        (tokens, model.hidden_size, model.query_width / c.tp, 1.0),
        (routed / experts, columns / c.tp, model.hidden_size, experts),
        (routed / experts, model.hidden_size, model.mlp_size / c.tp, experts),
    ]
    fp8 = c.precision == "fp8"
    rate = np.where(fp8, machine.fp8_peak * machine.fp8_sustained, machine.peak * machine.sustained)
    forward = sum(matmul(machine, *product, value_bytes, rate) for product in products)
    gradients = [both_gradients(machine, *product, value_bytes, rate) for product in products]
    inputs, weights = (sum(parts) for parts in zip(*gradients, strict=True))
    cast_in = 4.0 * fp8 * sum(count * m * k for m, _, k, count in products)
    cast_out = 4.0 * fp8 * sum(count * m * n for m, n, _, count in products)
    core_forward, core_backward = attention(machine, model, c, value_bytes)
    forward_bytes, backward_bytes = pointwise(model, c, value_bytes)
    eager = c.software == "eager"
    point = stream(machine, forward_bytes + cast_in)
    # forward: products, norms, activation, sums, attention; eager also casts and rotates
    launches = np.where(eager, 20 + 5 * (c.precision == "autocast"), 12) * machine.launch
    selective = np.where(c.attention == "fused", 0.0, core_forward) + point * model.gated
    selective = selective + np.where(c.software == "megatron", 0.0, launches)
    return {
        "forward": forward + core_forward + point + launches,
        "selective": selective,
        "backward": inputs
        + weights
        + core_backward
        + 2 * launches
        + stream(machine, backward_bytes + cast_out),
        "attention": core_forward,
        "attention backward": core_backward,
        "products": forward,
        "inputs": inputs,
        "weights": weights,
    }


def attention(
    machine: Machine, model: Model, c: Columns, value_bytes: float
) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) seconds of attention's core: scores, softmax, dropout, sum of values.

    Scores in memory (b · heads · s² of them) are written by the product, read and written by the
    masked softmax, read and written with a byte of mask by dropout, and read by the second product:
    6.5 passes; the backward pass makes 9.5, and 4 products for 2. A fused kernel keeps them in
    registers, skips the masked half, and recomputes them: 5 products for 2.
    """
    heads = c.micro_batch * model.heads / c.tp
    # an equal part of the scores, by positions; with Ulysses, by whole heads, the largest part
    whole = np.ceil(model.heads / c.tp / c.cp) * c.micro_batch
    heads = np.where((c.cp > 1) & (c.context == "ulysses"), whole, heads / c.cp)
    scores, size = heads * model.seq**2, model.head_size
    rate = machine.peak * machine.sustained
    products = 4 * scores * size / (rate * steady(machine, size, rate))
    kept_forward = products + stream(machine, 6.5 * value_bytes * scores)
    kept_backward = 2 * products + stream(machine, 9.5 * value_bytes * scores)
    fused_forward = 4 * scores * size / 2 / (rate * FUSED)
    fused = c.attention == "fused"
    return (
        np.where(fused, fused_forward, kept_forward),
        np.where(fused, 2.5 * fused_forward, kept_backward),
    )


def pointwise(model: Model, c: Columns, value_bytes: float) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) bytes that a layer's remaining kernels read and write.

    Forward, in units of a hidden state: two norms read and write (4); two sums with the residual,
    with bias and dropout in the GPT layout, read two, write one and a mask (7). The MLP's
    activation reads and writes its inner values, gated ones read twice as many; squared ReLU is two
    kernels forward and four backward. Backward: norms read input and gradient and write (6), the
    residual's gradients are added (4), dropout (5), biases (2); the activation reads two and writes
    one.
    """
    tokens = c.tokens(model)
    hidden = tokens * model.hidden_size / np.where(c.sequence_parallel, c.tp, 1.0)
    inner = tokens * model.experts_per_token * model.mlp_size / c.tp
    if model.gated and not np.all(c.software == "megatron"):
        return _of_trainer(model, c, value_bytes, hidden, inner)
    rotary = 2 * tokens * (model.query_width + model.key_width) / c.tp
    if model.gated:
        forward = 10 * hidden + 3 * inner + rotary
        backward = 14 * hidden + 5 * inner + rotary
    else:
        forward_mlp, backward_mlp = (4, 10) if model.squared_relu else (2, 4)
        forward, backward = 11 * hidden + forward_mlp * inner, 17 * hidden + backward_mlp * inner
        if not model.learned_positions:
            forward, backward = forward + rotary, backward + rotary
    moved = 4 * tokens * model.experts_per_token * model.hidden_size if model.experts > 1 else 0.0
    return value_bytes * (forward + moved), value_bytes * (backward + moved)


def _of_trainer(model, c, value, hidden, inner):
    """`pointwise` for this workshop's trainer, kernel by kernel. A value of a hidden state has
    `stream` bytes, one that a product reads `value`.

    eager, forward: norms read and write; with autocast, each of five products casts its input;
    rotary rolls, multiplies, adds (7 values); sums read two, write one; silu 2, its product 3.
    backward: two gradients of the stream are added, with autocast cast for the branch; norms read
    two, write one, read both again for the weight; the gradients of five inputs become two; rotary
    7, activation 9. compiled: a norm and the sum before it are one kernel, an activation is one.
    """
    stream = np.where(c.precision == "autocast", 4.0, value)
    cast = np.where(c.precision == "autocast", stream + value, 0.0)
    turned = c.tokens(model) * (model.query_width + model.key_width) / c.tp
    forward = (4 * stream + 5 * cast + 2 * (2 * stream + value)) * hidden
    forward = forward + value * (7 * turned + 5 * inner)
    backward = (6 * stream + 2 * cast + 10 * stream + 5 * cast + 9 * stream) * hidden
    backward = backward + value * (7 * turned + 9 * inner)
    fused = 4 * (stream + value) * hidden + value * (2 * turned + 3 * inner)
    fused_backward = (8 * stream + 12 * value) * hidden + value * (2 * turned + 6 * inner)
    eager = c.software == "eager"
    return np.where(eager, forward, fused), np.where(eager, backward, fused_backward)


# ---- the ends of the model


def head(
    machine: Machine, model: Model, c: Columns, value_bytes: float
) -> tuple[np.ndarray, np.ndarray]:
    """(forward, backward) seconds of the last matrix and the loss for one micro-batch. The loss
    reads and writes fp32 logits: cast, largest, difference, exponentials, sum, quotient; then the
    gradient and its cast (Megatron-Core's cross_entropy.py); fused, each group once.
    PyTorch's, with autocast, makes 9 passes over fp32 and casts both ways; compiled, 4 over 16
    bits. The trainer's reads the logits twice for log-softmax, takes exponentials in place, casts,
    and sums the gradient of the matrix in fp32, once per chunk of rows."""
    tokens, share = c.tokens(model), model.vocab_size / c.tp
    inputs, weights = both_gradients(machine, tokens, share, model.hidden_size, 1.0, value_bytes)
    forward = matmul(machine, tokens, share, model.hidden_size, 1.0, value_bytes)
    logits = tokens * share
    chunks = np.ceil(tokens / loss_rows(model, c))
    table = model.hidden_size * share
    passes = [  # (forward, backward) bytes
        ((value_bytes + 5 * 4) * logits, (value_bytes + 2 * 4) * logits),  # fused
        ((value_bytes + 9 * 4) * logits, (value_bytes + 3 * 4) * logits),
        (2 * value_bytes * logits, 2 * value_bytes * logits),
        ((value_bytes + 4 * 4) * logits, (value_bytes + 5 * 4) * logits),
        (
            (3 * value_bytes + 4 * 4) * logits + chunks * (value_bytes + 8) * table,
            (4 + 4 + value_bytes) * table,
        ),
    ]
    logits_kept = c.precision == "autocast"
    megatron = c.software == "megatron"
    compiled = c.software == "compiled"
    ways = [megatron & c.fused_loss, megatron, logits_kept & compiled, logits_kept]
    forward_bytes, backward_bytes = (
        np.select(ways, [each[side] for each in passes[:4]], passes[4][side]) for side in (0, 1)
    )
    return forward + stream(machine, forward_bytes), inputs + weights + stream(
        machine, backward_bytes
    )


def loss_rows(model: Model, c: Columns) -> np.ndarray:
    """Tokens whose logits this workshop's trainer holds at once: `linear_cross_entropy`."""
    return np.minimum(c.tokens(model), max(model.hidden_size, 2**22 // model.vocab_size))


def embedding(machine: Machine, model: Model, c: Columns, value_bytes: float) -> np.ndarray:
    """Seconds of the lookup with its sum, dropout and gradient, forward and backward together."""
    size = c.tokens(model) * model.hidden_size
    return stream(machine, (6 + 8) * value_bytes * size) + 8 * machine.launch
