"""Given: what the check cell of exercise 03c looks at.

Numbers whose neighbours in bf16 are known are rounded 4,000 times each; two ranks make some steps
of SGD with equal gradients.
"""

from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.checks import Wrong, load_answer, on_ranks
from utils.memory.number_formats import FORMATS, round_to, spacing

BF16 = FORMATS["bf16"]
VALUES = (1.001, -3.3, 1e-5, -7e4, 1e20, 0.3, 0.0, 1.0, -2.5, float("inf"))
TIMES = 4000
WIDTH, LR, MOVE = 512, 0.5, 1e-3  # a move of 1e-3 is an eighth of bf16's step above 1


def stochastic(path: Path) -> str:
    """Judges `round_stochastically` and `sgd_step` in the file."""
    _right_rounding(*on_ranks(1, path, _round)[0])
    _right_steps(on_ranks(2, path, _steps))
    return (
        "each number goes to one of its two neighbours, and the mean is the number itself;\n"
        "1,000 tiny steps in bf16 lead as far as in exact arithmetic;\n"
        "two ranks keep the same weights, bit by bit."
    )


def walk(path: Path, steps: int = 400, move: float = MOVE) -> list[float]:
    """The mean of 512 bf16 weights that start at 1 and should rise by `move` in each step."""
    sgd_step = load_answer(Path(path).resolve()).sgd_step
    weight = torch.nn.Parameter(torch.ones(WIDTH).bfloat16())
    means = [1.0]
    for step in range(steps):
        weight.grad = torch.full_like(weight, -move / LR)
        sgd_step([weight], LR, step, 0)
        means.append(weight.detach().float().mean().item())
    return means


def nearest(steps: int) -> float:
    """Where a bf16 weight of 1 ends after so many updates of MOVE, rounded to the nearest."""
    weight = torch.ones(1).bfloat16()
    for _ in range(steps):
        weight += MOVE
    return weight.item()


# ---- rounding


def _round(answer) -> tuple:
    def rounded(x, seed):
        return answer.round_stochastically(x, torch.Generator().manual_seed(seed))

    x = torch.tensor(VALUES).repeat(TIMES, 1)
    before = x.clone()
    result = rounded(x, 0)
    if not isinstance(result, torch.Tensor):
        raise Wrong(f"round_stochastically returns {type(result).__name__}, not a tensor.")
    torch.manual_seed(1)
    first = rounded(x, 5)
    torch.manual_seed(2)
    again = rounded(x, 5)
    alone = torch.stack([rounded(x[:1], seed)[0].float() for seed in range(64)])
    repeatable = first.view(torch.int16).equal(again.view(torch.int16))  # NaN is NaN
    return result, repeatable, alone, torch.equal(x, before)


def _right_rounding(result, repeatable: bool, alone, unchanged: bool) -> None:
    if result.dtype != torch.bfloat16 or result.shape != (TIMES, len(VALUES)):
        raise Wrong(
            f"the result is {tuple(result.shape)} {result.dtype}; x is {(TIMES, len(VALUES))}, and "
            "bf16 of the same shape is wanted.\n"
            "Twice as long? torch's whole numbers have 64 bits by default: dtype=torch.int32."
        )
    if not unchanged:
        raise Wrong("round_stochastically changes x itself: make a new tensor.")
    if not repeatable:
        raise Wrong(
            "The same generator state gives other results: take all chance from `generator`."
        )
    exact = torch.tensor(VALUES, dtype=torch.float32).double()
    got = result.double()
    inner = [i for i, v in enumerate(exact) if v.isfinite() and round_to(v, BF16) != v]
    step = spacing(exact[inner], BF16)
    error = (got[:, inner].mean(0) - exact[inner]) / step * exact[inner].sign()
    if all(len(got[:, i].unique()) == 1 for i in inner):
        if all(len(alone[:, i].unique()) == 1 for i in inner):
            raise Wrong(
                f"{VALUES[0]} is always rounded to {got[0, 0].item():g}: where is the chance?"
            )
        raise Wrong(
            "All numbers of a tensor share one chance: each needs a random number of its own."
        )
    if ((error - 0.5).abs() < 0.1).all():
        raise Wrong(
            "On average the results are half a step too large: you add the random bits and then "
            "round to the nearest.\nCut the lower 16 bits off instead."
        )
    for i, value in enumerate(exact):
        gap = spacing(value, BF16) if i in inner else torch.zeros(()).double()
        low = torch.floor(value / gap) * gap if i in inner else value
        good = (got[:, i] == low) | (got[:, i] == low + gap)
        if not good.all():
            bad = got[~good, i][0].item()
            raise Wrong(
                f"{VALUES[i]:g} becomes {bad:g}. Only the neighbour below and the neighbour above "
                "may come out,\nand what bf16 can hold must stay as it is."
            )
    for i, miss in zip(inner, error):
        if abs(miss) > 0.06:  # 7 standard deviations of the mean of 4,000
            raise Wrong(
                f"{VALUES[i]:g} is on average {miss:+.2f} bf16 steps off: the chance to go up must "
                "be the part of the way up."
            )


# ---- steps


def _steps(answer) -> dict:
    """Two equal parameters, equal gradients, 1,000 steps; the first ones in detail."""
    parameters = [torch.nn.Parameter(torch.ones(WIDTH).bfloat16()) for _ in range(2)]
    starts = []
    for step in range(4):  # from the same weights each time
        for p in parameters:
            p.data.fill_(1.0)
            p.grad = torch.full_like(p, MOVE / LR)
        answer.sgd_step(parameters, LR, step, dist.get_rank())
        starts.append([p.detach().clone() for p in parameters])
    for p in parameters:
        p.data.fill_(1.0)
    for step in range(1000):
        for p in parameters:
            p.grad = torch.full_like(p, -MOVE / LR)  # up, so that the step size stays known
        answer.sgd_step(parameters, LR, step, dist.get_rank())
    ends = [p.detach().clone() for p in parameters]
    return {"starts": starts, "ends": ends, "dtypes": {p.dtype for p in parameters}}


def _right_steps(results: list[dict]) -> None:
    one, other = results
    if one["dtypes"] != {torch.bfloat16}:
        raise Wrong(f"after sgd_step the parameters are {one['dtypes']}, not bf16.")
    mean = one["ends"][0].double().mean().item()
    if all(end.eq(1.0).all() for end in one["ends"]):
        raise Wrong(
            "sgd_step: after 1,000 steps no weight has moved. Is the new weight computed in bf16? "
            "Then it is rounded\nto the nearest before you can round it: go to fp32 first."
        )
    if mean < 1:
        raise Wrong(
            f"sgd_step: weights that should rise fall to {mean:.2f}: it goes the other way."
        )
    for a, b in zip(one["ends"], other["ends"]):
        if not a.equal(b):
            raise Wrong(
                "sgd_step: with equal gradients, the ranks have drifted apart: each rounds by its "
                "own chance.\nAll ranks need the same seed."
            )
    first, second = one["starts"][0], one["starts"][1]
    if first[0].equal(second[0]):
        raise Wrong(
            "sgd_step: the same numbers are rounded up in every step: new chances each step."
        )
    if first[0].equal(first[1]):
        raise Wrong(
            "sgd_step: two parameters are rounded by the same chances: one after the other."
        )
    if abs(mean - 2.0) > 0.05:
        raise Wrong(
            f"sgd_step: 1,000 steps of 0.001 from 1 lead to {mean:.3f} on average, not to 2."
        )
