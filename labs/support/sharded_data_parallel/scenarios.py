"""Given: what the ranks do for a check: train with your class, and weigh what it keeps."""

import gc
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong
from utils.course.observe import LETS_GO, looks
from utils.course.runner import fractions
from utils.measure.memory import Memory
from utils.measure.traffic import Traffic

COPIES = 5  # of the largest unit: gradients and messages while it is reduced


@dataclass(frozen=True)
class Plan:
    """One training. rows: [step][backward pass][rank] -> this rank's rows."""

    widths: tuple[int, ...]
    dtype: torch.dtype
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    scales: tuple[float, ...]  # of the loss, by step
    optimizer: dict  # of SGD: unlike Adam's, its steps grow with the gradient
    seed: int
    lost: tuple[int, int, int, slice] | None = None  # step, rank, unit, parameters without gradient
    nan: int | None = None  # the rank whose loss is NaN in the last step

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        return f"{len(self.widths) - 1} units of widths {list(self.widths)} in {kind}"

    def network(self, rank: int = 0) -> tuple[torch.nn.Module, list[torch.nn.Module]]:
        """A small network and its units, a linear layer and a tanh each; every rank begins with
        weights of its own."""
        units = [
            torch.nn.Sequential(torch.nn.Linear(inputs, outputs, dtype=self.dtype), torch.nn.Tanh())
            for inputs, outputs in itertools.pairwise(self.widths)
        ]
        model = torch.nn.Sequential(*units)
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                drawn = fractions(self.seed + 100 * rank + index, *parameter.shape)
                parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
        return model, units

    def inputs(self, step: int, part: int, rank: int) -> torch.Tensor:
        """(rows, first width), of a rank in a backward pass."""
        seed = self.seed + 10_000 + 1000 * step + 100 * part + rank
        return fractions(seed, self.rows[step][part][rank], self.widths[0], dtype=self.dtype)

    def asked(self, step: int) -> torch.Tensor:
        """(3, first width): what is asked of the model after a step, without gradients."""
        return fractions(self.seed + 90_000 + step, 3, self.widths[0], dtype=self.dtype)

    def loss(self, model: torch.nn.Module, step: int, part: int, rank: int, x: torch.Tensor):
        """This rank's own: the ranks' gradients are averaged, whatever their rows."""
        loss = self.scales[step] * (model(x) - 0.3).square().sum()
        return loss * torch.nan if self.odd(step, rank) and part == 0 else loss

    def odd(self, step: int, rank: int) -> bool:
        return step == len(self.rows) - 1 and rank == self.nan

    def loses(self, step: int, rank: int) -> tuple[int, slice] | None:
        """(unit, parameters of it) without a gradient; rank -1 stands for all ranks."""
        if self.lost is None or self.lost[0] != step or self.lost[1] not in (-1, rank):
            return None
        return self.lost[2:]


def train(answer, stage: str, plans: list[Plan]) -> list[list[dict]]:
    """On a rank: the trainings of all plans, a step of each in turn; [plan][step]."""
    runs = [_training(answer, stage, plan) for plan in plans]
    results = [[] for _ in runs]
    for steps in itertools.zip_longest(*runs):
        for found, step in zip(results, steps):
            found += [step] if step else []
    return results


def _training(answer, stage: str, plan: Plan) -> Iterator[dict]:
    rank = dist.get_rank()
    model, units = plan.network(rank)
    zero = getattr(answer, stage)(units, lambda shards: torch.optim.SGD(shards, **plan.optimizer))
    model.train(plan.seed % 2 == 0)  # who switches dropout off trains all the same
    for unit in zero.units:
        _right_shard(unit, stage)
    for step, backwards in enumerate(plan.rows):
        traffic, losses = Traffic(), []
        with traffic:
            for part in range(len(backwards)):
                loss = plan.loss(model, step, part, rank, plan.inputs(step, part, rank))
                loss.backward()
                losses.append(loss.detach())
            before_step = len(traffic.events)
            if stage == "Zero1" and (lost := plan.loses(step, rank)):
                for parameter in zero.units[lost[0]].parameters[lost[1]]:
                    parameter.grad = None
            zero.step()
        held = [_parameters(unit, stage) for unit in zero.units]  # before anything else is asked
        with Traffic() as asking, torch.no_grad():
            asked = model(plan.asked(step))
        yield {
            "losses": torch.stack(losses),
            "asked": asked,
            "units": held,
            "lengths": [unit.length for unit in zero.units],
            "events": traffic.events,
            "in step": len(traffic.events) - before_step,
            "asking": asking.events,
            "graph": any(unit.flat.requires_grad for unit in zero.units),
        }


def _right_shard(unit, stage: str) -> None:
    """Whether it can be run at all: a shard on released memory would end the process."""
    shape, part = tuple(unit.shard.shape), (unit.length,)
    if shape != part:
        raise Wrong(
            f"own_part has the shape {shape}, and a part is {part}.\n"
            "unit.parts() lists the parts by rank."
        )
    there, flat = unit.shard.untyped_storage(), unit.flat.untyped_storage()
    copied = there.nbytes() > 0 and there.data_ptr() != flat.data_ptr()
    if stage == "Zero3" and not copied:
        raise Wrong(
            "own_part lies in the memory of unit.flat, which is released.\n"
            "It needs memory of its own: a copy."
        )
    if stage != "Zero3" and copied:
        raise Wrong(
            "own_part is a copy: a second set of parameters, and the optimizer changes that one.\n"
            "Return a view of unit.flat."
        )


def _parameters(unit, stage: str) -> torch.Tensor:
    """What this rank holds of the unit's parameters: all of them, at stage 3 its shard."""
    if stage == "Zero3":
        return unit.shard.detach().clone()
    return torch.cat([parameter.detach().flatten() for parameter in unit.parameters])


class Watched(torch.optim.AdamW):
    """Looks at the shards' gradients when they are used."""

    def step(self, closure=None):
        shards = [shard for group in self.param_groups for shard in group["params"]]
        gradients = [shard.grad for shard in shards if shard.grad is not None]
        held = {g.untyped_storage().data_ptr(): _bytes(g) for g in gradients}
        own = sum(g.numel() * g.element_size() for g in gradients)
        if sum(held.values()) > own:
            raise Wrong(
                f"in step() the shards' gradients have {own:,} bytes, and keep "
                f"{sum(held.values()):,} in memory.\nIs a gradient a view of the whole ones?"
            )
        return super().step(closure)


def weigh(answer, stage: str, plan: Plan, steps: int) -> None:
    """On a rank: several steps with AdamW, one row each. Raises Wrong where too much is kept."""
    model, units = plan.network()
    zero = getattr(answer, stage)(units, Watched)
    size, whole = dist.get_world_size(), sum(unit.bytes for unit in zero.units)
    unit = max(unit.bytes for unit in zero.units)
    weights = whole // size if stage == "Zero3" else whole
    state = 2 * whole // size  # AdamW's two averages
    gradients = whole if stage == "Zero1" else whole // size
    small = unit // 8  # a row, and single numbers
    most, moments = weights + state + gradients + COPIES * unit + small, []
    if stage == "Zero3":
        most += unit

    patience = LETS_GO  # until the first wait that was in vain

    def let_go():
        """Waits for the backend, whose messages of one unit would count as the next one's."""
        nonlocal patience
        for _ in looks(patience):
            if sum(memory.now().values()) <= most - (COPIES - 2) * unit:
                return
        patience = 0.0

    def look(moment):
        if moment == "backward":
            let_go()
        held = sum(_bytes(p.grad) for p in model.parameters())
        moments.append((moment, held, sum(_bytes(u.flat) for u in zero.units)))

    for module in units:  # registered after the answer's own hooks, so called after them
        module.register_forward_pre_hook(lambda *_: look("forward"))
        module.register_forward_hook(lambda *_: look("between"))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: look("backward"))
    x = fractions(plan.seed, 1, plan.widths[0], dtype=plan.dtype)
    before = weights + state + small
    with Memory(model=model) as memory:
        for step in range(steps):
            with memory.phase("the forward and backward pass"):
                model(x).square().mean().backward()
            _moments(moments, stage, unit)
            moments.clear()
            # in the first step there is no optimizer state yet
            _no_more(memory, weights + state + gradients + small, "after the backward pass")
            with memory.phase("step()"):
                zero.step()
            left = sum(_bytes(t.grad) for u in zero.units for t in (u.shard, *u.parameters))
            if left:
                raise Wrong(
                    f"after step() .grad still holds {left:,} bytes of gradients.\n"
                    "Nobody needs them any more, neither the whole ones nor those of the shards."
                )
            with torch.no_grad():
                model(x)
            _moments(moments, stage, unit)
            moments.clear()
            now = _no_more(memory, before, f"after step {step + 1}")
            before = min(before, now) if step else before
        phases = memory.phases
    for phase, held in phases.items():
        if stage != "Zero1" and sum(held.values()) > most:
            raise Wrong(
                f"in {phase} up to {sum(held.values()):,} bytes of tensors are alive, and "
                f"{most:,} will do.\nIs each unit done with before the next one begins?"
            )


def _moments(moments: list[tuple[str, int, int]], stage: str, unit: int) -> None:
    """Names the first moment at which more is whole than should be."""
    advice = {
        "between": "after a forward pass: who needs them before its backward pass?",
        "forward": "in the forward pass: one computes, the others must be released",
        "backward": "in the backward pass: one computes, the others must be released",
    }
    for moment, gradients, flats in moments:
        if stage != "Zero1" and gradients > unit:
            raise Wrong(
                f"during the backward pass there are {gradients:,} bytes of whole gradients;\n"
                f"the largest unit has {unit:,}. Forget them as soon as they are reduced."
            )
        if stage == "Zero3" and flats > (0 if moment == "between" else unit):
            words = f"{flats / unit:.0f} unit(s) of whole parameters are in memory"
            raise Wrong(f"{words} {advice[moment]}.")


def _no_more(memory: Memory, most: int, when: str) -> int:
    """The bytes of all tensors now; Wrong if they are more and stay more."""
    for _ in looks():
        held = sum(memory.now().values())
        if held <= most:
            return held
        gc.collect()
    raise Wrong(
        f"{when} {held:,} bytes of tensors are alive, and {most:,} will do.\n"
        "What is kept that nobody needs any more?"
    )


def _bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.untyped_storage().nbytes()
