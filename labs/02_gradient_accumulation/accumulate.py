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

    Returns (the sum of the losses, the number of tokens that count), both of this rank alone.
    At no time may memory hold the activations of more than one micro-batch.
    `loss_sum(model, x, y)` and `counted(y)` are given; see tiny_model.py.
    """
    raise NotImplementedError("backward for each micro-batch; add up its loss and its tokens")


def reduce_once(model: torch.nn.Module, losses: float, tokens: int) -> float:
    """Turns every `.grad` into the gradient of the mean over all tokens of all ranks.

    Returns the mean loss, the same on every rank. One all-reduce for everything: gradients, loss
    and tokens. A rank without micro-batches takes part; its gradients are None until then.
    """
    parameters = list(model.parameters())
    raise NotImplementedError(
        "gradients, loss and tokens in one tensor; all-reduce, divide, copy back"
    )
