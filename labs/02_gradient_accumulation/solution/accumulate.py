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
    ### BEGIN SOLUTION: backward for each micro-batch; add up its loss and its tokens
    losses, tokens = 0.0, 0
    for x, y in micro_batches:
        loss = loss_sum(model, x, y)
        loss.backward()
        losses += loss.item()
        tokens += counted(y)
    return losses, tokens
    ### END SOLUTION


def reduce_once(model: torch.nn.Module, losses: float, tokens: int) -> float:
    """Turns every `.grad` into the gradient of the mean over all tokens of all ranks.

    Returns the mean loss, the same on every rank. One all-reduce for everything: gradients, loss
    and tokens. A rank without micro-batches takes part; its gradients are None until then.
    """
    parameters = list(model.parameters())
    ### BEGIN SOLUTION: gradients, loss and tokens in one tensor; all-reduce, divide, copy back
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in parameters]
    numbers = grads[0].new_tensor([losses, tokens])
    message = torch.cat([*(grad.flatten() for grad in grads), numbers])
    dist.all_reduce(message)
    *pieces, (losses, tokens) = message.split([*(grad.numel() for grad in grads), 2])
    for grad, piece in zip(grads, pieces):
        grad.copy_((piece / tokens).view_as(grad))
    return (losses / tokens).item()
    ### END SOLUTION
