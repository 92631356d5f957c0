"""Lab 11a: the slow program, fixed. The notebook hands out the one with your number."""

### BEGIN SOLUTION: hand out your programs in the notebook, then fix yours
### STUB:
### STUB:
### STUB: def train(machine, steps, after=lambda model: None):
### STUB:     raise NotImplementedError("hand out your programs in the notebook, then fix yours")
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from labs.support.profiling.machine import OFTEN

WIDTHS = (6, 11, 18, 13, 2)
SEED = 7436
LR = 0.07
MICRO_BATCHES = 3


def reduce(model, optimizer, loss):
    """The loss, a mean over the ranks; the gradients become means in their place."""
    tensors = [p.grad for p in model.parameters()]
    flat = torch.cat([loss.view(1), *[tensor.flatten() for tensor in tensors]])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [1, *[tensor.numel() for tensor in tensors]]
    for tensor, part in zip(tensors, flat.split(sizes)[1:]):
        tensor.copy_(part.view_as(tensor))
    return flat[0]


def network():
    """The same on every rank."""
    torch.manual_seed(SEED)
    layers = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Rows(Dataset):
    """This rank's rows, an item for each step."""

    def __init__(self, machine, steps):
        self.machine, self.steps = machine, steps

    def __len__(self):
        return self.steps

    def __getitem__(self, step):
        packed = self.machine.read(step)
        return self.machine.unpack(packed)


def train(machine, steps, after=lambda model: None):
    """The loss of each step. `after(model)` is called at the end of each, on every rank."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step, (x, y) in enumerate(DataLoader(Rows(machine, steps), batch_size=None)):
        if step % OFTEN == 0 and machine.temperature(step) > 90:
            raise RuntimeError(f"rank {dist.get_rank()} is too hot")
        loss = torch.zeros((), dtype=torch.float64)
        for rows, targets in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES)):
            part = (model(rows) - targets).square().sum() / y.numel()
            part.backward()
            loss += part.detach()
        loss = reduce(model, optimizer, loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        machine.log(f"step {step}: loss {losses[-1]:.6f}")
        machine.save(step, model)
        after(model)
    return losses


### END SOLUTION
