"""Given: what a GPU spends on the matrix products of a shape, as in lesson 12, section 9.

    modelled(config, tp)     # seconds of a forward pass on one of tp H100s, without communication
"""

import math

from utils.models.config import GPTConfig

TILE, SMS, PEAK = 128, 132, 989e12  # values on a side; of an H100, dense bf16: its data sheet
STEP, HEAD = 64, 32  # values of k, 128 bytes; what FlashAttention's kernels round a head up to
TOKENS = 2048  # one sequence


def products(config: GPTConfig, tp: int) -> list[tuple[int, float, float]]:
    """(count, n, k) of the products (tokens, k) · (k, n) of a forward pass on one of tp ranks."""
    c, layers = config, config.layers
    return [
        (layers, (c.query_width + 2 * c.key_width) / tp, c.hidden_size),
        (layers, c.hidden_size, c.query_width / tp),
        (layers, 2 * c.mlp_size / tp, c.hidden_size),
        (layers, c.hidden_size, c.mlp_size / tp),
        (1, c.vocab_size / tp, c.hidden_size),
    ]


def modelled(config: GPTConfig, tp: int) -> float:
    """Seconds of a forward pass over TOKENS tokens on one of tp H100s: whole waves of whole tiles,
    whole steps of k, heads rounded up. Communication is left out."""
    head = HEAD * math.ceil(config.head_size / HEAD)
    spent = config.layers * config.heads / tp * TOKENS**2 * head  # of 2 products, the causal half
    for count, n, k in products(config, tp):
        waves = math.ceil(math.ceil(TOKENS / TILE) * math.ceil(n / TILE) / SMS)
        spent += count * waves * SMS * TILE**2 * STEP * math.ceil(k / STEP)
    return 2 * spent / PEAK
