"""Given: a single block, its outlier channels, and models whose inputs are rounded to int8."""

import copy
import functools
import warnings
from collections.abc import Iterable
from types import SimpleNamespace

import torch

from utils.compression.quantize import INT8, quantize, quantize_rows
from utils.models.gpt import GPT, Block, rotary_tables
from utils.serving.engine.linear import exact

READERS = {  # norm -> the layers that read its output
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
HIGHEST = INT8.highest


def run(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Run a block: x (B, T, C) -> (B, T, C)."""
    config = SimpleNamespace(
        head_size=block.self_attn.head_size, rope_theta=10_000.0, rope_scaling=None
    )
    cos, sin = rotary_tables(config, torch.arange(x.shape[1]), x.dtype)
    return block(x, cos[:, None], sin[:, None])


@torch.no_grad()
def inputs_of(model: GPT, batches: list) -> list[list[torch.Tensor]]:
    """The hidden states that enter each block, one tensor per batch."""
    found, states = [], [model.model.embed_tokens(tokens) for tokens, _ in batches]
    for block in model.model.layers:
        found.append(states)
        states = [run(block, x) for x in states]
    return found


@torch.no_grad()
def observed(block: Block, inputs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """{norm: (C,)}, fp32: the largest magnitude of each channel of the norm's output."""
    block, found = copy.deepcopy(block), {norm: [] for norm in READERS}
    for norm, seen in found.items():
        block.get_submodule(norm).register_forward_hook(
            lambda _, given, y, seen=seen: seen.append(y.abs().flatten(0, 1))
        )
    for x in inputs:
        run(block, x)
    return {norm: torch.cat(seen).amax(dim=0).float() for norm, seen in found.items()}


@torch.no_grad()
def plant(block: Block, channels: list[int], factors: list[float], norm: str) -> None:
    """Multiply channels of the norm's output by factors, leaving the block's function unchanged."""
    for channel, factor in zip(channels, factors):
        block.get_submodule(norm).weight[channel] *= factor
        for reader in READERS[norm]:
            block.get_submodule(reader).weight[:, channel] /= factor


@torch.no_grad()
def rounded(model: GPT, seen: Iterable[dict[str, torch.Tensor]]) -> GPT:
    """A copy whose readers compute as in int8, with input scales from the magnitudes `seen`."""
    model = copy.deepcopy(model)
    for block, largest in zip(model.model.layers, seen):
        for norm, readers in READERS.items():
            scale = largest[norm].max() / HIGHEST
            for reader in map(block.get_submodule, readers):
                reader.weight.copy_(quantize(reader.weight, INT8).dequantize())
                reader.register_forward_pre_hook(
                    lambda _, given, scale=scale: (quantize_rows(given[0], scale)[0] * scale,)
                )
    return model


@functools.cache
def whole_products() -> torch.library.Library | None:
    """Replace PyTorch's int8 product where it is wrong, as on CPUs without VNNI."""
    if exact("cpu"):
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that it overrides a kernel
        library.impl("_int_mm", lambda x, w: (x.double() @ w.double()).int(), "CPU")
    return library
