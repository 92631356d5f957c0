"""Given: what exercises 05a, b and c ask for, and how their check cells judge it.

1 to 6 real ranks train small networks with your class beside one rank that trains in fp64: values,
bytes and messages must agree after every step, and no rank may keep more memory than its stage.
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
    "Zero1": "a step sends 2 times the parameters · (N−1)/N at most, in 2 messages a unit",
    "Zero2": "a rank sends the parameters · (N−1)/N in a backward pass, as much in step()",
    "Zero3": "a rank sends 3 times the parameters · (N−1)/N for a forward and backward pass",
}
KEPT = {
    "Zero1": "parameters + gradients + optimizer state/N",
    "Zero2": "parameters + (gradients + optimizer state)/N, and one unit's whole gradients",
    "Zero3": "(parameters + gradients + optimizer state)/N, and one whole unit",
}
LIBRARY = (
    "utils", "fsdp", "fully_shard", "FullyShardedDataParallel", "ZeroRedundancyOptimizer",
    "DistributedDataParallel", "deepspeed", "DTensor", "distribute_tensor", "accelerate",
    "torch.distributed.optim", "torch.distributed.tensor", "torch.nn.parallel",
)
HANG = "Do all ranks call the same collectives for the same units, whatever their rows are?"


def judge(trial: Trial, stage: str) -> str:
    """Judges a class in the file."""
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
        "parameters and losses equal one rank's on 1 to 6 ranks, fp32, fp64, with late messages;\n"
        f"{SENT[stage]};\nmemory on 2 ranks: {KEPT[stage]};\n"
        "a step leaves nothing else behind."
    )


zero1, zero2, zero3 = (functools.partial(judge, stage=stage) for stage in SENT)

# ---- a training, the same on N ranks and on one


@dataclass(frozen=True)
class Plan:
    """A training. rows: [step][backward pass][rank] -> this rank's rows."""

    stage: str
    widths: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    rows: list[list[list[int]]] | None = None
    optimizer: dict | None = None  # of SGD: unlike Adam's, its steps grow with the gradient

    @staticmethod
    def drawn(trial: Trial, size: int, stage: str) -> "Plan":
        """One backward pass, one more, then several in a step."""
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
        """Its units are a linear layer and a tanh each; every rank begins with its own weights."""
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
        """The backward passes of a rank: the losses."""
        losses, dtype = [], next(model.parameters()).dtype
        for part, rows in enumerate(self.rows[step]):
            seed = self.seed + 10_000 + 1000 * step + 100 * part + rank
            x = fractions(seed, rows[rank], self.widths[0], dtype=self.dtype).to(dtype)
            loss = (model(x) - 0.3).square().sum()
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)


def alone(plan: Plan, size: int) -> list[dict]:
    """On one rank, in fp64: at the start and after each step."""
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
    """On a rank: the network and the answer's class; a shard on released memory would end the
    process."""
    model = plan.network(dist.get_rank())
    zero = getattr(answer, plan.stage)(list(model), make)
    for unit in zero.units:
        if unit.shard.shape != (unit.length,):
            raise Wrong(
                f"own_part has the shape {tuple(unit.shard.shape)}, and a part is "
                f"{(unit.length,)}.\nunit.parts() lists the parts by rank."
            )
        there, flat = unit.shard.untyped_storage(), unit.flat.untyped_storage()
        copied = there.nbytes() > 0 and there.data_ptr() != flat.data_ptr()
        if plan.stage == "Zero3" and not copied:
            raise Wrong(
                "own_part lies in the memory of unit.flat, which is released.\n"
                "It needs memory of its own: a copy."
            )
        if plan.stage != "Zero3" and copied:
            raise Wrong(
                "own_part is a copy: a second set of parameters, and the optimizer changes that "
                "one.\nReturn a view of unit.flat."
            )
    return model, zero


def train(answer: Any, plan: Plan) -> list[dict]:
    """On a rank: what is there after each step."""
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


# ---- what is looked at


def right_values(where: str, plan: Plan, step: int, found: list[dict], right: list[dict]) -> None:
    """right: before the step and after it."""
    before, after = right
    notes = ""
    if any(event.asynchronous for result in found for event in result["events"]):
        notes = "\nSome calls are asynchronous: is each waited for before its result is read?"
    for index, expected in enumerate(after["units"]):
        held = [result["units"][index] for result in found]
        if plan.stage == "Zero3":  # shards: together the unit, and padding
            held = [torch.cat(held)[: len(expected)]]
        for rank, got in enumerate(held):
            seen = got, before["units"][index], expected, held[rank - 1], len(found), step
            owner = "all shards together" if plan.stage == "Zero3" else f"rank {rank}"
            hint = told(SYMPTOMS, seen) + notes
            close(f"{where}, {owner}", f"unit {index}", got, expected, hint=hint, scale=1)
        same_bits(where, f"unit {index}", held)
    for rank, result in enumerate(found):
        hint = "Does each unit compute with the parameters of the last step?" + notes
        close(f"{where}, rank {rank}", "the losses", result["losses"], after["losses"][rank],
              hint=hint, scale=1)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7)


SYMPTOMS = [  # of (unit, before the step, right, another rank's, ranks, number of the step)
    (lambda s: s[0].isnan().any(), "NaN: was memory allocated and not filled?"),
    (lambda s: near(s[0], s[1]),
     "They did not change: does the optimizer find a gradient in every shard?"),
    (lambda s: s[5] == 0 and near(s[0], s[1] + s[4] * (s[2] - s[1])),
     lambda s: f"The step is {s[4]} times too large: a sum over the ranks, not their mean."),
    (lambda s: not near(s[0], s[3]),
     "The ranks differ: does every rank get every other rank's part?"),
    (lambda s: True, lambda s: (
        "Is part r of the mean gradient on rank r, and is it the mean over all ranks?",
        "Step 1 was right: are the gradients of a step forgotten when it is done?",
        "The steps before were right: the gradients of several backward passes must add up,\n"
        "and none must count twice.",
    )[s[5]]),
]


def right_traffic(case: str, plan: Plan, step: int, result: dict) -> None:
    """The bytes and calls that it takes: one gather or reduce-scatter of all is a round."""
    if plan.stage == "Zero3" and result["in step"]:
        raise Wrong(f"{case}: step() communicates: the next forward pass gathers anyway.")
    events, size, backwards = result["events"], len(plan.rows[0][0]), len(plan.rows[step])
    rounds = {"Zero1": 2, "Zero2": backwards + 1, "Zero3": 3 * backwards}[plan.stage]
    one = (size - 1) * sum(result["lengths"]) * plan.dtype.itemsize
    sent, calls = sum(event.sent for event in events), rounds * len(result["lengths"])
    if sent > rounds * one or len(events) > calls:
        raise Wrong(
            f"{case}: this rank sends {float(sent / max(one, 1)):.3g} times the parameters · "
            f"(N−1)/N in {len(events)} messages, and {rounds} times in {calls} will do.\nIt calls: "
            f"{', '.join(sorted({event.op for event in events}))}. Who needs what, how often? A "
            "unit's parameters travel together, in one collective."
        )


# ---- memory


def weigh(answer: Any, plan: Plan) -> None:
    """On a rank: several steps with AdamW, one row each. Raises Wrong where too much is kept."""
    model, zero = begun(answer, plan, torch.optim.AdamW)
    size, whole = dist.get_world_size(), sum(unit.bytes for unit in zero.units)
    unit = max(unit.bytes for unit in zero.units)
    weights = whole // size if plan.stage == "Zero3" else whole
    gradients = whole if plan.stage == "Zero1" else whole // size
    least = weights + 2 * whole // size + unit // 8  # AdamW's two averages; a row, single numbers

    def look(moment: str, allowed: int) -> None:
        held, flats = (held_bytes(t) for t in (
            [p.grad for p in model.parameters()], [u.flat for u in zero.units]))
        if plan.stage != "Zero1" and held > unit:
            raise Wrong(
                f"during the backward pass there are {held:,} bytes of whole gradients;\n"
                f"the largest unit has {unit:,}. Forget them as soon as they are reduced."
            )
        if plan.stage == "Zero3" and flats > allowed:
            raise Wrong(
                f"{flats / unit:.0f} unit(s) of whole parameters are in memory {moment}: only the "
                "one that\ncomputes must be whole, and only while it does."
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
                    "Nobody needs them any more, neither the whole ones nor those of the shards."
                )
            now = no_more(memory, before, f"after step {step + 1}")
            before = min(before, now) if step else before


def no_more(memory: Memory, most: int, when: str) -> int:
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


def held_bytes(tensors: Any) -> int:
    """Of all storages below some tensors, None left out."""
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
