"""A model that has some positions of each sequence, and attends to all of them.

    context_parallel(model, mesh.cp, "ring")                in place
    logits = model(tokens)                                  tokens (B, T) -> logits (B, T_local, V)
    loss = loss_of_own(cross_entropy, mesh.cp)(logits, targets, reduction="sum")

Every rank of the axis is given the same whole rows: tokens are 8 bytes each, where each layer's
activations are thousands. Behind the embedding it has its own positions only (`positions.py`), and
so have all layers, which need not know: what a token does alone, norms, matrices, the MLP, is done
where it is. Only attention looks elsewhere.

A row is one text to its end: the course packs no documents into a row, so there is no mask between
them here.

Sequence parallelism is something else: there the ranks of *tensor* parallelism share out the
positions between the matrices, and have all of them inside. Both go together.
"""

from collections.abc import Callable
from functools import partial
from itertools import repeat

import torch
from torch import nn

from utils.models.config import GPTConfig
from utils.models.gpt import Decoder, rotary_tables
from utils.models.moe import moe_layers
from utils.parallel.context.positions import held, own_positions, positions
from utils.parallel.context.ring import Gather, Ring, attention_over
from utils.parallel.context.ulysses import ulysses_attention
from utils.parallel.mesh import Axis
from utils.parallel.tp_ops import summed

WAYS = {
    "ring": partial(attention_over, travel=Ring),
    "gather": partial(attention_over, travel=Gather),
    "ulysses": ulysses_attention,
}


def context_parallel(model: nn.Module, axis: Axis, way: str = "ring") -> nn.Module:
    """Shares out the positions of a GPT, or of a stage of one, over the axis, in place; returns it.

    way   "ring", "ulysses" or "gather": how attention sees the other ranks' positions
    Parameters stay whole. A rank's gradients are those of its own positions: they are to be summed
    over the axis, as those of rows are over dp. Raises ValueError for another way.
    """
    if way not in WAYS:
        raise ValueError(f"context {way!r} is not one of {', '.join(WAYS)}")
    if axis.size == 1:
        return model
    for module in model.modules():
        if isinstance(module, Decoder):
            enter = partial(_enter, axis, WAYS[way])
            module.shared_positions = module.register_forward_pre_hook(enter, with_kwargs=True)
    for layer in moe_layers(model):  # its loss is of whole sequences
        layer.over_sequence = partial(summed, group=axis.group)
    return model


def whole_sequences(model: nn.Module) -> nn.Module:
    """Undoes `context_parallel`: the model takes whole sequences, alone."""
    for module in model.modules():
        if hasattr(module, "shared_positions"):
            module.shared_positions.remove()
            del module.shared_positions
    for layer in moe_layers(model):
        layer.over_sequence = None
    return model


def _enter(axis, way, decoder, args, kwargs):
    """Before a Decoder's forward pass: whole rows, or hidden states of this rank's positions."""
    x, length = args[0], (args[1] if len(args) > 1 else None) or args[0].shape[1]
    decoder.check_length(length)
    if decoder.embed_tokens is not None:
        x = own_positions(x, axis)
    seen = Context(decoder.config, axis, way, length, x.device)
    return (x, held(seen.mine)), {**kwargs, "context": seen}


class Context:
    """What attention sees of one forward pass: what `Decoder` asks of a `context`.

    It is made anew for each, so that a layer which is computed again finds its own.
    """

    def __init__(
        self, config: GPTConfig, axis: Axis, way: Callable, length: int, device: torch.device
    ):
        if length < axis.size:
            raise ValueError(
                f"a sequence of {length} tokens leaves some of {axis.size} context-parallel ranks "
                "without a position: take longer sequences or fewer ranks"
            )
        self.mine = positions(length, axis.size)[axis.index]
        self.config, self.device = config, device
        self.layers = repeat(self)
        self._attend = partial(way, axis=axis, length=length)

    def tables(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary cosines and sines of this rank's true positions, (T_local, 1, D) each."""
        places = torch.cat([torch.arange(p.start, p.stop, device=self.device) for p in self.mine])
        cos, sin = rotary_tables(self.config, places, dtype)
        return cos[:, None], sin[:, None]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (B, T_local, H, D), k and v (B, T_local, K, D) -> (B, T_local, H·D)."""
        return self._attend(q, k, v)


def loss_of_own(loss: Callable[..., torch.Tensor], axis: Axis) -> Callable[..., torch.Tensor]:
    """`loss` for logits of this rank's positions and targets (B, T) of whole rows.

    Let it be summed, and divide by all tokens of all ranks: they may hold unequal numbers of
    positions, and the mean of their means is not the mean.
    """
    if axis.size == 1:
        return loss

    def of_own(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"):
        return loss(logits, own_positions(targets, axis), reduction=reduction)

    return of_own
