"""Given: the time a GPU spends on the matrix products of a model, as in lesson 12, section 9.

    modelled(config, tp)     # seconds of a forward pass on one of tp H100s, without communication
"""

import math

from utils.models.config import GPTConfig

TILE, SMS, PEAK = 128, 132, 989e12  # elements per side; H100, dense bf16: data sheet
STEP, HEAD = 64, 32  # of k: 128 bytes; FlashAttention rounds heads up to multiples of 32
TOKENS = 2048  # in one sequence


def products(config: GPTConfig, tp: int) -> list[tuple[int, float, float]]:
    """(count, n, k) of the products (tokens, k) · (k, n) in a forward pass on one of tp ranks."""
    c, layers = config, config.layers
    return [
        (layers, (c.query_width + 2 * c.key_width) / tp, c.hidden_size),
        (layers, c.hidden_size, c.query_width / tp),
        (layers, 2 * c.mlp_size / tp, c.hidden_size),
        (layers, c.hidden_size, c.mlp_size / tp),
        (1, c.vocab_size / tp, c.hidden_size),
    ]


def modelled(config: GPTConfig, tp: int) -> float:
    """Seconds per forward pass over TOKENS tokens on one of tp H100s, without communication: waves,
    tiles and steps of k are whole, and heads are rounded up."""
    head = HEAD * math.ceil(config.head_size / HEAD)
    spent = config.layers * config.heads / tp * TOKENS**2 * head  # the causal half of 2 products
    for count, n, k in products(config, tp):
        waves = math.ceil(math.ceil(TOKENS / TILE) * math.ceil(n / TILE) / SMS)
        spent += count * waves * SMS * TILE**2 * STEP * math.ceil(k / STEP)
    return 2 * spent / PEAK
