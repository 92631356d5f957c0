"""A model split into stages: which layers go where, and each rank's stages as modules.

    stages = make_stages(model, mesh.pp)                # this rank's part of a GPT, as a list
    hidden = stages[0](tokens)                          # (B, T) -> (B, T, C)

With p ranks and v chunks per rank the model has p·v stages; rank r holds the stages r, p + r, ….
Parameters keep their names in the whole model, so checkpoints need no renaming.
"""

import statistics
import time
from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn

from utils.models.gpt import GPT, Decoder, cross_entropy
from utils.parallel.mesh import Axis
from utils.parallel.zero_bubble import defer

# ---- 1. which layers go where


def partition(
    costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Split layers into `stages` non-empty ranges that minimize the cost of the slowest stage.

    costs        of each layer, in any unit
    first, last  additional costs at the ends: the embedding; the last norm and lm_head
    Ties go to the smallest sum of squares, then to the partition with more layers in earlier
    stages. Raises ValueError if there are fewer layers than stages.
    """
    costs = [float(cost) for cost in costs]
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"{len(costs)} layers cannot fill {stages} stages, each of which needs one: "
            f"take at most {len(costs)} stages"
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @cache
    def best(stage, begin):
        """(slowest stage, sum of squares, ends of the ranges) for layers from `begin` on."""
        ends = [len(costs)] if stage == stages - 1 else range(begin + 1, len(costs) + 1)
        options = []
        for end in ends:
            if len(costs) - end < stages - 1 - stage:  # at least one layer for each later stage
                break
            cost = sums[end] - sums[begin]
            cost += first * (stage == 0) + last * (stage == stages - 1)
            rest = best(stage + 1, end) if stage < stages - 1 else (0.0, 0.0, ())
            options.append((max(cost, rest[0]), cost**2 + rest[1], (end, *rest[2])))
        return min(options, key=lambda option: (*option[:2], [-end for end in option[2]]))

    ends = best(0, 0)[2]
    return [range(begin, end) for begin, end in zip((0, *ends[:-1]), ends, strict=True)]


def measured_costs(
    model: GPT, tokens: torch.Tensor, repeats: int = 5
) -> tuple[float, list[float], float]:
    """Seconds of a forward and backward pass of (embedding, [each layer], last norm and lm_head).

    Each is the median of `repeats` runs; gradients are not kept. Measure on an idle machine.
    tokens  (B, T) int64 on the model's device
    """
    depth = len(model.model.layers)
    parts = [Stage(model, range(0), is_first=True)]
    parts += [Stage(model, range(number, number + 1)) for number in range(depth)]
    parts += [Stage(model, range(0), is_last=True)]
    seconds = [[] for _ in parts]
    for _ in range(repeats + 1):
        x = tokens
        for times, part in zip(seconds, parts, strict=True):
            x = x.detach().requires_grad_(x.is_floating_point())
            wanted = [p for p in (x, *part.parameters()) if p.requires_grad]
            begin = _now(tokens)
            y = part(x)
            torch.autograd.grad(cross_entropy(y, tokens) if part.is_last else y.sum(), wanted)
            times.append(_now(tokens) - begin)
            x = y
    medians = [statistics.median(times[1:]) for times in seconds]  # the first run warms up
    return medians[0], medians[1:-1], medians[-1]


def _now(like: torch.Tensor) -> float:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return time.perf_counter()


# ---- 2. the stages as modules


class Layers(nn.ModuleList):
    """Some of a model's blocks, under their numbers in the whole model."""

    def __init__(self, blocks: dict[int, nn.Module]):
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)

    def __getitem__(self, place):
        return list(self.children())[place]


class Stage(nn.Module):
    """Consecutive layers of a GPT: hidden states (B, T, C) in, hidden states out.

    The first stage takes tokens (B, T); the last one returns logits (B, T, V) or, with targets
    (B, T), the sum of their losses. The modules are the model's own, not copies; names are those of
    the whole model (`model.layers.7.mlp…`).
    """

    # Positions of the whole sequence, T. Under sequence parallelism hidden states are (B, T_local,
    # C), so `Pipeline` sets it for each micro-batch. None: as many as the input has.
    length: int | None = None

    def __init__(self, model: GPT, layers: range, is_first: bool = False, is_last: bool = False):
        super().__init__()
        self.config, self.is_first, self.is_last = model.config, is_first, is_last
        whole = model.model
        self.model = Decoder(
            model.config,
            whole.embed_tokens if is_first else None,
            Layers({number: whole.layers[number] for number in layers}),
            whole.norm if is_last else None,
        )
        self.lm_head = model.lm_head if is_last else None

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.model(x, self.length)
        if self.lm_head is None:
            return x
        return self.lm_head(x, *([] if targets is None else [targets]))

    def parameter_count(self) -> int:
        """The number of parameters of this stage."""
        return sum(parameter.numel() for parameter in self.parameters())


def make_stages(
    model: GPT, axis: Axis, chunks: int = 1, layers: Sequence[range] | None = None
) -> list[Stage]:
    """This rank's stages of a whole GPT (on any device, meta too): chunk c is stage c·p + rank.

    layers  the layers of every stage of the model, in order; None: nearly equal numbers, with any
            extra layers in the earlier stages. `partition` makes better ones.
    The stages share the model's modules; delete the model to free the rest of it. A tied matrix is
    on both ends: `model.embed_tokens.weight` on the first, `lm_head.weight` on the last. Raises
    ValueError.
    """
    depth, count = len(model.model.layers), axis.size * chunks
    if chunks < 1:
        raise ValueError(f"{chunks} chunks per rank make no pipeline: give at least 1")
    if layers is None:
        layers = partition([1.0] * depth, count)
    if len(layers) != count or [n for part in layers for n in part] != list(range(depth)):
        raise ValueError(
            f"layers {[list(part) for part in layers]} are not {count} stages that hold each of "
            f"{depth} layers once, in order"
        )
    numbers = range(axis.index, count, axis.size)
    return [Stage(model, layers[n], n == 0, n == count - 1) for n in numbers]


# ---- 3. the matrix on both ends


def reduce_tied_gradients(stages: Sequence[nn.Module], axis: Axis) -> None:
    """Give both copies of a tied matrix the sum of their gradients, after the backward passes of a
    step. Every rank of the axis may call it; the two ends exchange their gradients once."""
    if axis.size == 1 or not stages[0].config.tie_embeddings or not (axis.is_first or axis.is_last):
        return
    at_end = stages[0].model.embed_tokens if axis.is_first else stages[-1].lm_head
    gradient = at_end.weight.grad
    mine = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    theirs = torch.empty_like(mine)
    other = axis.ranks[-1] if axis.is_first else axis.ranks[0]
    messages = [
        dist.P2POp(dist.isend, mine.contiguous(), other, axis.group),
        dist.P2POp(dist.irecv, theirs, other, axis.group),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    mine += theirs


# ---- 4. stages that sleep instead of computing


class SleepingStage(nn.Module):
    """Passes its input on after `forward` seconds, and the gradient after `backward` seconds.

        stages = [SleepingStage(forward=0.01, backward=0.02)]
        pipeline = Pipeline(
            stages, mesh.pp, "1f1b", SleepingStage.loss, boundary=SleepingStage.boundary
        )
        pipeline.run(sleeping_micro_batches(8))

    It has a pipeline's timing without its computation. Stages that compute need a core each; if
    ranks share cores, other ranks compute while one waits, and no bubble shows. A sleeping stage
    needs no core, so four of them show the bubble of four devices on a laptop. The messages are
    real.

    weight  the part of the `backward` seconds that a W action takes; None: half
    """

    def __init__(self, forward: float, backward: float, weight: float | None = None):
        super().__init__()
        self.seconds = forward, backward, backward / 2 if weight is None else weight
        self.scale = nn.Parameter(torch.ones(()))  # a parameter, so that x has a gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x * self.scale, *self.seconds)

    @staticmethod
    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).sum()

    @staticmethod
    def boundary(x: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
        return x.shape, x.dtype


def sleeping_micro_batches(
    count: int, device: torch.device | str = "cpu"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of one element."""
    return [(torch.ones(1, device=device), torch.zeros(1, device=device)) for _ in range(count)]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward, weight):
        ctx.seconds = backward, weight
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        backward, weight = ctx.seconds
        time.sleep(backward - weight)
        defer(partial(time.sleep, weight))
        return gradient, None, None, None
