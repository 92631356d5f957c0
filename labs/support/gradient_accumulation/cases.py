"""Given: how the checks of exercises 02a and 02b draw a training, and what is right in it.

A rank works out what is right for its own micro-batches, in float64; what is right for all ranks
together is a sum, which the judge makes.
"""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from labs.support.gradient_accumulation import tiny_model
from utils.course.observe import Look
from utils.course.runner import Trial


@dataclass(frozen=True)
class Case:
    """A model, and for each step and rank its micro-batches."""

    dtype: torch.dtype
    vocab: int
    width: int
    length: int
    seed: int
    rows: list  # [step][rank][micro-batch][row]: how many of the row's targets count
    lr: float
    odd: int  # the rank that differs from the others

    def __str__(self) -> str:
        name = str(self.dtype).split(".")[1]
        return f"a {name} model of {self.vocab} words and width {self.width}"

    def new_model(self) -> torch.nn.Module:
        """The same on every rank."""
        return tiny_model.new_model(self.seed, self.vocab, self.width, self.dtype)

    def share(self, step: int, rank: int) -> list[tiny_model.MicroBatch]:
        """The micro-batches of a rank."""
        seed = self.seed + 100 * step + rank
        return tiny_model.micro_batches(seed, self.rows[step][rank], self.vocab, self.length)


def draw_case(trial: Trial, size: int, dtype: torch.dtype, equally_many: bool) -> Case:
    """Five steps, of 1, 2, 2, 3 and more than 8 micro-batches, all of other rows and tokens.

    One micro-batch is all padding, and so is one rank's whole share of the second step.
    equally_many: all ranks have as many micro-batches; else the numbers differ, and one rank has
    none in the first step.
    """
    draw, length = trial.draw, trial.draw.randrange(8, 13)
    odd, rows = draw.randrange(size), []
    counts = [1, 2, 2, 3, draw.randrange(9, 12)]
    draw.shuffle(counts)
    for step in range(len(counts)):
        shift = [0 if equally_many else rank for rank in range(size)]
        rows.append([
            [[draw.randrange(length + 1) for _ in range(draw.randrange(22, 25))]
             for _ in range(counts[(step + s) % len(counts)])] for s in shift
        ])
        rows[-1][(odd + 1) % size][0].append(length)  # some tokens must count
    if size > 1:
        rows[0][odd] = rows[0][odd] if equally_many else []
        rows[1][odd] = [[0] * len(one) for one in rows[1][odd]]
    longer = max(rows[2:], key=lambda step: len(step[odd]))
    longer[odd][-1] = [0] * 24
    return Case(
        dtype, draw.randrange(9, 14), draw.randrange(4, 8), length,
        trial.new_seed() // 2, rows, draw.uniform(0.2, 0.8), odd,
    )


def some(trial: Trial, size: int, *dtypes: torch.dtype) -> list[tuple[torch.dtype, bool]]:
    """Types, and whether the network is late: all of them, the last late, on 2 and 3 ranks; more
    ranks are no reason to repeat them, so there one is drawn."""
    if size in (2, 3):
        return [(dtype, dtype == dtypes[-1]) for dtype in dtypes]
    return [(trial.draw.choice(dtypes), trial.draw.random() < 0.5)]


@dataclass(frozen=True)
class Part:
    """What a micro-batch adds to the step: sums over its tokens, in float64."""

    grad: torch.Tensor  # of all parameters, 1-D
    loss: float
    tokens: int
    positions: int  # tokens and padding


def parts(model: torch.nn.Module, share: list[tiny_model.MicroBatch]) -> list[Part]:
    """What is right for each micro-batch of a share."""
    twin, found = copy.deepcopy(model).double(), []
    for x, y in share:
        loss = tiny_model.loss_sum(twin, x, y)
        grads = torch.autograd.grad(loss, list(twin.parameters()))
        found.append(Part(flat(grads), loss.item(), tiny_model.counted(y), y.numel()))
    return found


@dataclass(frozen=True)
class Memory:
    """Bytes of what is made in a step, and alive at the same time.

    forward: at the end of a forward pass; peak: at any time; both at most.
    """

    forward: int
    peak: int

    def above(self, right: "Memory", spare: int) -> bool:
        """Whether more lives than `right`, of one micro-batch after another, and so many bytes."""
        return self.forward > 1.1 * right.forward + spare or self.peak > 1.1 * right.peak + spare


@contextlib.contextmanager
def memory_in(model: torch.nn.Module, look: Look) -> Iterator[list[Memory]]:
    """What lives inside, by `look`, as the only item when the block has ended."""
    found, ends = [], [0]
    handle = model.register_forward_hook(lambda *_: ends.append(look.alive))
    try:
        yield found
    finally:
        handle.remove()
        found.append(Memory(max(ends), look.peak))


def right_memory(model: torch.nn.Module, share: list[tiny_model.MicroBatch]) -> Memory:
    """Of one micro-batch after another: of the one with the most rows."""
    twin, look = copy.deepcopy(model), Look()
    with look, memory_in(twin, look) as found:
        for x, y in sorted(share, key=lambda one: len(one[0]))[-1:]:
            tiny_model.loss_sum(twin, x, y).backward()
    return found[0]


def flat(tensors) -> torch.Tensor:
    """One 1-D tensor of all numbers, in memory of its own."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def parallel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is a multiple of the other, to five digits."""
    a, b = a.double(), b.double()
    return bool((a * b.norm() - b * a.norm()).norm() <= 1e-5 * a.norm() * b.norm())


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether they are equal to five digits."""
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= 1e-5 * b.norm())
