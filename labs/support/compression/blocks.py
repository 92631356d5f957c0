"""Given: a block alone, what a quantized one computes, and models with outlier channels.

y = run(block, x)                       # (B, T, C), positions 0 … T-1
plant(block, [3], [80.0], norm)         # an outlier channel; the function stays
with rounded([block], [seen]): …        # in int8 behind the norms, one scale for each
"""

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterable, Iterator

import torch

from utils.models.gpt import GPT, Block, rotary_tables
from utils.serving.engine.linear import exact

READERS = {  # norm -> who reads what it hands on
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
HIGHEST = 127


def run(block: Block, x: torch.Tensor) -> torch.Tensor:
    """x (B, T, C) -> (B, T, C)."""
    attention = block.self_attn
    config = _Rotary(attention.head_size)
    cos, sin = rotary_tables(config, torch.arange(x.shape[1]), x.dtype)
    return block(x, cos[:, None], sin[:, None])


class _Rotary:
    """What the rotary tables ask of a config."""

    def __init__(self, head_size: int):
        self.head_size, self.rope_theta, self.rope_scaling = head_size, 10_000.0, None


@torch.no_grad()
def inputs_of(model: GPT, batches: list) -> list[list[torch.Tensor]]:
    """For each block the hidden states that come in, a tensor for each batch."""
    found = [[] for _ in model.model.layers]
    hooks = [
        layer.register_forward_pre_hook(lambda _, given, kept=kept: kept.append(given[0].clone()))
        for layer, kept in zip(model.model.layers, found)
    ]
    try:
        for tokens, _ in batches:
            model.model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


@torch.no_grad()
def observed(block: Block, inputs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """{norm: (C,)}, fp32: the largest magnitude of each channel that the norm hands on."""
    found = {name: [] for name in READERS}
    hooks = [
        block.get_submodule(name).register_forward_hook(
            lambda _, given, y, kept=kept: kept.append(y.abs().flatten(0, 1).amax(dim=0))
        )
        for name, kept in found.items()
    ]
    for x in inputs:
        run(block, x)
    for hook in hooks:
        hook.remove()
    return {name: torch.stack(parts).amax(dim=0).float() for name, parts in found.items()}


@torch.no_grad()
def plant(block: Block, channels: list[int], factors: list[float], norm: str) -> None:
    """These channels of what the norm hands on become so many times larger; the function stays."""
    for channel, factor in zip(channels, factors):
        block.get_submodule(norm).weight[channel] *= factor
        for reader in READERS[norm]:
            block.get_submodule(reader).weight[:, channel] /= factor


def round_rows(weight: torch.Tensor) -> torch.Tensor:
    """A matrix as int8 with a scale for each row has it."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / HIGHEST
    return (weight / scale).round().clamp(-HIGHEST, HIGHEST) * scale


def round_all(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Activations as int8 with one scale that was calibrated before has them."""
    return (x / scale).round().clamp(-HIGHEST, HIGHEST) * scale


@contextlib.contextmanager
def rounded(blocks: Iterable[Block], seen: Iterable[dict[str, torch.Tensor]]) -> Iterator[None]:
    """Inside, the readers of both norms of each block compute as in int8, with scales from what
    was seen before."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        for (block, largest), name in itertools.product(zip(blocks, seen), READERS):
            scale = largest[name].max().clamp(min=1e-30).item() / HIGHEST
            for reader in READERS[name]:
                linear = block.get_submodule(reader)
                stack.callback(linear.weight.data.copy_, linear.weight.detach().clone())
                linear.weight.copy_(round_rows(linear.weight))
                hook = linear.register_forward_pre_hook(
                    lambda _, given, scale=scale: (round_all(given[0], scale),)
                )
                stack.callback(hook.remove)
        yield


@functools.cache
def whole_products() -> torch.library.Library | None:
    """Where PyTorch's product of int8 matrices is wrong for large numbers, as on CPUs without VNNI,
    this process gets one that is right; None where it is."""
    if exact("cpu"):
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes the place of another
        library.impl("_int_mm", lambda x, w: (x.double() @ w.double()).int(), "CPU")
    return library
