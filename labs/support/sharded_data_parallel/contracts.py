"""Given: the contracts of exercises 05a, b and c, and the judges behind their check cells.

1 to 6 real ranks train small networks with your class, and one rank trains the same in fp64: values
must agree after every step, and no rank may send or keep more than its ZeRO stage requires.
"""

import functools
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, close, same_bits, told
from utils.course.contract import BOTH
from utils.course.observe import looks
from utils.course.runner import Trial, fractions
from utils.measure.memory import Memory
from utils.measure.traffic import Traffic

SENT = {
    "Zero1": "a step sends at most 2 times the parameters · (N−1)/N, in 2 messages per unit",
    "Zero2": "a rank sends the parameters · (N−1)/N in a backward pass, and as much in step()",
    "Zero3": "a rank sends 3 times the parameters · (N−1)/N per forward and backward pass",
}
KEPT = {
    "Zero1": "parameters + gradients + optimizer state/N",
    "Zero2": "parameters + (gradients + optimizer state)/N, and one unit's full gradients",
    "Zero3": "(parameters + gradients + optimizer state)/N, and one full unit",
}
LIBRARY = (
    "utils", "fsdp", "fully_shard", "FullyShardedDataParallel", "ZeroRedundancyOptimizer",
    "DistributedDataParallel", "deepspeed", "DTensor", "distribute_tensor", "accelerate",
    "torch.distributed.optim", "torch.distributed.tensor", "torch.nn.parallel",
)
HANG = "Do all ranks call the same collectives for the same units, regardless of their rows?"


def judge(trial: Trial, stage: str) -> str:
    """Judge a class in the file."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        for late in (True, False) if group.size == 2 else (False,):
            plan = Plan.drawn(trial, group.size, stage)
            case = group.case(str(plan)) + ", messages that come late" * late
            ranks, right = group.run(case, train, plan, late=late), alone(plan, group.size)
            for step, found in enumerate(zip(*ranks)):
                where = f"{case}: step {step + 1} ({len(plan.rows[step])} backward passes)"
                right_values(where, plan, step, found, right[step : step + 2])
                for rank, result in enumerate(found):
                    right_traffic(f"{where}, rank {rank}", plan, step, result)
        if group.size == 2:
            plan = Plan(stage, (trial.draw.randrange(40, 60),) * 10, BOTH[0], trial.new_seed())
            group.run(group.case(str(plan)), weigh, plan)
    return (
        "parameters and losses equal one rank's on 1 to 6 ranks, in fp32 and fp64, even with late\n"
        f"messages;\n{SENT[stage]};\nmemory on 2 ranks: {KEPT[stage]};\n"
        "a step leaves nothing else behind."
    )


zero1, zero2, zero3 = (functools.partial(judge, stage=stage) for stage in SENT)

# ---- a training, the same on N ranks and on one


@dataclass(frozen=True)
class Plan:
    """A training. rows: [step][backward pass][rank] -> number of rows."""

    stage: str
    widths: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    rows: list[list[list[int]]] | None = None
    optimizer: dict | None = None  # SGD's: unlike Adam's, its steps grow with the gradient

    @staticmethod
    def drawn(trial: Trial, size: int, stage: str) -> "Plan":
        """Three steps: two with one backward pass, then one with several."""
        draw = trial.draw
        widths = [draw.randrange(5, 14) for _ in range(draw.choice([2, 3, 4]))]
        passes = [1, 1, draw.randrange(2, 4)]
        rows = [[[draw.randrange(1, 12) for _ in range(size)] for _ in range(n)] for n in passes]
        optimizer = {"lr": draw.uniform(0.01, 0.05), "momentum": 0.7}
        seed = trial.new_seed()
        return Plan(stage, tuple(widths), BOTH[size % 2], seed, rows, optimizer)

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        return f"{len(self.widths) - 1} units of widths {list(self.widths)} in {kind}"

    def network(self, rank: int = 0) -> torch.nn.Sequential:
        """Each unit is a linear layer and a tanh; every rank starts with its own weights."""
        units = [
            torch.nn.Sequential(torch.nn.Linear(inputs, outputs, dtype=self.dtype), torch.nn.Tanh())
            for inputs, outputs in itertools.pairwise(self.widths)
        ]
        model = torch.nn.Sequential(*units)
        for index, parameter in enumerate(model.parameters()):
            drawn = fractions(self.seed + 100 * rank + index, *parameter.shape)
            parameter.data.copy_(drawn / parameter.shape[-1] ** 0.5)
        return model

    def backward(self, model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        """Run a rank's backward passes; return the losses."""
        losses, dtype = [], next(model.parameters()).dtype
        for part, rows in enumerate(self.rows[step]):
            seed = self.seed + 10_000 + 1000 * step + 100 * part + rank
            x = fractions(seed, rows[rank], self.widths[0], dtype=self.dtype).to(dtype)
            loss = (model(x) - 0.3).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)


def alone(plan: Plan, size: int) -> list[dict]:
    """Train on one rank in fp64: the state at the start and after each step."""
    model = plan.network().double()
    optimizer = torch.optim.SGD(model.parameters(), **plan.optimizer)

    def state(losses: list[torch.Tensor]) -> dict:
        flat = [torch.cat([p.detach().flatten() for p in unit.parameters()]) for unit in model]
        return {"units": flat, "losses": losses}

    found = [state([])]
    for step in range(len(plan.rows)):
        losses = [plan.backward(model, step, rank) for rank in range(size)]
        for parameter in model.parameters():
            parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        found.append(state(losses))
    return found


def begun(answer: Any, plan: Plan, make: Callable) -> tuple[torch.nn.Sequential, Any]:
    """On a rank: make the network and the answer's class, and check the shards. (A shard in
    released memory would crash the process.)"""
    model = plan.network(dist.get_rank())
    zero = getattr(answer, plan.stage)(list(model), make)
    for unit in zero.units:
        if unit.shard.shape != (unit.length,):
            raise Wrong(
                f"own_part has the shape {tuple(unit.shard.shape)}, and a shard has "
                f"{(unit.length,)}.\nunit.parts() lists the shards by rank."
            )
        there, flat = unit.shard.untyped_storage(), unit.flat.untyped_storage()
        copied = there.nbytes() > 0 and there.data_ptr() != flat.data_ptr()
        if plan.stage == "Zero3" and not copied:
            raise Wrong(
                "own_part is in the memory of unit.flat, which is released.\n"
                "It needs memory of its own: a copy."
            )
        if plan.stage != "Zero3" and copied:
            raise Wrong(
                "own_part is a copy, a second set of parameters: the optimizer would change the "
                "copy.\nReturn a view of unit.flat."
            )
    return model, zero


def train(answer: Any, plan: Plan) -> list[dict]:
    """On a rank: losses, parameters and traffic of each step."""
    model, zero = begun(answer, plan, lambda shards: torch.optim.SGD(shards, **plan.optimizer))
    found = []
    for step in range(len(plan.rows)):
        with Traffic() as traffic:
            losses = plan.backward(model, step, dist.get_rank())
            before_step = len(traffic.events)
            zero.step()
        held = [
            unit.shard.detach().clone() if plan.stage == "Zero3"
            else torch.cat([parameter.detach().flatten() for parameter in unit.parameters])
            for unit in zero.units
        ]
        found.append({
            "losses": losses, "units": held, "lengths": [unit.length for unit in zero.units],
            "events": traffic.events, "in step": len(traffic.events) - before_step,
        })
    return found


# ---- what is checked


def right_values(where: str, plan: Plan, step: int, found: list[dict], right: list[dict]) -> None:
    """Compare values with one rank's. right: its state before the step and after it."""
    before, after = right
    notes = ""
    if any(event.asynchronous for result in found for event in result["events"]):
        notes = "\nSome calls are asynchronous: is each waited on before its result is read?"
    for index, expected in enumerate(after["units"]):
        held = [result["units"][index] for result in found]
        if plan.stage == "Zero3":  # together, the shards are the unit and its padding
            held = [torch.cat(held)[: len(expected)]]
        for rank, got in enumerate(held):
            seen = got, before["units"][index], expected, held[rank - 1], len(found), step
            owner = "all shards together" if plan.stage == "Zero3" else f"rank {rank}"
            hint = told(SYMPTOMS, seen) + notes
            close(f"{where}, {owner}", f"unit {index}", got, expected, hint=hint, scale=1)
        same_bits(where, f"unit {index}", held)
    for rank, result in enumerate(found):
        hint = "Does each unit compute with the parameters of the previous step?" + notes
        close(f"{where}, rank {rank}", "the losses", result["losses"], after["losses"][rank],
              hint=hint, scale=1)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7)


SYMPTOMS = [  # of (unit, before the step, right, another rank's, ranks, number of the step)
    (lambda s: s[0].isnan().any(), "NaN: was memory allocated but not filled?"),
    (lambda s: near(s[0], s[1]),
     "They did not change: does the optimizer find a gradient in every shard?"),
    (lambda s: s[5] == 0 and near(s[0], s[1] + s[4] * (s[2] - s[1])),
     lambda s: f"The step is {s[4]} times too large: a sum over the ranks, not their mean."),
    (lambda s: not near(s[0], s[3]),
     "The ranks differ: does every rank get every other rank's shard?"),
    (lambda s: True, lambda s: (
        "Is shard r of the mean gradient on rank r, and is it the mean over all ranks?",
        "Step 1 was right: are a step's gradients discarded at its end?",
        "The previous steps were right: the gradients of several backward passes must add up,\n"
        "and none must count twice.",
    )[s[5]]),
]


def right_traffic(case: str, plan: Plan, step: int, result: dict) -> None:
    """Check bytes and calls. A gather or reduce-scatter of all units is one round."""
    if plan.stage == "Zero3" and result["in step"]:
        raise Wrong(f"{case}: step() communicates: the next forward pass gathers anyway.")
    events, size, backwards = result["events"], len(plan.rows[0][0]), len(plan.rows[step])
    rounds = {"Zero1": 2, "Zero2": backwards + 1, "Zero3": 3 * backwards}[plan.stage]
    one = (size - 1) * sum(result["lengths"]) * plan.dtype.itemsize
    sent, calls = sum(event.sent for event in events), rounds * len(result["lengths"])
    if sent > rounds * one or len(events) > calls:
        raise Wrong(
            f"{case}: this rank sends {float(sent / max(one, 1)):.3g} times the parameters · "
            f"(N−1)/N in {len(events)} messages; {rounds} times in {calls} is enough.\nIt calls: "
            f"{', '.join(sorted({event.op for event in events}))}. Which rank needs what, and how "
            "often? A\nunit's parameters are sent together, in one collective."
        )


# ---- memory


def weigh(answer: Any, plan: Plan) -> None:
    """On a rank: take several steps with AdamW, one row each. Raises Wrong if too much is kept."""
    model, zero = begun(answer, plan, torch.optim.AdamW)
    size, whole = dist.get_world_size(), sum(unit.bytes for unit in zero.units)
    unit = max(unit.bytes for unit in zero.units)
    weights = whole // size if plan.stage == "Zero3" else whole
    gradients = whole if plan.stage == "Zero1" else whole // size
    least = weights + 2 * whole // size + unit // 8  # AdamW's two averages; a row, scalars

    def look(moment: str, allowed: int) -> None:
        held, flats = (held_bytes(t) for t in (
            [p.grad for p in model.parameters()], [u.flat for u in zero.units]))
        if plan.stage != "Zero1" and held > unit:
            raise Wrong(
                f"during the backward pass {held:,} bytes of full gradients are in memory;\n"
                f"the largest unit has {unit:,}. Discard them as soon as they are reduced."
            )
        if plan.stage == "Zero3" and flats > allowed:
            raise Wrong(
                f"{flats / unit:.0f} gathered unit(s) are in memory {moment}: only the unit that\n"
                "computes must be gathered, and only while it does."
            )

    for module in model:  # registered after the answer's own hooks, so called after them
        module.register_forward_pre_hook(lambda *_: look("in the forward pass", unit))
        module.register_forward_hook(lambda *_: look("after a unit's forward pass", 0))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda _: look("in the backward pass", unit)
            )
    x, before = fractions(plan.seed, 1, plan.widths[0], dtype=plan.dtype), least
    with Memory(model=model) as memory:
        for step in range(3):
            model(x).square().mean().backward()
            # in the first step there is no optimizer state yet
            no_more(memory, least + gradients, "after the backward pass")
            zero.step()
            left = held_bytes(t.grad for u in zero.units for t in (u.shard, *u.parameters))
            if left:
                raise Wrong(
                    f"after step() .grad still holds {left:,} bytes of gradients.\n"
                    "Neither the full ones nor those of the shards are needed any more."
                )
            now = no_more(memory, before, f"after step {step + 1}")
            before = min(before, now) if step else before


def no_more(memory: Memory, most: int, when: str) -> int:
    """Return the bytes of all tensors now; raises Wrong if they remain above `most`."""
    for _ in looks():
        held = sum(memory.now().values())
        if held <= most:
            return held
        gc.collect()
    raise Wrong(
        f"{when} {held:,} bytes of tensors are alive; {most:,} are enough.\n"
        "What is kept that is no longer needed?"
    )


def held_bytes(tensors: Any) -> int:
    """Bytes of the storages of these tensors, ignoring None."""
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
