"""Exercise 02b: the same with DistributedDataParallel, as practitioners write it.

    model = DDP(new_model())
    loss = train_step(model, micro_batches, optimizer, max_norm=1.0)

DDP all-reduces inside `backward()`, and takes the *mean* over the ranks. So the number of tokens
must be known before the first backward pass. Write the three functions below.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_

from labs.support.gradient_accumulation.tiny_model import MicroBatch, counted, loss_sum


def tokens_of_all(micro_batches: list[MicroBatch]) -> int:
    """The number of tokens that count in all micro-batches of all ranks, the same on every rank.

    One all-reduce of one value. Large runs have more than 2²⁴ tokens per batch: too many for fp32.
    """
    raise NotImplementedError("count here, then all-reduce the count")


def backward(model: DDP, micro_batches: list[MicroBatch], tokens: int) -> torch.Tensor:
    """Run forward and backward for all micro-batches; DDP all-reduces the gradients once, in the
    last.

    One micro-batch at a time: never keep the activations of two. Afterwards `.grad` is the gradient
    of the mean loss over all `tokens` of all ranks. Returns the sum of this rank's losses, a 0-D
    float64 tensor without a graph.
    """
    raise NotImplementedError(
        "forward and backward of each, all but the last inside model.no_sync()"
    )


def train_step(
    model: DDP,
    micro_batches: list[MicroBatch],
    optimizer: torch.optim.Optimizer,
    max_norm: float,
) -> float:
    """Take one optimizer step over all micro-batches; every rank has the same number, at least one.

    The gradient over all ranks is clipped to `max_norm`. Gradients are zero (or None) before and
    after. Returns the mean loss over all tokens of all ranks, the same on every rank. In addition
    to DDP's own message, there are two all-reduces of one value each: the tokens and the loss. A
    NaN on one rank is a NaN on all: no rank leaves the step early.
    """
    tokens = tokens_of_all(micro_batches)
    total = backward(model, micro_batches, tokens)
    raise NotImplementedError(
        "clip (clip_grad_norm_), step, zero; then sum up `total` and return the mean"
    )
