"""Exercise 02a: accumulate over micro-batches, then one all-reduce, exact to the token.

    optimizer.zero_grad()
    losses, tokens = accumulate(model, micro_batches)   # no communication
    loss = reduce_once(model, losses, tokens)           # one all-reduce, of everything
    optimizer.step()

The micro-batches have unequal numbers of tokens that count, on each rank its own. Afterwards every
rank has the gradient of the mean loss over *all* tokens that count, of all micro-batches and ranks.
Write the two functions below.
"""

import torch
import torch.distributed as dist

from labs.support.gradient_accumulation.tiny_model import MicroBatch, counted, loss_sum


def accumulate(model: torch.nn.Module, micro_batches: list[MicroBatch]) -> tuple[float, int]:
    """Adds the gradients of this rank's micro-batches up in `.grad`, one after another.

    Afterwards `.grad` is the gradient of the sum of this rank's losses. No communication. Returns
    (the sum of the losses, the number of tokens that count), both of this rank alone. The losses of
    a bf16 model are added up in fp32 or finer: bf16 would lose the small ones.
    At no time may memory hold the activations of more than one micro-batch.
    `loss_sum(model, x, y)` and `counted(y)` are given; see tiny_model.py.
    """
    raise NotImplementedError("backward for each micro-batch; add up its loss and its tokens")


def reduce_once(model: torch.nn.Module, losses: float, tokens: int) -> float:
    """Turns every `.grad` into the gradient of the mean over all tokens of all ranks.

    Returns the mean loss, the same on every rank. One all-reduce for everything: gradients, loss
    and tokens, as fp32 numbers, or fp64 ones if the gradients are fp64. (bf16 gradients become fp32
    on the way: bf16 holds no count above 256 exactly.) A rank without micro-batches takes part;
    where a `.grad` is None, it counts as zeros; a NaN on one rank is one in the mean. At least one
    token counts somewhere. Afterwards nothing is kept but the gradients, no message either.
    """
    parameters = list(model.parameters())
    raise NotImplementedError(
        "gradients, loss and tokens in one tensor; all-reduce, divide, copy back"
    )
