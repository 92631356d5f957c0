"""Exercise 02a: accumulate over micro-batches, then one all-reduce, exact to the token.

    optimizer.zero_grad()
    losses, tokens = accumulate(model, micro_batches)   # no communication
    loss = reduce_once(model, losses, tokens)           # one all-reduce, of everything
    optimizer.step()

The micro-batches have different numbers of tokens that count, as do the ranks. Afterwards every
rank has the gradient of the mean loss over *all* tokens that count, in all micro-batches and ranks.
Write the two functions below.
"""

import torch
import torch.distributed as dist

from labs.support.gradient_accumulation.tiny_model import MicroBatch, counted, loss_sum


def accumulate(model: torch.nn.Module, micro_batches: list[MicroBatch]) -> tuple[float, int]:
    """Accumulate the gradients of this rank's micro-batches in `.grad`, one at a time.

    Afterwards `.grad` is the gradient of the sum of this rank's losses. No communication. Returns
    (the sum of the losses, the number of tokens that count), both of this rank only. The losses of
    a bf16 model are added up in fp32 or finer: bf16 would lose the small ones.
    Memory may never hold the activations of more than one micro-batch.
    `loss_sum(model, x, y)` and `counted(y)` are given; see tiny_model.py.
    """
    raise NotImplementedError("backward for each micro-batch; add up its loss and its tokens")


def reduce_once(model: torch.nn.Module, losses: float, tokens: int) -> float:
    """Turn every `.grad` into the gradient of the mean over all tokens of all ranks.

    Returns the mean loss, the same on every rank. One all-reduce for everything: gradients, loss
    and token count, in fp32, or in fp64 if the gradients are fp64. (bf16 gradients are converted to
    fp32: bf16 does not hold all counts above 256.) A rank without micro-batches takes part; a
    `.grad` that is None counts as zeros; a NaN on one rank is a NaN in the mean. At least one token
    counts somewhere. Afterwards only the gradients are kept, not the message.
    """
    parameters = list(model.parameters())
    raise NotImplementedError(
        "gradients, loss and tokens in one tensor; all-reduce, divide, copy back"
    )
