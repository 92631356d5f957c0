"""Lab 11c: the wrong program, fixed. The notebook hands out the one with your number."""

### BEGIN SOLUTION: hand out your programs in the notebook, then fix yours
### STUB:
### STUB:
### STUB: def train(machine, steps, watching=None):
### STUB:     raise NotImplementedError("hand out your programs in the notebook, then fix yours")
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from labs.support.profiling.machine import unwatched

LR = 0.1
SEED = 5980
SPIKE = 1000000.0
LAST = 5
WIDTHS = (7, 13, 22, 14, 2)
LARGE = 4.0


def send(model):
    """All ranks begin with the weights of rank 0."""
    parameters = list(model.parameters())
    for first, end in ((0, 4), (4, 7), (7, 8)):
        for p in parameters[first:end]:
            dist.broadcast(p.data, 0)


def mean(tensors):
    """These tensors become means over the ranks, in one message."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


def network():
    """Every rank begins with weights of its own."""
    torch.manual_seed(SEED + dist.get_rank())
    layers = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def reduce(model, loss):
    """The loss, a mean over the ranks; the gradients become means in their place."""
    parameters = list(model.parameters())
    for first, end in ((0, 3), (3, 4), (4, 5)):
        mean([p.grad for p in parameters[first:end]])
    tail = torch.cat([loss.view(1), *[p.grad.flatten() for p in parameters[LAST:]]])
    dist.all_reduce(tail)
    tail /= dist.get_world_size()
    sizes = [p.numel() for p in parameters[LAST:]]
    for p, part in zip(parameters[LAST:], tail[1:].split(sizes)):
        p.grad.copy_(part.view_as(p))
    return tail[0]


def train(machine, steps, watching=unwatched):
    """The loss of each step. `watching(model)` may be a `utils.measure.divergence.Watch`."""
    model = network()
    send(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    with watching(model) as watch:
        for step in range(steps):
            x, y, _ = machine.rows(step)
            loss = (model(x) - y).square().mean()
            loss.backward()
            own = loss.detach().clone()
            loss = reduce(model, own)
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGE)
            watch.step()
            if loss < SPIKE:
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


### END SOLUTION
