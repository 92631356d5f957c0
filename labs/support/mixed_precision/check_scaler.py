"""Given: what the check cell of exercise 03a looks at.

A small network is trained in real fp16 on 1, 2 and 3 ranks, twice: with your scaler and with
torch.amp.GradScaler. Scales, skipped steps and weights must be equal, step by step. Then every
rank gets only a share of the parameters, and an overflow that the others cannot see.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.course.checks import Wrong, on_ranks
from utils.measure.traffic import Traffic

SIZES = (1, 2, 3)
ROWS, WIDTHS = 12, (6, 8, 3)
OPTIONS = {"init_scale": 2.0**22, "growth_interval": 3}  # far too large, so that steps are skipped
STEPS, NAN_STEP = 14, 9
FLAGS = [True, True, False, False, False, False, True, False, False, True, *[False] * 7]
SHARED_BAD = {2: (1, float("inf")), 5: (0, float("nan"))}  # step: (number of the parameter, value)
HANG = "Does every rank call the all-reduce, also the ranks that see no overflow?"


def scaler(path: Path) -> str:
    """Judges the LossScaler in the file."""
    _right_parts(*on_ranks(1, path, _parts)[0])
    _right_rules(*on_ranks(1, path, _rules)[0])
    messages = []
    for size in SIZES:
        for rank, runs in enumerate(on_ranks(size, path, _with_ddp, (None, 0.5), hang=HANG)):
            for clip, (mine, theirs) in zip((None, 0.5), runs):
                case = f"with {size} rank(s){', clip=0.5' if clip else ''}, rank {rank}"
                messages.append(([row["messages"] for row in mine], case))
                _right_messages(*messages[-1], later=True)
                _equal(mine, theirs, case, clipped=clip is not None)
    for size in SIZES[1:]:
        _right_shares(on_ranks(size, path, _with_shares, hang=HANG))
    for steps, case in messages:
        _right_messages(steps, case)
    return (
        "scales, skipped steps and weights equal torch.amp.GradScaler's, step by step,\n"
        "in fp16 on 1, 2 and 3 ranks; one all-reduce of one number a step;\n"
        "where each rank holds a share of the parameters, all skip together."
    )


def fp16_run(path: Path, steps: int = 30, **options) -> tuple[list[float], list[bool]]:
    """The scales and the skipped steps of a run with your scaler on 2 ranks, for the figure."""
    options = {"init_scale": 2.0**22, "growth_interval": 5, **options}
    ((mine, _),) = on_ranks(2, path, _with_ddp, (None,), options, steps)[0]
    return [row["scale"] for row in mine], [not row["stepped"] for row in mine]


# ---- the parts, one by one


def _parts(answer) -> tuple[float, float, bool]:
    """A loss of 3 with scale 1024; a gradient of 2048 unscaled, and whether it counts as bad."""
    ours = answer.LossScaler(init_scale=1024.0)
    scaled = float(ours.scale_loss(torch.tensor(3.0)))
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.full((1,), 2048.0)
    bad = bool(ours.unscale([weight]))
    return scaled, weight.grad.item(), bad


def _right_parts(scaled: float, unscaled: float, bad: bool) -> None:
    if scaled != 3 * 1024:
        raise Wrong(f"scale_loss(): with the scale 1024 a loss of 3 becomes {scaled:g}, not 3072.")
    if unscaled == 2048:
        raise Wrong(
            "unscale(): with the scale 1024 a gradient of 2048 is not divided by the scale."
        )
    if unscaled != 2:
        raise Wrong(
            f"unscale(): with the scale 1024 a gradient of 2048 becomes {unscaled:g}, not 2."
        )
    if bad:
        raise Wrong("unscale(): a gradient of 2048 is finite, and unscale says it is not.")


# ---- the rules for the scale


def _rules(answer) -> tuple[list[float], list[float]]:
    """The scale after each of FLAGS: the answer's, and GradScaler's."""
    ours = answer.LossScaler(init_scale=1024.0, growth_interval=3)
    mine = []
    for flag in FLAGS:
        ours.update(flag)
        mine.append(float(ours.scale))
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    theirs = []
    for flag in FLAGS:
        torchs.scale(weight.sum())
        weight.grad = torch.full((1,), float("inf") if flag else 1.0)
        torchs.step(optimizer)
        torchs.update()
        theirs.append(torchs.get_scale())
    return mine, theirs


def _right_rules(mine: list[float], theirs: list[float]) -> None:
    for step, (my, right) in enumerate(zip(mine, theirs)):
        if my == right:
            continue
        history = "".join("x" if flag else "." for flag in FLAGS[: step + 1])
        shown = f"update(): after the steps {history} (x: overflow, growth_interval=3)"
        if my < right:
            hint = "It should have grown: growth_interval good steps in a row are enough."
        elif FLAGS[step]:
            hint = "An overflow multiplies it by backoff_factor."
        elif "x" in history[-3:]:
            hint = "It grew too early: the good steps must come in a row, an overflow starts anew."
        else:
            hint = "It grew too early: after a growth, the counting begins anew."
        raise Wrong(f"{shown}\nthe scale is {my:g}, GradScaler's {right:g}. {hint}")


# ---- training with DDP


def _network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    inputs, hidden, outputs = WIDTHS
    layers = torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, outputs)
    return torch.nn.Sequential(*layers)


def _rows(step: int, bad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets; `bad`: the last rank's first row holds a NaN."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTHS[0], generator=generator)
    y = torch.randn(ROWS, WIDTHS[-1], generator=generator)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * ROWS // size, (rank + 1) * ROWS // size)
    x, y = x[mine].clone(), y[mine]
    if bad and rank == size - 1:
        x[0, 0] = float("nan")
    return x, y


def _with_ddp(answer, clips, options=OPTIONS, steps=STEPS) -> list[tuple[list, list]]:
    """For each limit in `clips`: the answer's training and GradScaler's, a row for each step."""
    return [_pair(answer, clip, options, steps) for clip in clips]


def _pair(answer, clip: float | None, options: dict, steps: int) -> tuple[list, list]:
    ours = answer.LossScaler(**options)
    torchs = torch.amp.GradScaler("cpu", **options)

    def my_step(model, optimizer, loss):
        row = {"scale": float(ours.scale)}
        ours.scale_loss(loss).backward()
        with Traffic() as traffic:
            row["stepped"] = bool(ours.step(optimizer, clip))
        row["messages"] = [(event.op, event.payload) for event in traffic.events]
        return row

    def their_step(model, optimizer, loss):
        row = {"scale": torchs.get_scale()}
        torchs.scale(loss).backward()
        row["bad"] = [
            kind
            for kind, test in (("inf", torch.isinf), ("NaN", torch.isnan))
            if any(test(p.grad).any() for p in model.parameters())
        ]
        torchs.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        torchs.step(optimizer)
        torchs.update()
        row["stepped"] = not row["bad"]
        return row

    return _train(my_step, steps), _train(their_step, steps)


def _train(one_step, steps: int) -> list[dict]:
    model = _network()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rows = []
    for step in range(steps):
        x, y = _rows(step, bad=step == NAN_STEP)
        with torch.autocast("cpu", torch.float16):
            out = parallel(x)
        loss = (out.float() - y).square().mean()
        row = one_step(model, optimizer, loss)
        optimizer.zero_grad()
        row["weights"] = _flat(model.parameters())
        rows.append(row)
    return rows


def _flat(parameters) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in parameters]).clone()


def _equal(mine: list[dict], theirs: list[dict], case: str, clipped: bool) -> None:
    """Raises Wrong for the first step at which the two trainings differ."""
    before = _flat(_network().parameters())
    for number, (my, right) in enumerate(zip(mine, theirs), start=1):
        where = f"{case}, step {number}"
        if my["scale"] != right["scale"]:
            raise Wrong(
                f"{where}: the scale is {my['scale']:g}, GradScaler's is {right['scale']:g}.\n"
                "Does step() call update() once, with what unscale() has found?"
            )
        if my["stepped"] and not right["stepped"]:
            raise Wrong(
                f"{where}: the gradients hold {' and '.join(right['bad'])}, and your step() says "
                "it made the step;\nGradScaler skips it."
            )
        if right["stepped"] and not my["stepped"]:
            raise Wrong(f"{where}: all gradients are finite, and your step() does not step.")
        if not right["stepped"] and not my["weights"].equal(before):
            raise Wrong(f"{where}: the step counts as skipped, but the weights have changed.")
        if not torch.allclose(my["weights"], right["weights"], rtol=1e-5, atol=1e-6):
            raise Wrong(f"{where}: {_why_apart(my, right, before, clipped)}")
        before = right["weights"]


def _why_apart(my: dict, right: dict, before: torch.Tensor, clipped: bool) -> str:
    moved, should = my["weights"] - before, right["weights"] - before
    ratio = (moved.norm() / should.norm()).item()
    if clipped and ratio < 0.9:
        return (
            "the weights move too little. Were the gradients clipped before they were unscaled?\n"
            f"Their norm was then {right['scale']:g} times too large."
        )
    if ratio > 100:
        return (
            f"the weights move {ratio:.0f} times too far: the gradients are not divided by "
            f"the scale ({right['scale']:g})."
        )
    if abs(ratio - 0.5) < 0.1 or abs(ratio - 2) < 0.3:
        return (
            f"the weights move {ratio:.1f} times as far as GradScaler's: the gradients were "
            "divided by another scale\nthan the loss was multiplied by. First unscale, then update."
        )
    return "the weights differ from those with GradScaler, though the decisions are equal."


def _right_messages(steps: list[list], case: str, later: bool = False) -> None:
    """One message of one number in each step. `later`: no message at all is judged later."""
    counts = [len(messages) for messages in steps]
    if max(counts) > 1:
        raise Wrong(
            f"{case}: {max(counts)} messages in a step; one all-reduce of one number is enough:\n"
            "look at all gradients first, then ask the other ranks once."
        )
    if max(counts) == 1 and min(counts) == 0:
        raise Wrong(
            f"{case}: some steps have an all-reduce and others have none. All ranks must call it\n"
            "in every step, also the ranks that see no overflow: else the others wait for ever."
        )
    if max(counts) == 0 and not later:
        raise Wrong(f"{case}: no message at all: how do the ranks know of each other's overflow?")
    largest = max((payload for messages in steps for _, payload in messages), default=0)
    if largest > 8:
        raise Wrong(f"{case}: a message of {largest} bytes; one number is enough.")


# ---- each rank holds a share of the parameters


def _with_shares(answer) -> tuple[list[dict], list[dict]]:
    """As with ZeRO (lesson 05): parameter i belongs to rank i % size, which updates it for all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ours = answer.LossScaler(init_scale=1024.0, growth_interval=3)
    torchs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    mine, theirs = [], []
    for rows, with_ours in ((theirs, False), (mine, True)):
        model = _network()
        parameters = list(model.parameters())
        owned = [p for i, p in enumerate(parameters) if i % size == rank]
        optimizer = torch.optim.SGD(owned if with_ours else parameters, lr=0.05)
        for step in range(8):
            x, y = _rows(step)
            loss = (model(x) - y).square().mean()
            scale = float(ours.scale) if with_ours else torchs.get_scale()
            (ours.scale_loss(loss) if with_ours else torchs.scale(loss)).backward()
            for p in parameters:
                dist.all_reduce(p.grad)
                p.grad /= size
            if step in SHARED_BAD:
                number, value = SHARED_BAD[step]
                parameters[number].grad.view(-1)[0] = value
            if with_ours:
                stepped = bool(ours.step(optimizer))
            else:
                stepped = step not in SHARED_BAD
                torchs.step(optimizer)
                torchs.update()
            if with_ours:
                for i, p in enumerate(parameters):
                    dist.broadcast(p.data, src=i % size)
            model.zero_grad()
            rows.append({"scale": scale, "stepped": stepped, "weights": _flat(parameters)})
    return mine, theirs


def _right_shares(results: list) -> None:
    size = len(results)
    case = f"{size} ranks, each with a share of the parameters"
    for number in range(len(results[0][0])):
        steps = [mine[number]["stepped"] for mine, _ in results]
        scales = [mine[number]["scale"] for mine, _ in results]
        right = results[0][1][number]
        where = f"{case}, step {number + 1}"
        if len(set(steps)) > 1:
            words = [f"rank {r} {'steps' if s else 'skips'}" for r, s in enumerate(steps)]
            raise Wrong(
                f"{where}: {', '.join(words)}. The ranks do not agree,\n"
                "and from here on they train different models. Ask all ranks before anyone steps."
            )
        if steps[0] and not right["stepped"]:
            raise Wrong(
                f"{where}: one rank's share has overflowed, and nobody skips.\n"
                "One rank's overflow is everybody's: which ReduceOp says that?"
            )
        if right["stepped"] and not steps[0]:
            raise Wrong(f"{where}: all gradients are finite, and nobody steps.")
        if set(scales) != {right["scale"]}:
            raise Wrong(f"{where}: the scales are {scales}, GradScaler's is {right['scale']:g}.")
        for mine, theirs in results:
            weights = mine[number]["weights"], theirs[number]["weights"]
            if not torch.allclose(*weights, rtol=1e-5, atol=1e-6):
                raise Wrong(f"{where}: the weights differ from those of one GradScaler for all.")
