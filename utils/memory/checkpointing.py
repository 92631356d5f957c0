"""Activation checkpointing: discard activations in the forward pass and recompute them later.

    recompute(model)                         # every layer keeps only its input
    recompute(model, every=2)                # layers 0, 2, 4 … do so; others keep everything
    recompute(model, "selective")            # keep outputs of matrix products, recompute the rest
    recompute(model, "none")                 # undo it

Works in place by replacing each layer's `forward`; parameter names, hooks and checkpoints stay the
same. Apply it before `fully_shard` or DDP. Sources: Chen et al. 2016 (arXiv:1604.06174);
selective recomputation: Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from utils.choices import RECOMPUTE


def _operators(*names):
    """The named operators that this version of torch has."""
    known = [getattr(torch.ops.aten, name, None) for name in names]
    return [operator.default for operator in known if operator is not None]


# Much work per byte of output: selective recomputation keeps these.
KEPT = _operators(
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

_in_parts = ContextVar("in_parts", default=False)


@contextmanager
def in_parts() -> Iterator[None]:
    """Use around attention that is computed in many parts, each as large as their merged result:
    selective recomputation keeps none of them, since together they exceed what it saves."""
    before = _in_parts.set(True)
    try:
        yield
    finally:
        _in_parts.reset(before)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in KEPT and not (_in_parts.get() and "attention" in operator.name()):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def recompute(
    model: torch.nn.Module | None,
    mode: str = "full",
    every: int = 1,
    layers: Iterable[torch.nn.Module] | None = None,
) -> torch.nn.Module | None:
    """Make the layers of `model` recompute their activations in the backward pass; return it.

    mode    "none", "selective" or "full"
    every   1: all layers; k: layers 0, k, 2k …
    layers  modules to choose from; None: model.model.layers

    The same random numbers (dropout) are drawn again. Raises ValueError for an unknown mode.
    """
    if mode not in RECOMPUTE:
        raise ValueError(f"recompute mode {mode!r} is not one of {', '.join(RECOMPUTE)}")
    if type(every) is not int or every < 1:
        raise ValueError(f"every {every!r} is not an integer of at least 1")
    for index, layer in enumerate(model.model.layers if layers is None else layers):
        _restore(layer)
        if mode != "none" and index % every == 0:
            _replace(layer, mode)
    return model


def is_recomputed(layer: torch.nn.Module) -> bool:
    """Whether `recompute` has changed this layer."""
    return isinstance(layer.__dict__.get("forward"), _Recomputed)


class _Recomputed(partial):
    """`checkpoint` with a layer's own forward; a separate class, so that it can be recognized."""


def _replace(layer, mode):
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    layer.forward = _Recomputed(checkpoint, layer.forward, **options)


def _restore(layer):
    if is_recomputed(layer):
        own = layer.forward.args[0]
        del layer.forward
        if getattr(own, "__func__", None) is not type(layer).forward:
            layer.forward = own  # other code had replaced it before
