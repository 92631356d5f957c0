"""The matrices of a decoder's blocks, which are compressed, and their inputs.

    matrices(model)                            # {"model.layers.0.self_attn.q_proj": Linear, …}
    smaller = quantized(model, INT8)            # a copy that computes with the rounded matrices
    smaller = rounded(model, lambda name, w: w * mask[name])
    size(model, INT8)                          # bytes as stored: integers and their scales
    with rounded_inputs(model, scales): …      # activations in 8 bits too

Embedding, output layer, norms and biases stay unchanged: in a large model they hold few of the
values, and errors in embedding and output layer affect every token.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from utils.compression.quantize import Scheme, quantize, quantize_rows
from utils.models.gpt import GPT

# matrices with the same input, by the name of the first
READERS = {
    "self_attn.q_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def matrices(model: GPT) -> dict[str, nn.Linear]:
    """{name: Linear} of all linear layers in the blocks."""
    modules = model.model.layers.named_modules(prefix="model.layers")
    return {name: module for name, module in modules if isinstance(module, nn.Linear)}


def first_reader(name: str) -> str:
    """The key of `name`'s input in READERS: q's name for k and v, gate's for up."""
    layer, _, module = name.rpartition(".layers.")[2].partition(".")
    reader = next(first for first, readers in READERS.items() if module in readers)
    return f"model.layers.{layer}.{reader}"


@torch.no_grad()
def rounded(model: GPT, change: Callable[[str, torch.Tensor], torch.Tensor]) -> GPT:
    """A copy of the model in which `change(name, weight)` replaces each matrix."""
    copied = copy.deepcopy(model)
    for name, linear in matrices(copied).items():
        linear.weight.copy_(change(name, linear.weight))
    return copied


def quantized(model: GPT, scheme: Scheme) -> GPT:
    """A copy whose matrices were quantized and dequantized."""
    return rounded(model, lambda name, w: quantize(w, scheme).dequantize())


def size(model: GPT, scheme: Scheme | None = None) -> int:
    """Bytes of a model as stored, with 2 bytes for each value that is not quantized; scheme None:
    none is."""
    inside = matrices(model)
    numbers = sum(linear.weight.numel() for linear in inside.values())
    other = 2 * (model.parameter_count() - numbers)
    if scheme is None:
        return other + 2 * numbers
    return other + sum(quantize(linear.weight, scheme).nbytes for linear in inside.values())


@contextmanager
def rounded_inputs(model: GPT, scales: dict[str, torch.Tensor | float] | None = None) -> Iterator:
    """Inside, the input of each matrix is first rounded to 8 bits.

    scales   calibrated {first reader: scale}; None: each token has its own scale (dynamic)
    """

    def round_input(name):
        scale = None if scales is None else torch.as_tensor(scales[first_reader(name)])

        def hook(module, inputs):
            values, found = quantize_rows(inputs[0], scale)
            return (values.to(inputs[0].dtype) * found,)

        return hook

    hooks = [
        linear.register_forward_pre_hook(round_input(name))
        for name, linear in matrices(model).items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
