"""Given: a network of different layers, the cost of each, and a real step under a plan."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from utils.measure import timing
from utils.measure.memory import Memory

ROWS, WIDTH = 128, 64
# (inner size, number of activation functions): many functions save much and compute little
SHAPES = [(64, 2), (256, 1), (32, 9), (128, 4), (512, 1), (64, 6), (96, 3), (256, 2)]


@dataclass(frozen=True)
class Layer:
    """The bytes that one layer keeps and the cost of running it again."""

    input_bytes: int
    inside_bytes: int
    flops: int


def network() -> nn.ModuleList:
    """Eight layers, each from (ROWS, WIDTH) to (ROWS, WIDTH)."""
    torch.manual_seed(0)
    return nn.ModuleList(
        nn.Sequential(
            nn.Linear(WIDTH, inside), *[nn.Tanh() for _ in range(times)], nn.Linear(inside, WIDTH)
        )
        for inside, times in SHAPES
    )


def batch() -> torch.Tensor:
    """The input of the first layer, (ROWS, WIDTH)."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def measure_layers(layers: nn.ModuleList, x: torch.Tensor) -> list[Layer]:
    """Run each layer on its own and count its bytes and FLOPs."""
    runs = [(partial(layer, x), [*layer.parameters(), x]) for layer in layers]
    return [Layer(x.nbytes, timing.saved_bytes(run, own), timing.flops(run)) for run, own in runs]


def forward_backward(layers: nn.ModuleList, x: torch.Tensor, recomputed: set[int]) -> None:
    """Run one real pass in which the layers in `recomputed` are checkpointed."""
    with set_checkpoint_early_stop(False):  # PyTorch would stop before a layer's last product
        x = x.clone().requires_grad_()
        for index, layer in enumerate(layers):
            x = checkpoint(layer, x, use_reentrant=False) if index in recomputed else layer(x)
        x.sum().backward()  # this loss keeps nothing
    layers.zero_grad()


def real_peak(layers: nn.ModuleList, x: torch.Tensor, recomputed: set[int]) -> int:
    """The measured peak of activations in a real pass, in bytes."""
    with Memory(model=layers) as memory:
        forward_backward(layers, x, recomputed)
    return max(held["activations"] for _, held in memory.timeline)


def measured() -> tuple[nn.ModuleList, torch.Tensor, list[Layer], int]:
    """The network, its input, its layers' costs, and its peak without recomputation."""
    layers, x = network(), batch()
    return layers, x, measure_layers(layers, x), real_peak(layers, x, set())
