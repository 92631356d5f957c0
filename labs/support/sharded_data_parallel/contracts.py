"""Given: what exercises 05a, b and c ask for, and how their check cells judge it.

1 to 6 real ranks train small networks with your class beside one rank that trains in fp64: values,
bytes and messages must agree after every step, and no rank may keep more memory than its stage.
"""

import functools
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, close, own_size, same_bits
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
COPIES = 5  # of the largest unit: gradients and messages while it is reduced


def judge(trial: Trial, stage: str) -> str:
    """Judges a class in the file."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        missing = []
        for late in (True, False) if group.size in (2, 3) else (False,):
            plan = Plan.drawn(trial, group.size, stage, late)
            case = group.case(str(plan)) + ", messages that come late" * late
            ranks, right = group.run(case, train, plan, late=late), alone(plan, group.size)
            for step, found in enumerate(zip(*ranks)):
                where = f"{case}: step {step + 1} ({len(plan.rows[step])} backward passes)"
                right_values(where, plan, step, found, right[step : step + 2])
                for rank, result in enumerate(found):
                    missing += right_traffic(f"{where}, rank {rank}", plan, step, result)
        if group.size < 4:
            width, units = trial.draw.randrange(40, 60), trial.draw.randrange(9, 12)
            plan = Plan(stage, (width,) * (units + 1), torch.float32, trial.new_seed())
            group.run(group.case(str(plan)), weigh, plan)
        for words in missing:  # who sends too little has often kept too much, which says more
            raise Wrong(words)
    return (
        "parameters, losses and outputs equal one rank's on 1 to 6 ranks, in fp32 and fp64, also\n"
        "with ranks without rows, with a NaN on one rank, and when messages come late;\n"
        f"{SENT[stage]};\n"
        f"memory on 1 to 3 ranks: {KEPT[stage]};\n"
        "a step leaves nothing else behind."
    )


zero1, zero2, zero3 = (functools.partial(judge, stage=stage) for stage in SENT)

# ---- a training, the same on N ranks and on one


@dataclass(frozen=True)
class Plan:
    """A training. rows: [step][backward pass][rank] -> this rank's rows; lost: (rank, parameters of
    unit 0) that have no gradient in step 1; nan: the rank whose loss is NaN in the last step."""

    stage: str
    widths: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    rows: list[list[list[int]]] | None = None
    optimizer: dict | None = None  # of SGD: unlike Adam's, its steps grow with the gradient
    lost: tuple[int, slice] = (0, slice(0))
    nan: int = -1

    @staticmethod
    def drawn(trial: Trial, size: int, stage: str, late: bool) -> "Plan":
        """One pass, then one without rows on one rank, then several, then one with a NaN."""
        draw = trial.draw
        least = 1 if size < 4 else 5  # below, the last of many ranks may have nothing but padding
        widths = [draw.randrange(least, 14) for _ in range(draw.choice([2, 3, 4]))]
        widths += [1, 1] * (size < 4)  # a unit of two numbers: a part may be only padding
        passes = [1, 1, draw.randrange(2, 8 if size == 1 else 4), 1]
        rows = [[[draw.randrange(1, 12) for _ in range(size)] for _ in range(n)] for n in passes]
        idle = draw.randrange(size)
        for part in rows[1]:
            part[idle] = 0
        lost = draw.randrange(size), draw.choice([slice(1), slice(1, 2), slice(2)])
        optimizer = {"lr": draw.uniform(0.01, 0.05), "momentum": draw.choice([0.0, 0.7]),
                     "weight_decay": 0.0 if late else draw.uniform(0.01, 0.1)}
        dtype = torch.float64 if late else draw.choice([torch.float32, torch.float64])
        dtype = torch.float32 if size < 4 and not late else dtype
        return Plan(
            stage, tuple(widths), dtype, trial.new_seed(), rows, optimizer,
            lost if stage == "Zero1" else (0, slice(0)), draw.randrange(size),
        )

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

    def inputs(self, seed: int, rows: int, like: torch.nn.Module) -> torch.Tensor:
        """(rows, first width), in the model's type."""
        x = fractions(self.seed + seed, rows, self.widths[0], dtype=self.dtype)
        return x.to(next(like.parameters()).dtype)

    def backward(self, model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
        """The backward passes of a rank: the losses, each its own, whatever the rows are."""
        losses = []
        for part, rows in enumerate(self.rows[step]):
            x = self.inputs(10_000 + 1000 * step + 100 * part + rank, rows[rank], model)
            loss = (model(x) - 0.3).square().sum()
            if step == len(self.rows) - 1 and rank == self.nan:
                loss = loss * torch.nan
            loss.backward()
            losses.append(loss.detach())
        if step == 1 and rank == self.lost[0]:
            for parameter in list(model[0].parameters())[self.lost[1]]:
                parameter.grad = None
        return torch.stack(losses)

    def asked(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        """What the model says after a step, without gradients."""
        with torch.no_grad():
            return model(self.inputs(90_000 + step, 3, model))


def alone(plan: Plan, size: int) -> list[dict]:
    """On one rank, in fp64: at the start and after each step."""
    model = plan.network().double()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, **plan.optimizer)

    def state(**more: Any) -> dict:
        flat = [torch.cat([p.detach().flatten() for p in unit.parameters()]) for unit in model]
        return {"units": flat} | more

    found = [state()]
    for step in range(len(plan.rows)):
        total, losses = [torch.zeros_like(p) for p in parameters], []
        for rank in range(size):
            losses.append(plan.backward(model, step, rank))
            for mean, parameter in zip(total, parameters):
                mean += 0 if parameter.grad is None else parameter.grad / size
                parameter.grad = None
        for mean, parameter in zip(total, parameters):
            parameter.grad = mean
        optimizer.step()
        optimizer.zero_grad()
        found.append(state(losses=losses, asked=plan.asked(model, step)))
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
    model.train(plan.seed % 2 == 0)  # who switches dropout off trains all the same
    found = []
    for step in range(len(plan.rows)):
        with Traffic() as traffic:
            losses = plan.backward(model, step, dist.get_rank())
            before_step = len(traffic.events)
            zero.step()
        held = [  # before anything else is asked
            unit.shard.detach().clone() if plan.stage == "Zero3"
            else torch.cat([parameter.detach().flatten() for parameter in unit.parameters])
            for unit in zero.units
        ]
        with Traffic() as asking:
            asked = plan.asked(model, step)
        found.append({
            "losses": losses, "asked": asked, "units": held,
            "lengths": [unit.length for unit in zero.units],
            "events": traffic.events, "in step": len(traffic.events) - before_step,
            "asking": asking.events, "graph": any(unit.flat.requires_grad for unit in zero.units),
        })
    return found


# ---- what is looked at


def right_values(where: str, plan: Plan, step: int, found: list[dict], right: list[dict]) -> None:
    """right: before the step and after it."""
    before, after = right
    idle = any(0 in part for part in plan.rows[step])
    notes = "\nA rank without rows counts, with a gradient of zeros." * idle
    if any(event.asynchronous for result in found for event in result["events"]):
        notes += "\nSome calls are asynchronous: is each waited for before its result is read?"
    for index, expected in enumerate(after["units"]):
        held = [result["units"][index] for result in found]
        if plan.stage == "Zero3":  # shards: together the unit, and padding
            held = [torch.cat(held)[: len(expected)]]
        for rank, got in enumerate(held):
            hint = symptom(step, got, before["units"][index], expected, held[rank - 1], len(found))
            owner = "all shards together" if plan.stage == "Zero3" else f"rank {rank}"
            close(f"{where}, {owner}", f"unit {index}", got, expected, hint=hint + notes, scale=1)
        same_bits(where, f"unit {index}", held)
    for rank, result in enumerate(found):
        case = f"{where}, rank {rank}"
        hint = "Does each unit compute with the parameters of the last step?" + notes
        close(case, "the losses", result["losses"], after["losses"][rank], hint=hint, scale=1)
        close(case, "the output under no_grad", result["asked"], after["asked"], hint=hint, scale=1)
        if result["graph"]:
            raise Wrong(
                f"{case}: unit.flat requires a gradient, so every step is recorded in a graph.\n"
                "Is a parameter copied where a tensor without gradients was meant?"
            )


def symptom(step: int, now, before, right, theirs, size: int) -> str:
    """A question that fits the wrong numbers."""

    def near(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7)

    if now.isnan().any() and not right.isnan().any():
        return "NaN: was memory allocated and not filled?"
    if near(now, before):
        return "They did not change: does the optimizer find a gradient in every shard?"
    if step == 0 and near(now, before + size * (right - before)):
        return f"The step is {size} times too large: a sum over the ranks, not their mean."
    if not near(now, theirs):
        return "The ranks differ: does every rank get every other rank's part?"
    return (
        "Is part r of the mean gradient on rank r, and is it the mean over all ranks?",
        "Step 1 was right: are the gradients of a step forgotten when it is done?",
        "The steps before were right: the gradients of several backward passes must add up,\n"
        "and none must count twice.",
    )[min(step, 2)]


def right_traffic(case: str, plan: Plan, step: int, result: dict) -> list[str]:
    """The bytes and calls that it takes: one gather or reduce-scatter of all is a round. Returns
    what is said of bytes that are missing."""
    if plan.stage == "Zero3" and result["in step"]:
        raise Wrong(f"{case}: step() communicates: the next forward pass gathers anyway.")
    size, units, missing = len(plan.rows[0][0]), len(result["lengths"]), []
    backwards, value = len(plan.rows[step]), plan.dtype.itemsize
    numbers = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(plan.widths))
    rounds = {"Zero1": 2, "Zero2": backwards + 1, "Zero3": 3 * backwards}[plan.stage]
    for events, allowed, when in (
        (result["events"], rounds, ""),
        (result["asking"], int(plan.stage == "Zero3"), " for a forward pass under no_grad"),
    ):
        one, sent = (size - 1) * sum(result["lengths"]) * value, sum(e.sent for e in events)
        told = (
            f"{case}: this rank sends {float(sent / max(one, 1)):.3g} times the parameters · "
            f"(N−1)/N{when} in {len(events)} messages, and {allowed} times in {allowed * units} "
            f"will do.\nIt calls: {', '.join(sorted({event.op for event in events})) or 'nothing'}."
        )
        if sent > allowed * one or len(events) > allowed * units:
            raise Wrong(
                f"{told} Who needs what, how often? A unit's parameters travel together, in one "
                "collective."
            )
        if sent < Fraction(allowed * (size - 1) * numbers * value, size):
            missing.append(f"{told} Is what the others need sent by a collective, each time?")
    return missing


# ---- memory


def weigh(answer: Any, plan: Plan) -> None:
    """On a rank: several steps with AdamW, one row each. Raises Wrong where too much is kept."""

    def watched(shards: list[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(shards)
        optimizer.register_step_pre_hook(lambda *_: own_size("in step()", spare(shards)))
        return optimizer

    model, zero = begun(answer, plan, watched)
    size, whole = dist.get_world_size(), sum(unit.bytes for unit in zero.units)
    unit = max(unit.bytes for unit in zero.units)
    weights = whole // size if plan.stage == "Zero3" else whole
    gradients = whole if plan.stage == "Zero1" else whole // size
    least = weights + 2 * whole // size + unit // 8  # AdamW's two averages; a row, single numbers
    most = least + gradients + (COPIES + (plan.stage == "Zero3")) * unit

    def look(moment: str, allowed: int) -> None:
        if moment == "in the backward pass":
            # the backend lets go of a unit's messages first: else they would count as the next's
            for number in looks():
                if number == 20 or sum(memory.now().values()) <= most - (COPIES - 2) * unit:
                    break
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
        for step in range(4):
            with memory.phase("the forward and backward pass"):
                model(x).square().mean().backward()
            # in the first step there is no optimizer state yet
            no_more(memory, least + gradients, "after the backward pass")
            with memory.phase("step()"):
                zero.step()
            left = held_bytes(t.grad for u in zero.units for t in (u.shard, *u.parameters))
            if left:
                raise Wrong(
                    f"after step() .grad still holds {left:,} bytes of gradients.\n"
                    "Nobody needs them any more, neither the whole ones nor those of the shards."
                )
            with torch.no_grad():
                model(x)
            now = no_more(memory, before, f"after step {step + 1}")
            before = min(before, now) if step else before
        for phase, held in memory.phases.items():
            if plan.stage != "Zero1" and sum(held.values()) > most:
                raise Wrong(
                    f"in {phase} up to {sum(held.values()):,} bytes of tensors are alive, and "
                    f"{most:,} will do.\nIs each unit done with before the next one begins?"
                )


def spare(shards: list[torch.Tensor]) -> int:
    """Bytes that the shards' gradients keep in memory beside their own."""
    gradients = [shard.grad for shard in shards if shard.grad is not None]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in gradients}
    return max(0, sum(storages.values()) - sum(g.nbytes for g in gradients))


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
