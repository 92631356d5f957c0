"""Stages that wait instead of computing: a pipeline's clockwork without its work.

    stages = [WaitingStage(forward=0.01, backward=0.02)]
    pipeline = Pipeline(stages, mesh.pp, "1f1b", WaitingStage.loss, boundary=WaitingStage.boundary)
    pipeline.run(waiting_micro_batches(8))

Stages that compute need a core each; where ranks share cores, a rank's pause is another rank's
chance to compute, and no bubble shows. A stage that sleeps needs no core: four of them show the
bubble of four devices on a laptop. The messages are real.
"""

import time
from functools import partial

import torch
from torch import nn

from utils.parallel.zero_bubble import leave


class WaitingStage(nn.Module):
    """Hands its input on after `forward` seconds, the gradient after `backward` seconds.

    weight  seconds of `backward` that a W action takes over; None: half of them
    """

    def __init__(self, forward: float, backward: float, weight: float | None = None):
        super().__init__()
        self.seconds = forward, backward, backward / 2 if weight is None else weight
        self.scale = nn.Parameter(torch.ones(()))  # something to learn: x has a gradient then

    def forward(self, x):
        return _Wait.apply(x * self.scale, *self.seconds)

    @staticmethod
    def loss(x, y):
        return (x - y).sum()

    @staticmethod
    def boundary(x):
        return x.shape, x.dtype


def waiting_micro_batches(count: int, device="cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one number."""
    return [(torch.ones(1, device=device), torch.zeros(1, device=device)) for _ in range(count)]


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward, weight):
        ctx.seconds = backward, weight
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        backward, weight = ctx.seconds
        time.sleep(backward - weight)
        leave(partial(time.sleep, weight))
        return gradient, None, None, None
