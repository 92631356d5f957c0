"""Given: what the check cell of exercise 03a looks at.

The scaler's pieces are tried on gradients that the judge knows, then whole trainings: real fp16
under DDP beside torch.amp.GradScaler, and ranks that hold a share of the parameters each, with an
overflow or a NaN that the others cannot see.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.course.assertions import Wrong, a_number, bitwise_equal, close, described, forbid
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

HANG = "Does every rank call the all-reduce, also the ranks that see nothing wrong?"
OPTIONS = {"init_scale": 2.0**22, "growth_interval": 3}  # far too large, so that steps are skipped
BAD = (math.inf, -math.inf, math.nan)
HUGE = ", gradients near the largest number of their type"
ONE_INF = ", the first number infinite on one rank"
FP16_STEPS = 8


def scaler(trial: Trial) -> str:
    """Judges the LossScaler in the file."""
    forbid(trial.path, ("GradScaler",))
    for group in trial.groups(hang=HANG):
        rules = [_draw_rules(trial.draw, long) for long in (False, False, True)]
        case = group.case()
        for rank, seen in enumerate(group.run(case, _rules, rules)):
            _right_rules(f"{case}, rank {rank}", seen, rules)
        for shares in (False, True):
            drawn = _draw_steps(trial, group.size, shares)
            case = group.case("a share of the parameters each" if shares else "all parameters each")
            _right_steps(case, group.run(case, _steps, drawn, late=shares), drawn)
        if group.size <= 3:  # DDP and fp16 are the same on more
            clip, seed = trial.draw.uniform(0.2, 0.5), trial.new_seed()
            options = OPTIONS | {"growth_interval": trial.draw.randrange(2, 4)}
            case = group.case("DDP in fp16")
            for rank, rows in enumerate(group.run(case, _beside, options, clip, seed)):
                _equal(f"{case}, rank {rank}", *rows)
    return (
        "scales, skipped steps and gradients are right on 1 to 6 ranks, with drawn factors and\n"
        "intervals, far below 1 and near the largest numbers too; on 1 to 3 they equal\n"
        "torch.amp.GradScaler's in real fp16 under DDP; one all-reduce of one number a step;\n"
        "where each rank holds a share of the parameters, or none, all skip together."
    )


def fp16_run(file: str | Path, steps: int = 30, **options) -> tuple[list[float], list[bool]]:
    """The scales and the skipped steps of a run with your scaler on 2 ranks, for the figure."""
    options = OPTIONS | {"growth_interval": 5} | options
    mine, _ = Trial(file).on_ranks(2, _beside, options, None, 0, steps)[0]
    return [row["scale"] for row in mine], [not row["stepped"] for row in mine]


# ---- the rules for the scale


def _draw_rules(draw, long: bool) -> tuple[dict, list[bool]]:
    """Options of a scaler, and whether each of some steps was skipped: more than a hundred of them
    until the scale grows, or few."""
    interval = draw.randrange(110, 150) if long else draw.randrange(2, 5)
    options = {
        "init_scale": 2.0 ** draw.randrange(-4, 17),
        "growth_factor": draw.choice((2.0, 4.0, 1.5)),
        "backoff_factor": draw.choice((0.5, 0.25, 0.75)),
        "growth_interval": interval,
    }
    flags = [False] * (2 * interval) + [True] + [False] * (interval - 1) + [True]
    flags += [draw.random() < 0.3 for _ in range(12)] + [False] * (2 * interval + 1)
    flags += [True] * draw.randrange(18, 25)  # down to far below 1
    return options, flags


def _rules(answer, rules: list[tuple[dict, list[bool]]]) -> list[list[tuple[float, float]]]:
    """On a rank: the scale and the good steps after each step of several scalers, which take
    turns."""
    seen = [[] for _ in rules]
    with _without_the_library():
        scalers = [answer.LossScaler(**options) for options, _ in rules]
        for scaler in scalers:  # first the pieces that are written first
            scaler.scale_loss(torch.ones(()))
            scaler.unscale([])
    with Look() as look, _without_the_library():
        for flags in itertools.zip_longest(*(flags for _, flags in rules)):
            for scaler, flag, scales in zip(scalers, flags, seen):
                if flag is not None:
                    scaler.update(flag)
                    scale = a_number("update()", "the scale", scaler.scale)
                    scales.append((scale, a_number("update()", "good_steps", scaler.good_steps)))
    if look.events:
        raise Wrong(f"update() calls {look.events[0].op}; unscale() has asked the ranks already.")
    return seen


def _right_rules(where: str, seen: list[list[tuple[float, float]]], rules: list) -> None:
    for scales, (options, flags) in zip(seen, rules):
        right, row, interval = options["init_scale"], 0, options["growth_interval"]
        counted = None  # the first wrong number of good steps
        for step, ((scale, count), flag) in enumerate(zip(scales, flags)):
            row = 0 if flag else row + 1
            grows = row == interval
            right *= options["backoff_factor"] if flag else options["growth_factor"] ** grows
            row *= not grows
            if count != row:
                counted = counted or (step, count, row)
            if math.isclose(scale, right, rel_tol=1e-5):
                continue
            if flag:
                hint = f"An overflow multiplies it by backoff_factor, {options['backoff_factor']}."
            elif grows:
                hint = (
                    "It should have grown by growth_factor, "
                    f"{options['growth_factor']}: that was the last of growth_interval good steps."
                )
            elif any(flags[max(0, step - interval + 1) : step]):
                hint = "Do the good steps come in a row? An overflow starts anew."
            else:
                hint = "After a growth, the counting begins anew."
            raise Wrong(
                f"{where}: update(): {_history(flags, step, interval)}\n"
                f"the scale is {scale:g}, and {right:g} is right. {hint}"
            )
        if counted:
            step, count, row = counted
            raise Wrong(
                f"{where}: update(): {_history(flags, step, interval)}\n"
                f"good_steps is {count:g}, and {row} is right: the good steps in a row since the "
                "scale changed."
            )


@contextlib.contextmanager
def _without_the_library() -> Iterator[None]:
    """Inside, torch's scaler does not work, under whatever name it was found."""
    kind = torch.amp.GradScaler
    before = {name: getattr(kind, name) for name in ("scale", "unscale_", "step", "update")}

    def refuse(*_, **__):
        raise Wrong("torch.amp.GradScaler is at work: it is what this exercise rebuilds by hand.")

    for name in before:
        setattr(kind, name, refuse)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(kind, name, method)


def _history(flags: list[bool], step: int, interval: int) -> str:
    """The steps up to one of them, the last ones written out."""
    shown = "".join("x" if flag else "." for flag in flags[: step + 1])
    before = f"{len(shown) - 40} steps and " if len(shown) > 40 else ""
    return f"after {before}the steps {shown[-40:]} (x: overflow, growth_interval={interval})"


# ---- steps with gradients that are known


def _draw_steps(trial: Trial, size: int, shares: bool) -> dict:
    """What the ranks do, step by step. shares: each holds some of the parameters, one none."""
    draw, dtype = trial.draw, torch.float64 if shares else torch.float32
    shapes = [(draw.randrange(2, 6), draw.randrange(2, 6)) for _ in range(draw.randrange(2, 5))]
    shapes += [(draw.randrange(6, 12),), ()]
    owners = [draw.randrange(max(size - 1, 1)) for _ in shapes]  # the last rank has nothing
    turn = draw.randrange(size)
    steps = []
    bad = [None, 0, None, 1, 2, None, None, draw.randrange(3), None]
    for kind in bad:
        place = None
        if kind is not None:
            number = draw.randrange(len(shapes))
            rank = (owners[number] + turn) % size if shares else draw.randrange(size)
            place = (rank, number, draw.randrange(max(math.prod(shapes[number]), 1)), BAD[kind])
        missing = draw.choice((None, draw.randrange(len(shapes))))
        if place and missing == place[1]:
            missing = None
        steps.append({"bad": place, "missing": missing, "large": draw.random() < 0.5})
    return {
        "shapes": shapes, "shares": shares, "steps": steps, "seed": trial.new_seed(),
        "owners": [(owner + turn) % size for owner in owners], "turn": turn,
        "alone": [  # types and scales for unscale() by itself, no 2ⁿ first
            *((dtype, 100.0 * n, "") for n in (1, 2, 3)), (dtype, 300.0, ONE_INF),
            *((other, 4.0, HUGE) for other in (torch.float16, torch.bfloat16, torch.float32)),
        ],
        "dtype": dtype,
        "options": {"init_scale": 2.0 ** draw.randrange(8, 12), "growth_interval": 2,
                    "growth_factor": draw.choice((2.0, 4.0)), "backoff_factor": 0.25},
        "lr": draw.uniform(0.05, 0.2), "clip": None if shares else draw.uniform(0.3, 0.6),
    }


def _steps(answer, drawn: dict) -> list[dict]:
    """On a rank: each step with its scaled gradients, what the optimizer sees and what it does."""
    rank, rows, dtype = dist.get_rank(), [], drawn["dtype"]
    model = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in drawn["shapes"]]
    owned = [p for p, o in zip(model, drawn["owners"]) if not drawn["shares"] or o == rank]
    # two groups, the second with another learning rate
    halves = [half for half in (owned[::2], owned[1::2]) if half]
    groups = [{"params": half, "lr": drawn["lr"] * (i + 1)} for i, half in enumerate(halves)]
    optimizer = torch.optim.SGD(groups or [{"params": []}], lr=drawn["lr"], momentum=0.9)
    scaler, whole, seen = answer.LossScaler(**drawn["options"]), Look(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(_copies(model)))
    for number, step in enumerate(drawn["steps"]):
        where = f"step {number + 1}"
        before, scale = _copies(model, grads=False), a_number(where, "the scale", scaler.scale)
        true = _true_gradients(drawn, number, rank)
        loss = sum((p * g).sum() for p, g in zip(model, true) if g is not None)
        loss = loss if isinstance(loss, torch.Tensor) else model[0].sum() * 0
        unscaled = loss.detach().clone()
        with whole:
            scaled = scaler.scale_loss(loss)
        if not isinstance(scaled, torch.Tensor):
            raise Wrong(f"{where}: scale_loss returns {described(scaled)}, not a tensor.")
        if not bitwise_equal(loss, unscaled):
            raise Wrong(f"{where}: scale_loss changes the caller's loss: return another tensor.")
        if not (loss.isnan() or math.isclose(scaled.item(), loss.item() * scale, rel_tol=1e-5)):
            raise Wrong(
                f"{where}: scale_loss(): with the scale {scale:g} a loss of {loss.item():.6g} "
                f"becomes {scaled.item():.6g}, not {loss.item() * scale:.6g}."
            )
        scaled.backward()
        if step["bad"] and step["bad"][0] == rank:
            _, parameter, place, value = step["bad"]
            model[parameter].grad.view(-1)[place] = value
        clip = _clip(drawn, step, true)
        with whole, Look() as look, _without_the_library():
            made = scaler.step(optimizer, clip) if clip else scaler.step(optimizer)
        if len(seen) > 1:
            raise Wrong(f"{where}: step() calls the optimizer {len(seen)} times.")
        rows.append({
            "made": bool(made), "grads": seen.pop() if seen else None, "scale": scale, "clip": clip,
            "events": [(event.op, event.payload) for event in look.events],
            "moved": any(not torch.equal(a, b.detach()) for a, b in zip(before, model)),
        })
        optimizer.zero_grad()
        for parameter in model:
            parameter.grad = None
        del loss, scaled, made, look, true, unscaled
    ours = [rows_["grads"] for rows_ in rows if rows_["grads"]]
    rows[-1]["kept"] = whole.kept(ours, list(optimizer.state.values()))
    rows[-1]["unscaled"] = _unscale_alone(answer, drawn, rank)
    return rows


def _unscale_alone(answer, drawn: dict, rank: int) -> list[tuple]:
    """On a rank: `unscale` by itself, on gradients of which one may be missing."""
    results = []
    for number, (dtype, scale, what) in enumerate(drawn["alone"]):
        scaler = answer.LossScaler(**drawn["options"] | {"init_scale": scale})
        parameters, sizes = [], [math.prod(shape) for shape in drawn["shapes"]]
        flat = fractions(drawn["seed"] + 977 * number, sum(sizes), dtype=dtype) * 1e3
        if what == HUGE:  # each is finite, their sum is not
            flat.fill_(0.9 * torch.finfo(dtype).max)
        if what == ONE_INF and rank == drawn["turn"]:
            flat[0] = math.inf
        for index, (shape, place) in enumerate(zip(drawn["shapes"], flat.split(sizes))):
            parameters.append(torch.nn.Parameter(torch.ones(shape, dtype=dtype)))
            if index != number or not drawn["shares"]:
                parameters[-1].grad = place.view(shape)  # one buffer for all, as DDP has it
        before, places = _copies(parameters), [p.grad for p in parameters]
        bad = scaler.unscale(parameters)
        if any(p.grad is not place for p, place in zip(parameters, places)):
            raise Wrong("unscale() puts another tensor into .grad: divide in place.")
        after = [
            place.view(shape).clone() if p.grad is not None else None
            for p, shape, place in zip(parameters, drawn["shapes"], flat.split(sizes))
        ]
        results.append((bool(bad), before, after, scale, what))
    return results


def _true_gradients(drawn: dict, number: int, rank: int) -> list[torch.Tensor | None]:
    """The same on all ranks, as after DDP's all-reduce; with shares, None for what others hold."""
    grads = []
    for index, shape in enumerate(drawn["shapes"]):
        missing = drawn["steps"][number]["missing"] == index
        missing = missing or (drawn["shares"] and drawn["owners"][index] != rank)
        seed = drawn["seed"] + 100 * number + index
        grads.append(None if missing else fractions(seed, *shape, dtype=drawn["dtype"]))
    return grads


def _clip(drawn: dict, step: dict, true: list) -> float | None:
    """A limit below the norm of these gradients, or above it."""
    if drawn["clip"] is None:
        return None
    norm = sum(grad.square().sum().item() for grad in true if grad is not None) ** 0.5
    return norm * (3 if step["large"] else drawn["clip"])


def _copies(parameters: list, grads: bool = True) -> list[torch.Tensor | None]:
    values = [p.grad if grads else p.detach() for p in parameters]
    return [None if value is None else value.clone() for value in values]


def _right_steps(case: str, ranks: list[list[dict]], drawn: dict) -> None:
    for rank, rows in enumerate(ranks):
        for unscaled in rows[-1]["unscaled"]:
            if not unscaled[-1]:
                _right_unscaled(f"{case}, rank {rank}", *unscaled)
    for number, rows in enumerate(zip(*ranks)):
        step, where = drawn["steps"][number], f"{case}, step {number + 1}"
        _right_decisions(where, step, [row["made"] for row in rows])
        for rank, row in enumerate(rows):
            here = f"{where}, rank {rank}"
            if row["scale"] != rows[0]["scale"]:
                raise Wrong(
                    f"{here}: the scale is {row['scale']:g}, and {rows[0]['scale']:g} on rank 0."
                )
            if row["made"] != (row["grads"] is not None):
                done = "makes" if row["grads"] else "makes no"
                raise Wrong(
                    f"{here}: step() returns {row['made']}, and {done} step of the optimizer."
                )
            if row["grads"]:
                _right_gradients(here, row, _true_gradients(drawn, number, rank))
            elif row["moved"]:
                raise Wrong(f"{here}: the step counts as skipped, but the weights have changed.")
    for rank, rows in enumerate(ranks):
        for unscaled in rows[-1]["unscaled"]:
            _right_unscaled(f"{case}, rank {rank}", *unscaled)
    _right_scales(case, [row["scale"] for row in ranks[0]], drawn)
    for number, rows in enumerate(zip(*ranks)):
        _right_messages(f"{case}, step {number + 1}", [row["events"] for row in rows])
    for rank, rows in enumerate(ranks):
        if rows[-1]["kept"] > 2 * sum(8 * math.prod(shape) for shape in drawn["shapes"]):
            raise Wrong(
                f"{case}, rank {rank}: after {len(rows)} steps {rows[-1]['kept']:,} bytes of what "
                "was made are still held.\nWho keeps them, and for what?"
            )


def _right_decisions(where: str, step: dict, made: list[bool]) -> None:
    if step["bad"]:
        rank, _, _, value = step["bad"]
        what = f"rank {rank} has {'a NaN' if math.isnan(value) else value} in a gradient"
    if len(set(made)) > 1:
        words = [f"rank {r} {'steps' if m else 'skips'}" for r, m in enumerate(made)]
        raise Wrong(
            f"{where}: {', '.join(words)}"
            + (f", and {what}.\n" if step["bad"] else ".\n")
            + "The ranks do not agree, and from here on they train different models. "
            "Ask all ranks before anyone steps."
        )
    if made[0] and step["bad"]:
        raise Wrong(
            f"{where}: {what}, and nobody skips.\n"
            "What one rank finds is everybody's: which ReduceOp says that? And does a NaN count?"
        )
    if not made[0] and not step["bad"]:
        raise Wrong(f"{where}: all gradients are finite, and nobody steps.")


def _right_gradients(where: str, row: dict, true: list) -> None:
    """What the optimizer has seen: unscaled, then clipped."""
    norm = sum(grad.double().square().sum() for grad in true if grad is not None) ** 0.5
    clip = row["clip"]
    factor = 1.0 if clip is None else min(1.0, clip / float(norm))
    for number, (seen, right) in enumerate(zip(row["grads"], true)):
        if right is None:
            if seen is not None and seen.any():
                raise Wrong(f"{where}: gradient {number} was None, and is a tensor at the step.")
            continue
        if seen is None:
            raise Wrong(f"{where}: gradient {number} is None when the optimizer makes its step.")
        hint = _reason(seen, right, row["scale"], factor, clip is not None)
        limit = 1e-5 / torch.finfo(seen.dtype).eps  # a hand's clipping has other last digits
        close(where, f"gradient {number} at the step", seen, right * factor, hint=hint, slack=limit)


def _reason(
    seen: torch.Tensor, right: torch.Tensor, scale: float, factor: float, clipped: bool
) -> str:
    ratio = float(seen.double().norm() / right.double().norm())
    if math.isclose(ratio, scale, rel_tol=1e-3):
        return f"It is {scale:g} times too large, as much as the scale: it is not divided by it."
    if factor < 1 and math.isclose(ratio, 1.0, rel_tol=1e-3):
        return "It is right without clipping; `clip` is the largest norm that it may have."
    if any(math.isclose(ratio, other, rel_tol=1e-3) for other in (0.25, 0.5, 2.0, 4.0)):
        return (
            f"It is {ratio:.3g} times the one before clipping. Is it divided by the scale that the "
            "loss was multiplied with?\nFirst unscale, then update."
        )
    if clipped and ratio < 0.9 * factor:
        return "It is too small. Are the gradients unscaled when they are clipped?"
    return "Divided by the scale, then clipped if asked, and nothing else?"


def _right_unscaled(
    where: str, bad: bool, before: list, after: list, scale: float, what: str
) -> None:
    where = f"{where}: unscale() alone, with the scale {scale:g}{what}"
    for number, (old, new) in enumerate(zip(before, after)):
        if old is None:
            if new is not None and new.any():
                raise Wrong(f"{where}: gradient {number} was None, and is a tensor afterwards.")
            continue
        hint = "Divided by the scale, in place?"
        if new.equal(old) and new.isfinite().all():
            hint = "It is not divided by the scale, or not in its own memory."
        close(where, f"gradient {number}", new, old.double() / scale, hint=hint)
    if bad and what != ONE_INF:
        raise Wrong(f"{where}: all gradients are finite, and unscale says that one is not.")
    if not bad and what == ONE_INF:
        raise Wrong(f"{where}: it is not finite, and unscale says that all are.")


def _right_scales(case: str, scales: list[float], drawn: dict) -> None:
    """The scale before each step."""
    options = drawn["options"]
    right, row = options["init_scale"], 0
    for number, (scale, step) in enumerate(zip(scales, drawn["steps"])):
        if not math.isclose(scale, right, rel_tol=1e-6):
            raise Wrong(
                f"{case}, step {number + 1}: the scale is {scale:g}, and {right:g} is right.\n"
                "Does step() call update() once, with what unscale() has found?"
            )
        row = 0 if step["bad"] else row + 1
        grows = row == options["growth_interval"]
        right *= options["backoff_factor"] if step["bad"] else options["growth_factor"] ** grows
        row *= not grows


def _right_messages(where: str, by_rank: list[list]) -> None:
    """One all-reduce of one number in each step."""
    for rank, events in enumerate(by_rank):
        here = f"{where}, rank {rank}"
        if not events:
            if len(by_rank) == 1:
                continue
            raise Wrong(f"{here}: no message at all: how do the ranks know what others have found?")
        if other := sorted({op for op, _ in events} - {"all_reduce"}):
            raise Wrong(f"{here}: step() calls {', '.join(other)}; one all-reduce is enough.")
        if len(events) > 1:
            raise Wrong(
                f"{here}: {len(events)} messages in a step; one all-reduce of one number is "
                "enough:\nlook at all gradients first, then ask the other ranks once."
            )
        if events[0][1] > 8:
            raise Wrong(f"{here}: a message of {events[0][1]} bytes; one number is enough.")


# ---- beside GradScaler, in fp16


def _beside(
    answer, options: dict, clip: float | None, seed: int, steps: int = FP16_STEPS
) -> tuple[list, list]:
    """On a rank: the answer's training and GradScaler's, a row for each step."""
    theirs = _train(_GradScaler(options), options, clip, seed, steps)
    mine = _train(answer.LossScaler(**options), options, clip, seed, steps)
    return mine, theirs


class _GradScaler:
    """torch.amp.GradScaler with the names of the exercise."""

    def __init__(self, options: dict):
        self.scaler = torch.amp.GradScaler("cpu", **options)
        self.scale_loss = self.scaler.scale

    @property
    def scale(self) -> float:
        return self.scaler.get_scale()

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None) -> bool:
        parameters = optimizer.param_groups[0]["params"]
        good = all(p.grad.isfinite().all() for p in parameters)
        self.scaler.unscale_(optimizer)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        return good


def _train(scaler, options: dict, clip: float | None, seed: int, steps: int) -> list[dict]:
    rank, rows = dist.get_rank(), []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x, y = fractions(seed + 10 * step + rank, 4, 9).float().split([6, 3], 1)
        with torch.autocast("cpu", torch.float16):
            out = parallel(x)
        loss = (out.float() - y).square().mean()
        row = {"scale": a_number(f"step {step + 1}", "the scale", scaler.scale)}
        scaler.scale_loss(loss).backward()
        row["stepped"] = bool(scaler.step(optimizer, clip))
        optimizer.zero_grad()
        row["weights"] = torch.cat(
            [p.detach().flatten() for p in copy.deepcopy(model).parameters()]
        )
        rows.append(row)
    return rows


def _equal(where: str, mine: list[dict], theirs: list[dict]) -> None:
    """Raises Wrong for the first step at which the two trainings differ."""
    for number, (my, right) in enumerate(zip(mine, theirs), start=1):
        here = f"{where}, step {number}"
        if my["scale"] != right["scale"]:
            raise Wrong(
                f"{here}: the scale is {my['scale']:g}, GradScaler's is {right['scale']:g}."
            )
        if my["stepped"] != right["stepped"]:
            words = ("steps", "skips") if my["stepped"] else ("skips", "steps")
            raise Wrong(f"{here}: your scaler {words[0]}, and GradScaler {words[1]}.")
        close(here, "the weights", my["weights"], right["weights"], slack=1e-5 / 1.2e-7)
