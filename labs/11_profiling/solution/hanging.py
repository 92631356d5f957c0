"""Lab 11b: the hanging program, fixed. The notebook hands out the one with your number."""

### BEGIN SOLUTION: hand out your programs in the notebook, then fix yours
### STUB:
### STUB:
### STUB: def train(machine, steps):
### STUB:     raise NotImplementedError("hand out your programs in the notebook, then fix yours")
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

SEED = 1836
OFTEN = 2
WIDTHS = (4, 11, 17, 13, 2)
LARGE = 4.0
LR = 0.07


def score(machine, model, group):
    """The mean loss of all ranks on held-out rows."""
    value = machine.score(model)
    dist.all_reduce(value, group=group)
    return value.item() / dist.get_world_size()


def worst(errors, group):
    """The largest error of a row, of all ranks."""
    value = errors.detach().max().view(1)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return value.item()


def largest(value, first, second):
    """The largest of all ranks."""
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=second)
    return value.item()


def network():
    """The same on every rank."""
    torch.manual_seed(SEED)
    layers = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs, dtype=torch.float64), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def whole_error(value, first, second):
    """The sum over the ranks."""
    dist.all_reduce(value, group=first)
    return value.item()


def reduce(model, loss, group):
    """The loss of all ranks; the gradients become sums in their place."""
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([loss.view(1), *[grad.flatten() for grad in grads]])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, flat[1:].split([grad.numel() for grad in grads])):
        grad.copy_(part.view_as(grad))
    return flat[0]


def train(machine, steps):
    """A dictionary for each step that was done."""
    rank = dist.get_rank()
    first, second, third, fourth = (dist.new_group() for _ in range(4))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    done = []
    for step in range(steps):
        x, y, counts = machine.rows(step)
        number = counts.sum().view(1)
        all_numbers = number.clone()
        dist.all_reduce(all_numbers, group=first)
        if not all_numbers:
            continue
        errors = (model(x) - y).square().mean(dim=1) * counts
        (errors.sum() / all_numbers).backward()
        loss = reduce(model, errors.detach().sum() / all_numbers, second)
        row = {"step": step, "loss": loss.item()}
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        if norm > LARGE:
            row["worst"] = worst(errors, third)
        optimizer.step()
        optimizer.zero_grad()
        for name, value in sorted(machine.metrics(step, errors.detach()).items()):
            row[name] = (whole_error if name == "error" else largest)(value, first, second)
        if step % OFTEN == OFTEN - 1:
            row["score"] = score(machine, model, fourth)
        done.append(row)
        stop = torch.tensor([float(machine.asked_to_stop(step))])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=second)
        if stop:
            break
    return done


### END SOLUTION
