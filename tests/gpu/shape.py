"""Models of equal size but different shapes: matrix products and attention of a forward pass on one
of four tensor-parallel ranks, against the time computed from whole tiles and waves."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from labs.support.kernels.shape import TOKENS, modelled, products
from tests.gpu.child import tried
from tests.gpu.machine import device
from utils.measure import timing
from utils.models.config import GPTConfig

GIVEN, TP = GPTConfig(vocab_size=50257, hidden_size=2560, layers=32, heads=32), 4
SHAPES = {  # lesson 12, section 9
    "as given: heads of 80": {},
    "vocabulary 50,688": {"vocab_size": 50688},
    "heads of 64": {"heads": 40},
    "heads of 96, width 21 · 128": {"heads": 28, "hidden_size": 2688, "layers": 29},
    "8 key-value heads": {"kv_heads": 8, "intermediate_size": 8128},
    "16 wide layers": {"layers": 16, "hidden_size": 3584, "heads": 56, "intermediate_size": 9216},
    "64 thin layers": {"layers": 64, "hidden_size": 1792, "heads": 28, "intermediate_size": 5120},
}


def shape(rehearse: bool) -> Iterator[tuple[str, dict]]:
    """`seconds` of the products and attention of a forward pass; `of_given`, measured;
    `modelled_of_given`, by whole tiles and waves."""
    where, (tokens, repeats), first = device(rehearse), (16, 1) if rehearse else (TOKENS, 9), None
    for name, changes in SHAPES.items():
        config = replace(GIVEN, **changes)
        row = tried(seconds_of_a_pass, config, tokens, repeats, where)
        if "seconds" in row:
            first = first or row["seconds"]
            row["of_given"] = row["seconds"] / first
            row["modelled_of_given"] = modelled(config, TP) / modelled(GIVEN, TP)
        yield name, row


def seconds_of_a_pass(config: GPTConfig, tokens: int, repeats: int, where: torch.device) -> dict:
    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=where)

    total = 0.0
    for count, n, k in products(config, TP):
        x, weight = drawn(tokens, math.ceil(k)), drawn(math.ceil(n), math.ceil(k))
        total += count * timing.seconds(lambda x=x, weight=weight: F.linear(x, weight), repeats)
    heads, groups = config.heads // TP, config.heads // config.key_value_heads
    q = drawn(1, heads, tokens, config.head_size)
    k, v = (drawn(1, heads // groups, tokens, config.head_size) for _ in range(2))
    attention = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
    total += config.layers * timing.seconds(attention, repeats)
    return {"seconds": total, "parameters": config.parameter_count()}
