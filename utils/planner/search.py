"""Every strategy that fits a machine, the fastest first."""

import math
from typing import Any

import numpy as np

from utils.choices import RECOMPUTE
from utils.planner.machine import Machine
from utils.planner.model import Model, check_whole
from utils.planner.plan import Plan, evaluate, plans
from utils.planner.strategy import CONTEXT, Columns, Strategy, defaults, valid

TOKENS = 4096  # a sequence is split while each rank keeps at least this many positions
# The values that a search tries unless they are fixed.
CHOICES = {
    "interleave": (1, 2, 3, 4, 6, 8),
    "micro_batch": (1, 2, 4, 8, 16, 32),
    "recompute": RECOMPUTE,
    "zero": (0, 1, 3),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b",),
    "offload": ("none",),
    "software": ("megatron",),
    "fused_loss": (False,),
}


def search(
    model: Model,
    machine: Machine,
    gpus: int,
    global_batch: int | None = None,
    top: int = 20,
    any_memory: bool = False,
    **fixed: Any,
) -> list[Plan]:
    """The `top` fastest strategies on `gpus` devices whose memory suffices: a list of `Plan`.

    global_batch   sequences per step; None: the model's
    fixed          fields of `Strategy`: a value, or a tuple of values to try
    any_memory     also those that do not fit
    Without `cp` it tries those that leave each rank TOKENS positions of a sequence or more: with
    fewer, it is better to divide rows.
    The list is empty if no strategy fits. Raises ValueError for a field that does not exist.
    """
    c = candidates(model, machine, gpus, global_batch, **fixed)
    if not len(c):
        return []
    results = evaluate(model, c, machine)
    held, host, seconds, hidden, fits = results
    order = np.argsort(seconds["total"], kind="stable")
    order = order if any_memory else order[fits[order]]
    order = order[:top]
    chosen = (
        {kind: values[order] for kind, values in held.items()},
        host[order],
        {kind: values[order] for kind, values in seconds.items()},
        {kind: values[order] for kind, values in hidden.items()},
        fits[order],
    )
    return plans(model, c.take(order), machine, chosen)


def candidates(
    model: Model, machine: Machine, gpus: int, global_batch: int | None = None, **fixed: Any
) -> Columns:
    """All strategies on `gpus` devices with compatible sizes, whether they fit or not."""
    check_whole("gpus", gpus)
    if global_batch is not None:
        check_whole("global-batch", global_batch)
    unknown = set(fixed) - set(Strategy.__dataclass_fields__)
    if unknown:
        raise ValueError(f"{sorted(unknown)}: Strategy has no such fields")
    choices = {
        "tp": divisors(gpus),
        "cp": tuple(n for n in divisors(gpus) if n == 1 or model.seq // n >= TOKENS),
        "context": CONTEXT,
        "pp": divisors(gpus),
        **CHOICES,
        "ep": divisors(model.experts),
        **{name: (value,) for name, value in defaults(model, machine).items()},
    }
    choices |= {name: value if isinstance(value, tuple) else (value,)
                for name, value in fixed.items()}
    Strategy(**{name: values[0] for name, values in choices.items()})  # raises for unknown values
    c = Columns(**_grid(choices, model, gpus, global_batch or model.batch))
    return c.take(valid(c, model, machine))


def _grid(choices, model, gpus, global_batch):
    """Every combination of the choices as {name: array}; impossible ones are dropped as early as
    possible, to keep the arrays short."""
    grid = {"global_batch": np.array([global_batch])}
    dp = choices.pop("dp", None)
    for name, values in choices.items():
        count = len(next(iter(grid.values())))
        grid = {key: np.repeat(column, len(values)) for key, column in grid.items()}
        grid[name] = np.tile(np.array(values), count)
        if name == "context":  # without cp, all are the same
            grid = _keep(grid, (grid["cp"] > 1) | (grid["context"] == values[0]))
        elif name == "pp":
            split = grid["tp"] * grid["cp"] * grid["pp"]
            grid = _keep(grid, (gpus % split == 0) & (model.heads % grid["tp"] == 0))
            grid["dp"] = gpus // (grid["tp"] * grid["cp"] * grid["pp"])
            if dp is not None:
                grid = _keep(grid, np.isin(grid["dp"], dp))
        elif name == "micro_batch":
            grid = _keep(grid, global_batch % (grid["dp"] * grid["micro_batch"]) == 0)
        elif name == "interleave":
            grid = _keep(grid, (grid["interleave"] == 1) | (grid["pp"] > 1))
        elif name == "zero":
            useful = (grid["dp"] * grid["cp"] > 1) | (
                grid["zero"] == min(values)
            )  # a single rank shards nothing
            grid = _keep(grid, useful & ((grid["zero"] < 3) | (grid["pp"] == 1)))
        elif name == "sequence_parallel":
            grid = _keep(grid, ~grid["sequence_parallel"] | (grid["tp"] > 1))
    return grid


def _keep(grid, where):
    return {name: column[where] for name, column in grid.items()}


def divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def explain(found: list[Plan]) -> str:
    """A table of the ranking."""
    head = (
        f"{'':>3} {'tp':>4}{'cp':>4} {'context':<8}"
        f"{'pp':>4}{'dp':>6}{'ep':>4}{'v':>3}{'micro':>6} {'recompute':<10}"
        f"{'zero':>5}{'SP':>4}{'GB':>8}{'seconds':>10}{'TFLOP/s':>9}{'MFU':>7}"
    )
    rows = [head]
    for place, one in enumerate(found, start=1):
        s = one.strategy
        rows.append(
            f"{place:>3} {s.tp:>4}{s.cp:>4} {s.context if s.cp > 1 else '–':<8}"
            f"{s.pp:>4}{s.dp:>6}{s.ep:>4}{s.interleave:>3}{s.micro_batch:>6} "
            f"{s.recompute:<10}{s.zero:>5}{'yes' if s.sequence_parallel else '–':>4}"
            f"{one.memory['total'] / 1e9:>8.1f}{one.seconds['total']:>10.2f}"
            f"{one.tflops_per_gpu:>9.1f}{one.mfu:>7.1%}"
        )
    return "\n".join(rows)
