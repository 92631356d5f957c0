"""Given: what each program of lab 11 should compute, as one rank that has all rows does."""

import itertools

import torch
from torch import nn

from labs.support.profiling.machine import Machine, weights_of
from labs.support.profiling.programs import LARGE, SPIKE, Settings


def network(settings: Settings) -> nn.Sequential:
    """With the weights that rank 0 begins with."""
    torch.manual_seed(settings.seed)
    pairs = itertools.pairwise(settings.widths)
    layers = [(nn.Linear(a, b, dtype=torch.float64), nn.Tanh()) for a, b in pairs]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


def slow(settings: Settings, machine: Machine, steps: int) -> tuple[list[float], list]:
    """The losses, and the weights that each step ends with."""
    model, losses, weights = network(settings), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    for step in range(steps):
        x, y = machine.unpack(machine.read(step))
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append(weights_of(model))
    return losses, weights


def hanging(settings: Settings, machine: Machine, steps: int, often: int) -> list[dict]:
    """What is done in each step. often: steps from one score to the next."""
    model, done = network(settings), []
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    for step in range(steps):
        x, y, counts = machine.rows(step)
        if not counts.any():
            continue
        errors = (model(x) - y).square().mean(dim=1) * counts
        loss = errors.sum() / counts.sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        optimizer.step()
        row = {"step": step, "loss": loss.item()}
        row |= {"error": errors.sum().item(), "largest": errors.max().item()}
        if norm > LARGE:
            row["worst"] = errors.max().item()
        if step % often == often - 1:
            row["score"] = machine.score(model).item()
        done.append(row)
        if step in machine.troubles.stops:
            break
    return done


def wrong(settings: Settings, machine: Machine, steps: int) -> tuple[list[float], list, int]:
    """The losses; the weights that each step began with, and those at the end; the first step whose
    gradient was clipped, or `steps`."""
    model, losses, weights, clipped = network(settings), [], [], steps
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    for step in range(steps):
        x, y, _ = machine.rows(step)
        weights.append(weights_of(model))
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if nn.utils.clip_grad_norm_(model.parameters(), LARGE) > LARGE:
            clipped = min(clipped, step)
        if loss < SPIKE:
            optimizer.step()
        losses.append(loss.item())
    return losses, [*weights, weights_of(model)], clipped
