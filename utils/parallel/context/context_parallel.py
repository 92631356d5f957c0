"""A model that holds some positions of each sequence and attends to all of them.

    context_parallel(model, mesh.cp, "ring")                in place
    logits = model(tokens)                                  tokens (B, T) -> logits (B, T_local, V)
    loss = loss_of_own(cross_entropy, mesh.cp)(logits, targets, reduction="sum")

Every rank of the axis gets the same whole rows: a token is 8 bytes, while each layer's activations
are thousands. After the embedding, a rank has only its own positions (`positions.py`). Most layers
need not know: norms, matrices and the MLP treat each token alone. Only attention looks at other
positions.

A row is a single text: the course packs no documents into a row, so there is no mask between them
here.

Sequence parallelism is something else: there the ranks of *tensor* parallelism split the positions
between the matrices and have all of them inside. The two can be combined.
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
    """Split the positions of a GPT, or of a stage of one, over the axis, in place; return it.

    way   "ring", "ulysses" or "gather": how attention sees the other ranks' positions
    Parameters stay whole. A rank's gradients are those of its own positions: they must be summed
    over the axis, as those of rows are over dp. Raises ValueError for any other way.
    """
    if way not in WAYS:
        raise ValueError(f"context {way!r} is not one of {', '.join(WAYS)}")
    if axis.size == 1:
        return model
    for module in model.modules():
        if isinstance(module, Decoder):
            enter = partial(_enter, axis, WAYS[way])
            module.shared_positions = module.register_forward_pre_hook(enter, with_kwargs=True)
    for layer in moe_layers(model):  # its loss is over whole sequences
        layer.over_sequence = partial(summed, group=axis.group)
    return model


def whole_sequences(model: nn.Module) -> nn.Module:
    """Undo `context_parallel`: the model takes whole sequences again, on one rank."""
    for module in model.modules():
        if hasattr(module, "shared_positions"):
            module.shared_positions.remove()
            del module.shared_positions
    for layer in moe_layers(model):
        layer.over_sequence = None
    return model


def _enter(axis, way, decoder, args, kwargs):
    """Prepare a Decoder's input: whole rows, or hidden states of this rank's positions."""
    x, length = args[0], (args[1] if len(args) > 1 else None) or args[0].shape[1]
    decoder.check_length(length)
    if decoder.embed_tokens is not None:
        x = own_positions(x, axis)
    seen = Context(decoder.config, axis, way, length, x.device)
    return (x, held(seen.mine)), {**kwargs, "context": seen}


class Context:
    """The `context` of a `Decoder` in one forward pass: how its attention sees the sequence.

    Each forward pass creates its own, so that a recomputed layer finds the right one.
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
        """Rotary cosines and sines for this rank's true positions, (T_local, 1, D) each."""
        places = torch.cat([torch.arange(p.start, p.stop, device=self.device) for p in self.mine])
        cos, sin = rotary_tables(self.config, places, dtype)
        return cos[:, None], sin[:, None]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (B, T_local, H, D), k and v (B, T_local, K, D) -> (B, T_local, H·D)."""
        return self._attend(q, k, v)


def loss_of_own(loss: Callable[..., torch.Tensor], axis: Axis) -> Callable[..., torch.Tensor]:
    """`loss` for logits of this rank's positions and targets (B, T) of whole rows.

    Sum the losses and divide by all tokens of all ranks: the ranks may hold different numbers of
    positions, and then the mean of their means is not the mean.
    """
    if axis.size == 1:
        return loss

    def of_own(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"):
        return loss(logits, own_positions(targets, axis), reduction=reduction)

    return of_own
