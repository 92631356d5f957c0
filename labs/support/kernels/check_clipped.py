"""Given: what the check cell of exercise 12b looks at.

Drawn steps are made by your kernels in Triton's interpreter, each address looked at, and compared
with AdamW in fp64; then they are launched on tensors without numbers, where a host that waits for
one is seen, and compiled for an H100.
"""

import functools
import math

import torch

from labs.support.kernels.check_add import COMPILES, LARGE
from labs.support.kernels.traced import (
    LIBRARY,
    Traced,
    dry,
    interpreted,
    once,
    own_memory,
    there,
    wide,
)
from utils.course.expect import Wrong, bitwise_equal, close
from utils.course.trial import Trial, fractions

BESIDE = 8  # numbers that a program may touch besides p, g, m and v


def clipped_adamw(trial: Trial) -> str:
    """Judges `clipped_step` in the file."""
    there()
    trial.by_hand((*LIBRARY, "torch.optim", "clip_grad_norm_", "AdamW"))
    with trial.ranks(1) as group:
        for drawn in _cases(trial):
            group.run(_named(drawn), _values, drawn)
        group.run(f"{LARGE:,} parameters", _code, seconds=COMPILES)
    return (
        "norm, p, m and v equal a reckoning in fp64, clipped and not, for any step and rates, at\n"
        "sizes that no block divides; a norm that is not finite changes nothing; 32 bytes a\n"
        "parameter in two launches, the same bits each time, and the host waits for no number;\n"
        "for an H100 loads and stores have 128 bits."
    )


def _cases(trial: Trial) -> list[dict]:
    """n, the size of the gradient, the norm that is allowed, as a share of it, and the rates."""
    draw = trial.draw
    cases = [
        {"n": draw.randrange(9500, 14_000), "clip": draw.uniform(0.1, 0.5)},
        {"n": 2 ** draw.randrange(8, 12) + 1, "clip": draw.uniform(1.5, 5)},
        {"n": draw.randrange(2, 40), "clip": 0.3, "size": 1e-5},
        {"n": 1, "clip": draw.uniform(0.2, 0.7)},
        {"n": 4096, "clip": draw.uniform(0.3, 0.9), "size": 1e3},
        {"n": draw.randrange(1025, 2000), "clip": 0.5, "bad": math.nan},
        {"n": draw.randrange(20, 1000), "clip": 0.5, "bad": -math.inf},
    ]  # fmt: skip
    rates = [
        {"t": draw.choice((1, 2, draw.randrange(3, 30), 1000)), "lr": draw.uniform(0.01, 0.1),
         "betas": (draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.999)),
         "eps": draw.choice((1e-8, 1e-3, 1e-2)), "weight_decay": draw.uniform(0.05, 0.9)}
        for _ in cases
    ]  # fmt: skip
    rates[0] |= {"t": draw.randrange(2, 9), "eps": 1e-2}
    return [
        {"size": draw.uniform(0.1, 2), "bad": None, **case, "rates": rate, "seed": trial.new_seed()}
        for case, rate in zip(cases, rates)
    ]


def _named(drawn: dict) -> str:
    bad = f", one gradient is {drawn['bad']}" if drawn["bad"] is not None else ""
    return (
        f"{drawn['n']:,} parameters, step {drawn['rates']['t']}, max_norm {drawn['clip']:.2g} of "
        f"the norm{bad}"
    )


def _tensors(drawn: dict, seed: int) -> dict[str, torch.Tensor]:
    n, size = drawn["n"], drawn["size"]
    made = {name: fractions(seed + i, n).float() for i, name in enumerate("pgmv")}
    v = ((made["v"].abs() + 0.3) * size).square()
    made |= {"g": made["g"] * size, "m": made["m"] * size, "v": v}
    if drawn["bad"] is not None:
        made["g"][seed % n] = drawn["bad"]
    return made


def _right(given: dict, max_norm: float, t: int, lr: float, betas, eps: float, weight_decay: float):
    """The contract, in fp64; and how large the terms of p and m are, which may cancel."""
    p, g, m, v = (given[name].double() for name in "pgmv")
    norm = g.square().sum().sqrt()
    if not norm.isfinite():
        return {"norm": norm, "p": p, "m": m, "v": v}, dict.fromkeys("pmv", 0.0)
    g = g * min(1.0, max_norm / (norm.item() + 1e-6))
    terms = betas[0] * m.abs() + (1 - betas[0]) * g.abs()
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g.square()
    root = (v / (1 - betas[1] ** t)).sqrt() + eps
    size = lr / (1 - betas[0] ** t)
    scales = {"p": (p.abs() + size * terms / root).max().item(), "m": terms.max().item(), "v": 0.0}
    p = p * (1 - lr * weight_decay) - size * m / root
    return {"norm": norm, "p": p, "m": m, "v": v}, scales


def _values(answer, drawn: dict) -> None:
    answer, rates, bits, first = interpreted(answer), drawn["rates"], [], None
    for case, other in (("first call", 0), ("the same call again", 0), ("third call", 9)):
        given = _tensors(drawn, drawn["seed"] + other)
        norm = given["g"].double().norm().item()
        max_norm = drawn["clip"] * (norm if math.isfinite(norm) else drawn["size"])
        right, scales = _right(given, max_norm, **rates)
        with Traced(case, **given) as traced:
            found = answer.clipped_step(**given, max_norm=max_norm, **rates)
        close(case, "the norm", found, right["norm"], dtype=torch.float32)
        bad = not math.isfinite(norm)
        hint = "Where the norm is not finite, nothing is to be changed." if bad else ""
        for name in "mvp":
            close(case, name, given[name], right[name], hint=hint, slack=0 if bad else 16,
                  scale=scales[name])  # fmt: skip
        if "g" in traced.changed():
            raise Wrong(f"{case}: g is not what it was before the call.")
        _traffic(case, traced, drawn["n"], bad)
        bits.append([found, *(given[name] for name in "pmv")])
        first = traced if case == "first call" else first
    if kept := first.kept(bits[0][0]):
        raise Wrong(f"After the calls {kept:,} bytes of what the first one made are still held.")
    own_memory("third call", *([results[0]] for results in bits))
    for name, first, second in zip(("the norm", *"pmv"), *bits[:2]):
        if not bitwise_equal(first, second):
            raise Wrong(f"The same call gives other bits of {name} the second time.")


def _traffic(case: str, traced: Traced, n: int, bad: bool) -> None:
    if traced.asked:
        raise Wrong(f"{case}: the host asks for a number (`.item()`, `if`, `float`), and waits.")
    if traced.launches != 2:
        raise Wrong(
            f"{case}: {traced.launches} launches ({', '.join(traced.kernels)}), and two will do."
        )
    if not bad:  # else nothing has to be loaded
        once(case, traced, {"p": 1, "g": 2, "m": 1, "v": 1}, {"p": 1, "m": 1, "v": 1})
    if traced.scratch > BESIDE:
        raise Wrong(
            f"{case}: a program touches {traced.scratch} numbers beside p, g, m and v; {BESIDE} "
            "have to do.\nWho adds up the sums of the programs, and how often?"
        )
    if traced.moved > 2 * n + 2048:
        raise Wrong(
            f"{case}: torch's own operators move {traced.moved:,} bytes beside the kernels, of "
            f"{4 * n:,} that g has.\nWhich of them works on all numbers?"
        )


def _code(answer) -> None:
    answer = interpreted(answer)
    tensors = [torch.empty(LARGE, device="meta") for _ in "pgmv"]
    call = functools.partial(answer.clipped_step, *tensors, 3, 1.0, 0.01)
    wide(dry(2, call, moved=2 * LARGE)[1:], [12 * LARGE])
