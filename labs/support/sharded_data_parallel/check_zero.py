"""Given: what the check cells look at: values, bytes and messages, and memory.

1 to 6 real ranks train small networks with your class (scenarios.py); the parameters must equal
those of one rank after every step. `utils.measure.traffic` counts what is sent, and
`utils.measure.memory` the memory of all tensors.
"""

from fractions import Fraction

import torch

from labs.support.sharded_data_parallel.scenarios import Plan, train, weigh
from utils.course.assertions import Wrong, close, same_bits
from utils.course.runner import Group, Trial

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
    # modules
    "torch.distributed.fsdp", "torch.distributed.optim", "torch.distributed.tensor",
    "torch.nn.parallel", "utils.parallel",
)
HANG = "Do all ranks call the same collectives for the same units, whatever their rows are?"
WAITS = "Some calls are asynchronous: is each waited for before its result is read?"


def zero1(trial: Trial) -> str:
    """Judges `Zero1` in the file."""
    return _judge(trial, "Zero1")


def zero2(trial: Trial) -> str:
    """Judges `Zero2` in the file."""
    return _judge(trial, "Zero2")


def zero3(trial: Trial) -> str:
    """Judges `Zero3` in the file."""
    return _judge(trial, "Zero3")


def _judge(trial: Trial, stage: str) -> str:
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        small = group.size in (2, 3)  # the more ranks, the more a message costs
        dtype = torch.float32 if small else trial.draw.choice([torch.float32, torch.float64])
        plans = [_plan(trial, group.size, dtype, odd=True)]
        missing = []
        if small:
            missing += _trains(group, stage, [_plan(trial, group.size, torch.float64)], late=True)
            plans.insert(0, _plan(trial, group.size, torch.float64))
        if group.size == 2:
            plans.append(_many(trial))
        missing += _trains(group, stage, plans)
        if group.size < 4:
            plan = _large(trial)
            group.run(group.case(str(plan)), weigh, stage, plan, trial.draw.choice([4, 5]))
        for words in missing:  # who sends too little has often kept too much, which says more
            raise Wrong(words)
    return (
        "parameters, losses and outputs equal one rank's on 1 to 6 ranks, in fp32 and fp64, also\n"
        "with ranks without rows, with a NaN on one rank, and when messages come late;\n"
        f"{SENT[stage]};\n"
        f"memory on 1 to 3 ranks: {KEPT[stage]};\n"
        "a step leaves nothing else behind."
    )


# ---- cases


def _plan(trial: Trial, size: int, dtype: torch.dtype, odd: bool = False) -> Plan:
    """odd: one parameter or, on one of 2 ranks, a whole unit without a gradient (stage 1), and in
    the last step a NaN on one of several ranks."""
    draw = trial.draw
    least = 1 if size < 4 else 5  # below, the last of many ranks may have nothing but padding
    widths = tuple(draw.randrange(least, 14) for _ in range(draw.choice([2, 3, 4])))
    if odd:
        widths = (draw.randrange(least, 14), *widths)[: 3 if size == 2 else draw.choice([2, 3])]
    else:
        widths += 1, 1  # a unit of two numbers: a part may be nothing but padding
    many = draw.randrange(2, 4) if size > 1 else draw.randrange(4, 8)  # one rank sends nothing
    passes = [1, draw.choice([1, 2]) if odd else 1, many]
    rows = [[[draw.randrange(1, 12) for _ in range(size)] for _ in range(n)] for n in passes]
    idle, step = draw.randrange(size), 1 if odd else -1
    for part in rows[step]:
        part[idle] = 0
    if odd and draw.random() < 0.5:  # nobody has rows
        rows[step] = [[0] * size]
    lost = 1, draw.choice([-1, draw.randrange(size)]), 0, draw.choice([slice(1), slice(1, 2)])
    if size == 2:
        lost = 1, draw.randrange(2), 0, slice(2)
    return Plan(
        widths=widths,
        dtype=dtype,
        rows=tuple(tuple(map(tuple, step)) for step in rows),
        scales=tuple(draw.uniform(0.1, 0.4) for _ in passes),
        optimizer={
            "lr": draw.uniform(0.2, 0.6),
            "momentum": draw.choice([0.0, draw.uniform(0.5, 0.9)]),
            "weight_decay": draw.uniform(0.01, 0.1) if odd else 0.0,
        },
        seed=trial.new_seed(),
        lost=lost if odd else None,
        nan=draw.randrange(size) if odd and size > 1 else None,
    )


def _many(trial: Trial) -> Plan:
    """Of 2 ranks: many small units, one of more than 50,000 numbers, and many steps, of which the
    last one has many backward passes."""
    draw = trial.draw
    widths = [draw.randrange(1, 4) for _ in range(draw.randrange(8, 11))]
    widths[2:4] = draw.randrange(230, 250), draw.randrange(220, 230)
    last = [(draw.randrange(1, 3), draw.randrange(3)) for _ in range(draw.randrange(5, 8))]
    steps = draw.randrange(5, 8)
    return Plan(
        widths=tuple(widths),
        dtype=torch.float32,
        rows=(((1, 2),),) * steps + (tuple(map(tuple, last)),),
        scales=(0.01,) * (steps + 1),
        optimizer={"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        seed=trial.new_seed(),
    )


def _large(trial: Trial) -> Plan:
    """Units that outweigh a row by far."""
    width, units = trial.draw.randrange(40, 60), trial.draw.randrange(9, 12)
    dtype = trial.draw.choice([torch.float32, torch.float64])
    return Plan((width,) * (units + 1), dtype, (), (), {}, trial.new_seed())


def _alone(plan: Plan, size: int, stage: str) -> list[dict]:
    """On one rank, in fp64: the state at the start and after each step."""
    model, units = plan.network()
    model.double()
    parameters = [list(unit.parameters()) for unit in units]
    lr, momentum, decay = plan.optimizer.values()
    velocity = [torch.zeros_like(p) for p in model.parameters()]

    def state() -> list[torch.Tensor]:
        return [torch.cat([p.detach().flatten() for p in unit]) for unit in parameters]

    found = [{"units": state()}]
    for step, backwards in enumerate(plan.rows):
        total = [torch.zeros_like(p) for p in model.parameters()]
        losses = []
        for rank in range(size):
            model.zero_grad()
            losses.append([])
            for part in range(len(backwards)):
                x = plan.inputs(step, part, rank).double()
                loss = plan.loss(model, step, part, rank, x)
                loss.backward()
                losses[-1].append(loss.detach())
            if stage == "Zero1" and (lost := plan.loses(step, rank)):
                for parameter in parameters[lost[0]][lost[1]]:
                    parameter.grad = None
            for mean, parameter in zip(total, model.parameters()):
                if parameter.grad is not None:
                    mean += parameter.grad / size
        with torch.no_grad():  # torch.optim.SGD's formulas
            for mean, parameter, speed in zip(total, model.parameters(), velocity):
                speed.mul_(momentum).add_(mean + decay * parameter)
                parameter -= lr * speed
            asked = model(plan.asked(step).double())
        found.append({"units": state(), "losses": list(map(torch.stack, losses)), "asked": asked})
    return found


# ---- what is looked at


def _trains(group: Group, stage: str, plans: list[Plan], late: bool = False) -> list[str]:
    """What is said of ranks that send less than must travel."""
    missing = []
    slow = ", messages that come late" * late
    case = group.case(" beside ".join(map(str, plans))) + slow
    ranks = group.run(case, train, stage, plans, late=late)
    for index, plan in enumerate(plans):
        right = _alone(plan, group.size, stage)
        for step, backwards in enumerate(plan.rows):
            found = [results[index][step] for results in ranks]
            where = f"{group.case(str(plan))}{slow}: step {step + 1}"
            where += f" ({len(backwards)} backward passes)" * (len(backwards) > 1)
            _right_values(where, stage, found, right[step : step + 2], plan, step)
            for rank, result in enumerate(found):
                numbers = sum(len(unit) for unit in right[step]["units"])
                missing += _right_traffic(
                    f"{where}, rank {rank}", stage, result, numbers, plan, group.size, step
                )
    return missing


def _right_values(
    where: str, stage: str, found: list[dict], right: list[dict], plan: Plan, step: int
) -> None:
    before, after = right
    notes = _notes(found, plan, step)
    for index, expected in enumerate(after["units"]):
        held = [result["units"][index] for result in found]
        if stage == "Zero3":  # shards: together the unit, and padding
            held = [torch.cat(held)[: len(expected)]]
        for rank, got in enumerate(held):
            symptom = _symptom(
                step, got, before["units"][index], expected, held[rank - 1], len(found)
            )
            owner = "all shards together" if stage == "Zero3" else f"rank {rank}"
            close(
                f"{where}, {owner}", f"unit {index}", got, expected, hint=symptom + notes, scale=1
            )
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


def _symptom(step: int, now, before, right, theirs, size: int) -> str:
    """A question that fits the wrong numbers."""
    if now.isnan().any() and not right.isnan().any():
        return "NaN: was memory allocated and not filled?"
    if _near(now, before):
        return "They did not change: does the optimizer find a gradient in every shard?"
    if step == 0 and _near(now, before + size * (right - before)):
        return f"The step is {size} times too large: a sum over the ranks, not their mean."
    if not _near(now, theirs):
        return "The ranks differ: does every rank get every other rank's part?"
    if step == 1:
        return "Step 1 was right: are the gradients of a step forgotten when it is done?"
    if step > 1:
        return (
            "The steps before were right: the gradients of several backward passes must add up,\n"
            "and none must count twice."
        )
    return "Is part r of the mean gradient on rank r, and is it the mean over all ranks?"


def _notes(found: list[dict], plan: Plan, step: int) -> str:
    """What else is special about a step."""
    notes = ""
    idle = [rank for rank in range(len(found)) if any(not rows[rank] for rows in plan.rows[step])]
    if idle:
        notes += f"\nRank {idle[0]} has no rows in a backward pass: its gradient counts, as zeros."
    if any(event.asynchronous for result in found for event in result["events"]):
        notes += f"\n{WAITS}"
    return notes


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7)


def _right_traffic(
    case: str, stage: str, result: dict, numbers: int, plan: Plan, size: int, step: int
) -> list[str]:
    """The bytes and calls that it takes: one gather or reduce-scatter of all is a round.

    numbers: of all parameters, without padding. Returns what is said of bytes that are missing.
    """
    missing, units, backwards = [], len(result["lengths"]), len(plan.rows[step])
    value = torch.finfo(plan.dtype).bits // 8
    if stage == "Zero3" and result["in step"]:
        raise Wrong(f"{case}: step() communicates: the next forward pass gathers anyway.")
    rounds = {"Zero1": 2, "Zero2": backwards + 1, "Zero3": 3 * backwards}[stage]
    for events, allowed, when in (
        (result["events"], rounds, ""),
        (result["asking"], int(stage == "Zero3"), " for a forward pass under no_grad"),
    ):
        one = (size - 1) * sum(result["lengths"]) * value
        sent, does = sum(event.sent for event in events), _does(events)
        if sent > allowed * one:
            raise Wrong(
                f"{case}: this rank sends {float(sent / one):.3g} times the parameters · (N−1)/N"
                f"{when}, not {allowed}.\nIt calls: {does}. Who needs what, and how often?"
            )
        if sent < Fraction(allowed * (size - 1) * numbers * value, size):
            missing.append(
                f"{case}: this rank sends {float(sent / one):.3g} times the parameters · (N−1)/N"
                f"{when}, where {allowed} must travel.\nIt calls: {does}. Is what the others need "
                "sent by a collective, each time?"
            )
        if len(events) > allowed * units:
            raise Wrong(
                f"{case}: there are {len(events)} messages for {units} units{when} ({does}), and "
                f"{allowed * units} will do.\nA unit's parameters travel together, in one "
                "collective."
            )
    return missing


def _does(events) -> str:
    return ", ".join(sorted({event.op for event in events})) or "nothing"
