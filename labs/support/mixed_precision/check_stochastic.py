"""Given: what the check cell of exercise 03c looks at.

Drawn numbers are rounded so often that an error of their mean shows; ranks make steps of SGD with
equal gradients, and must end with equal bits.
"""

import itertools
import math
from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, close, described, same_bits
from utils.course.observe import Look
from utils.course.runner import Trial, fractions
from utils.memory.number_formats import FORMATS, spacing

BF16 = FORMATS["bf16"]
PARTS = (0.0012, 0.13, 0.5, 0.77, 0.996, 0.37)  # of the way up to the next bf16 number
# 1e-20 is made one of bf16; 2⁻¹³⁰ is subnormal, as 0.37 of the PARTS is made
SPECIAL = (0.0, 1.0, -2.5, 1e-20, 2.0**-130, -(2.0**-133), math.inf, -math.inf, math.nan)
TIMES = 40_000
RARE, MANY = 3, 2_000_000  # so many 2¹⁶ths of the way up, so often: ~90 of them go up
SIGMAS = 7  # a mean may be so many standard deviations away: once in 10¹¹ right answers
APART = (0, 1, 2_520_000, 2**20, 10**6)  # steps: a seed that begins anew after n steps shows here
WIDTH, LR, MOVE = 512, 0.5, 1e-3  # a move of 1e-3 is an eighth of bf16's step above 1


def stochastic(trial: Trial) -> str:
    """Judges `round_stochastically` and `sgd_step` in the file."""
    values = _draw_values(trial.draw)
    seeds = [trial.new_seed() for _ in range(3)]
    _right_rounding(trial.alone("round_stochastically", _round, values, seeds), values)
    for group in trial.groups((2, 3, 1)):  # no formula depends on the number of ranks
        drawn = _draw_steps(trial, missing=group.size != 2)
        case = group.case(f"parameters of shapes {drawn['shapes']}")
        _right_steps(case, group.run(case, _steps, drawn), drawn)
        if group.size == 2:  # before a run, one rank is started anew
            case += ", one of which has made these steps before"
            _right_steps(case, group.run(case, _steps, drawn), drawn)
    return (
        "each number goes to one of its two neighbours, and the mean is the number itself; a NaN\n"
        "and what bf16 can hold stay, subnormal numbers too; steps in bf16 lead as far as in\n"
        "exact arithmetic, each by chances of its own, two million steps apart too; 1, 2 and 3\n"
        "ranks keep the same weights, bit by bit, without a message."
    )


def walk(path: str | Path, steps: int = 400, move: float = MOVE) -> list[float]:
    """The mean of 512 bf16 weights that start at 1 and should rise by `move` in each step."""
    return Trial(path).alone("a walk", _walk, steps, move)


def _walk(answer, steps: int, move: float) -> list[float]:
    weight = torch.nn.Parameter(torch.ones(WIDTH).bfloat16())
    means = [1.0]
    for step in range(steps):
        weight.grad = torch.full_like(weight, -move / LR)
        answer.sgd_step([weight], LR, step, 0)
        means.append(weight.detach().float().mean().item())
    return means


def nearest(steps: int) -> float:
    """Where a bf16 weight of 1 ends after so many updates of MOVE, rounded to the nearest."""
    weight = torch.ones(1).bfloat16()
    for _ in range(steps):
        weight += MOVE
    return weight.item()


# ---- rounding


def _draw_values(draw) -> list[float]:
    """Numbers between two of bf16, small and large, then special ones."""
    values = []
    for number, part in enumerate(PARTS):
        low = torch.tensor(draw.uniform(1, 1.99) * 10.0 ** draw.randrange(-20, 20))
        if number == len(PARTS) - 1:
            low = torch.tensor(draw.uniform(1, 1.99) * 2.0 ** -draw.randrange(127, 132))
        low = (low.view(torch.int32) & -(2**16)).view(torch.float32).double()
        value = (low + part * spacing(low, BF16)).float().item()
        values.append(value * draw.choice((-1, 1)))
    return values + [torch.tensor(value).bfloat16().item() for value in SPECIAL]


def _round(answer, values: list[float], seeds: list[int]) -> dict:
    """In a process of its own: each value many times, and what else is promised."""

    def rounded(x, seed):
        result = answer.round_stochastically(x, torch.Generator().manual_seed(seed))
        if not isinstance(result, torch.Tensor):
            raise Wrong(f"it returns {described(result)}, not a tensor.")
        if result.dtype != torch.bfloat16 or result.shape != x.shape:
            raise Wrong(
                f"the result is {tuple(result.shape)} {result.dtype}; x is {tuple(x.shape)}, and "
                "bf16 of the same shape is wanted.\n"
                "Twice as long? torch's whole numbers have 64 bits by default: dtype=torch.int32."
            )
        return result

    x = torch.tensor(values).repeat(TIMES, 1)
    nan = x.view(torch.int32)[:, -1]
    nan[::2], nan[1::2] = 0x7FFFFFFF, 0x7F800001  # NaNs that carries and cuts destroy
    with Look(x=x) as look:
        result = rounded(x, seeds[0])
    if look.changed():
        raise Wrong("it changes x itself: make a new tensor.")
    rare = torch.full((MANY,), 0x3F800000 + RARE, dtype=torch.int32).view(torch.float32)  # 1 + …
    ups = int((rounded(rare, seeds[2]) > 1).sum())
    small = x[:50].t()  # also where numbers do not lie one after the other
    torch.manual_seed(1)
    first = rounded(small, seeds[1])
    torch.manual_seed(2)
    again = rounded(small, seeds[1])
    generator = torch.Generator().manual_seed(seeds[1])
    twice = [answer.round_stochastically(x[:500], generator) for _ in range(2)]
    for shape in ((), (0,), (2, 3, 4)):
        rounded(fractions(seeds[2], *shape, dtype=torch.float32), seeds[2])
    return {
        "result": result, "alone": torch.stack([rounded(x[:1], s)[0] for s in range(64)]),
        "repeatable": _bits(first).equal(_bits(again)),
        "others": not _bits(first).equal(_bits(rounded(small, seeds[2]))),
        "ups": ups,
        "goes on": not _bits(twice[0]).equal(_bits(twice[1])),
    }


def _bits(x: torch.Tensor) -> torch.Tensor:
    """NaN is equal to NaN."""
    return x.contiguous().view(torch.int16)


def _right_rounding(seen: dict, values: list[float]) -> None:
    got, alone = seen["result"].double(), seen["alone"]
    inner = range(len(PARTS))
    if all(len(got[:, i].unique()) == 1 for i in inner):
        if all(len(alone[:, i].unique()) == 1 for i in inner):
            raise Wrong(
                f"{values[2]:.9g} is always rounded to {got[0, 2].item():g}: where is the chance?"
            )
        raise Wrong(
            "All numbers of a tensor share one chance: each needs a random number of its own."
        )
    if not seen["repeatable"]:
        raise Wrong(
            "The same generator state gives other results: take all chance from `generator`."
        )
    if not seen["others"] or not seen["goes on"]:
        state = "a generator with another seed" if not seen["others"] else "the same generator"
        raise Wrong(f"A second call with {state} gives the same results: is it asked each time?")
    exact = torch.tensor(values, dtype=torch.float32).double()
    ways = []  # how far up each result is, in steps of bf16: 0 or 1
    for i in inner:
        size = exact[i].abs()
        step = spacing(size, BF16)
        low = torch.floor(size / step) * step
        ways.append((got[:, i] * exact[i].sign() - low) / step)
    parts = [float((exact[i].abs() / spacing(exact[i].abs(), BF16)) % 1) for i in inner]
    misses = [float(way.mean()) - part for way, part in zip(ways, parts)]
    if all(abs(miss - 0.5) < 0.1 for miss in misses):
        raise Wrong(
            "On average the results are half a step too large: you add the random bits and then "
            "round to the nearest.\nCut the lower 16 bits off instead."
        )
    for value, way in zip(values, ways):
        if not ((way == 0) | (way == 1)).all():
            bad = got[~((way == 0) | (way == 1)), values.index(value)][0].item()
            raise Wrong(
                f"{value:.9g} becomes {bad:.9g}. Only the neighbour below and the neighbour above "
                "may come out."
            )
    for value, part, miss in zip(values, parts, misses):
        if abs(miss) > SIGMAS * math.sqrt(part * (1 - part) / TIMES):
            raise Wrong(
                f"{value:.9g} lies {part:.4f} of the way up, and goes up in {part + miss:.4f} of "
                f"{TIMES:,} cases: the chance must be the part of the way up."
            )
    for i in range(len(PARTS), len(values)):
        close("what bf16 can hold must stay as it is", f"a result for {values[i]:g}", got[:, i],
              exact[i].expand(TIMES), slack=0)
    half = ways[2] - parts[2]  # the most random one
    away = half.roll(TIMES // 2)
    others = {"below it": half.roll(1), "beside it": ways[3] - parts[3], "half the rows away": away}
    for what, other in others.items():
        together = float((half * other).mean() / (half.std() * other.std()))
        if abs(together) > SIGMAS / math.sqrt(TIMES):
            raise Wrong(
                f"A number and the one {what} in the tensor go up together (correlation "
                f"{together:+.2f}): each needs a random number of its own."
            )
    right = MANY * RARE / 2**16
    if abs(seen["ups"] - right) > SIGMAS * math.sqrt(right):
        raise Wrong(
            f"1 + {RARE} · 2⁻²³ lies {RARE} / 65,536 of the way up, and goes up in {seen['ups']} "
            f"of {MANY:,} cases, not in about {right:.0f}.\nAre there as many random bits as bits "
            "that are cut off?"
        )


# ---- steps


def _draw_steps(trial: Trial, missing: bool) -> dict:
    """Two parameters of one shape, one of which the gradient may be missing, one of any shape; some
    numbers of steps, not in order."""
    draw = trial.draw
    shape, first = (draw.randrange(20, 40), draw.randrange(20, 40)), draw.randrange(100)
    last = 50_000 if missing else 200
    return {
        "shapes": [shape, shape, (draw.randrange(5, 9),), (last + draw.randrange(100),)],
        "numbers": [first + apart for apart in draw.sample(APART, len(APART))],
        "lr": draw.uniform(0.1, 0.9),
        "seed": trial.new_seed(), "missing": missing,
    }


def _start(drawn: dict) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Weights and gradients in bf16; the first two parameters have equal ones."""
    weights, grads = [], []
    for index, shape in enumerate(drawn["shapes"]):
        seed = drawn["seed"] + max(index, 1)
        weights.append(fractions(seed, *shape).sign() + 0.3 * fractions(seed + 50, *shape))
        size = 0.004 if index < 2 else 1.0  # small moves, large moves
        grads.append((fractions(seed + 90, *shape) * size).bfloat16())
        weights[-1] = weights[-1].bfloat16()
    grads[2] = None if drawn["missing"] else grads[2]
    return weights, grads


def _steps(answer, drawn: dict) -> dict:
    """On a rank: from the same weights, steps with several numbers; then a walk."""
    rank, results = dist.get_rank(), []
    with Look() as look:
        for number in drawn["numbers"]:
            weights, grads = _start(drawn)
            parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
            for parameter, grad in zip(parameters, grads):
                parameter.grad = None if grad is None else grad.clone()
            answer.sgd_step(parameters, drawn["lr"], number, rank)
            dtypes = {p.dtype for p in parameters} - {torch.bfloat16}
            if dtypes:
                raise Wrong(f"after sgd_step parameters are {dtypes.pop()}, not bf16.")
            for parameter, grad in zip(parameters, grads):
                if grad is not None and not torch.equal(parameter.grad, grad):
                    raise Wrong("sgd_step changes the gradients; their owner still needs them.")
            results.append([p.detach().clone() for p in parameters])
        parameter = torch.nn.Parameter(torch.ones(WIDTH).bfloat16())
        for number in range(300):
            parameter.grad = torch.full_like(parameter, -MOVE / LR)  # up: the step size is known
            answer.sgd_step([parameter], LR, number, rank)
    if look.events:
        raise Wrong(
            f"sgd_step calls {look.events[0].op}. The ranks can agree without a message: what do "
            "all of them know?"
        )
    return {"results": results, "end": parameter.detach().clone()}


def _right_steps(case: str, ranks: list[dict], drawn: dict) -> None:
    first = ranks[0]
    mean = first["end"].double().mean().item()
    if first["end"].eq(1.0).all():
        raise Wrong(
            f"{case}: sgd_step: after 300 steps of {MOVE} from 1 no weight has moved. Is the new "
            "weight computed in bf16?\nThen it is rounded to the nearest before you can round it: "
            "go to fp32 first."
        )
    if mean < 1:
        raise Wrong(
            f"{case}: sgd_step: weights that should rise fall to {mean:.2f}: it goes the other way."
        )
    hint = "Each rank rounds by its own chance; all need the same."
    same_bits(case, "the weights after 300 steps", [rank["end"] for rank in ranks], hint)
    for index in range(len(drawn["shapes"])):
        for step in range(len(drawn["numbers"])):
            weights = [rank["results"][step][index] for rank in ranks]
            same_bits(case, f"parameter {index} after a step", weights, hint)
    weights, grads = _start(drawn)
    results = first["results"]
    for one, other in itertools.combinations(range(len(results)), 2):
        if results[one][0].equal(results[other][0]):
            steps = sorted((drawn["numbers"][one], drawn["numbers"][other]))
            raise Wrong(
                f"{case}: sgd_step: the same numbers are rounded up in every step, or at least in "
                f"the steps\n{steps[0]:,} and {steps[1]:,}: new chances each step."
            )
    if results[0][0].equal(results[0][1]):
        raise Wrong(
            f"{case}: sgd_step: two parameters are rounded by the same chances: one after the "
            "other."
        )
    for result in results * drawn["missing"]:
        close(case, "parameter 2, without a gradient,", result[2], weights[2].double(), slack=0)
    _right_on_average(case, weights, grads, results, drawn["lr"])
    if abs(mean - 1 - 300 * MOVE) > SIGMAS * 0.0078 * math.sqrt(300 * 0.11 / WIDTH):
        raise Wrong(
            f"{case}: sgd_step: 300 steps of {MOVE} from 1 lead to {mean:.3f} on average, not to "
            f"{1 + 300 * MOVE:.3f}."
        )


def _right_on_average(case: str, weights: list, grads: list, results: list, lr: float) -> None:
    """Each weight goes to a neighbour of w − lr · grad, and as often up as it should."""
    ups, parts = [], []
    for index in (0, 1, 3):
        right = weights[index].float() - lr * grads[index].float()
        size = right.abs().double()
        step = spacing(size, BF16)
        for result in results:
            way = (result[index].double() * right.sign() - torch.floor(size / step) * step) / step
            off = (way < -0.001) | (way > 1.001)
            off &= size > weights[index].abs() / 32  # else the product's own rounding counts
            if off.any():
                place = tuple(off.nonzero()[0].tolist())
                raise Wrong(
                    f"{case}: sgd_step: {weights[index][place].item():g} − {lr:.4g} · "
                    f"{grads[index][place].item():g} becomes {result[index][place].item():g}; its "
                    f"neighbours in bf16 are {step[place].item():g} apart.\n"
                    "Is all of it computed in fp32?"
                )
            ups.append(way.flatten())
            parts.append(((size / step) % 1).flatten())
    up, part = torch.cat(ups), torch.cat(parts)
    for below, above in ((0, 0.5), (0.5, 1)):
        some = (part >= below) & (part < above)
        miss = float((up - part)[some].mean())
        if abs(miss) > SIGMAS * 0.5 / math.sqrt(int(some.sum())):
            raise Wrong(
                f"{case}: sgd_step: weights that lie {below:g} to {above:g} of the way up are on "
                f"average {miss:+.2f} steps of bf16 off.\n"
                "Is the new weight computed in fp32, and rounded only by round_stochastically?"
            )
