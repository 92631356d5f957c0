"""Given: what the check cell of exercise 12b looks at.

Drawn steps are made by your kernels in Triton's interpreter, each address looked at, and compared
with AdamW in fp64; then they are launched on tensors without numbers, where a host that waits for
one is seen, and compiled for an H100.
"""

import functools
import math

import torch

from labs.support.kernels.check_add import COMPILES, HUGE, LARGE
from labs.support.kernels.interpreter import LIBRARY, counted, interpreted, there
from labs.support.kernels.launched import dry, inside, wide
from labs.support.kernels.traced import Traced, once, own_memory
from utils.course.assertions import Wrong, bitwise_equal, close
from utils.course.runner import Trial, fractions

BESIDE = 8  # numbers that a program may touch besides p, g, m and v
MANY = 2**15
TRIES = 12  # gradients whose norm is asked for twice


def clipped_adamw(trial: Trial) -> str:
    """Judges `clipped_step` in the file."""
    there()
    trial.forbid((*LIBRARY, "torch.optim", "clip_grad_norm_", "AdamW"))
    with trial.ranks(1) as group:
        for drawn in _cases(trial):
            group.run(_named(drawn), _values, drawn)
        n = trial.draw.randrange(5000, 6000)
        group.run(f"{n:,} parameters", _same_bits, n, trial.new_seed())
        group.run(f"{HUGE:,} parameters", _host, HUGE)
        group.run(f"{LARGE:,} parameters", _host, LARGE)
        group.run(f"{LARGE:,} parameters", _code, seconds=COMPILES)
    return (
        "norm, p, m and v equal a reckoning in fp64, clipped and not, for any step and rates,\n"
        "gradients that are 0 too, at sizes that no block divides; a norm that is not finite\n"
        "changes nothing; 32 bytes a parameter in two launches, the same bits each time wherever\n"
        "the tensors lie, and the host waits for no number; for an H100 loads and stores of both\n"
        "launches have 128 bits."
    )


def _cases(trial: Trial) -> list[dict]:
    """n, the size of the gradient, the norm that is allowed, as a share of it, and the rates."""
    draw = trial.draw
    cases = [
        {"n": draw.randrange(36_000, 44_000), "clip": draw.uniform(0.1, 0.5)},
        {"n": 2 ** draw.randrange(8, 12) + 1, "clip": draw.uniform(1.5, 5)},
        {"n": draw.randrange(2, 40), "clip": 0.3, "size": 1e-5},
        {"n": 1, "clip": draw.uniform(0.2, 0.7)},
        {"n": 4096, "clip": draw.uniform(0.3, 0.9), "size": 1e3},
        {"n": draw.randrange(1025, 2000), "clip": 0.5, "bad": math.nan},
        {"n": draw.randrange(20, 1000), "clip": 0.5, "bad": -math.inf},
        {"n": draw.randrange(20, 1000), "clip": 0.5, "zero": True},
    ]
    rates = [
        {"t": draw.choice((1, 2, draw.randrange(3, 30), 1000)), "lr": draw.uniform(0.01, 0.1),
         "betas": (draw.uniform(0.5, 0.95), draw.uniform(0.8, 0.999)),
         "eps": draw.choice((1e-8, 1e-3, 1e-2)), "weight_decay": draw.uniform(0.05, 0.9)}
        for _ in cases
    ]
    rates[0] |= {"t": draw.randrange(2, 9), "eps": 1e-2}
    late = draw.randrange(30_000, 100_000)
    rates[1] |= {"t": late, "betas": (0.9, 1 - 1 / late)}  # each t has another β2^t
    return [
        {
            "size": draw.uniform(0.1, 2),
            "bad": None,
            "zero": False,
            **case,
            "rates": rate,
            "seed": trial.new_seed(),
        }
        for case, rate in zip(cases, rates)
    ]


def _named(drawn: dict) -> str:
    bad = f", one gradient is {drawn['bad']}" if drawn["bad"] is not None else ""
    bad += ", all gradients are 0" * drawn["zero"]
    return (
        f"{drawn['n']:,} parameters, step {drawn['rates']['t']}, max_norm {drawn['clip']:.2g} of "
        f"the norm{bad}"
    )


def _tensors(drawn: dict, seed: int, offset: int) -> dict[str, torch.Tensor]:
    """p, g, m and v, `offset` numbers behind where memory begins. Some gradients are 0, and some
    parameters have never had another."""
    n, size = drawn["n"], drawn["size"]
    made = {name: fractions(seed + i, n).float() for i, name in enumerate("pgmv")}
    v = ((made["v"].abs() + 0.3) * size).square()
    made |= {"g": made["g"] * size, "m": made["m"] * size, "v": v}
    made["g"][3::5] = made["m"][3::10] = made["v"][3::10] = 0.0
    if drawn["zero"]:
        made["g"].zero_()
    if drawn["bad"] is not None:
        made["g"][seed % n] = drawn["bad"]
    return {name: torch.cat([t.new_zeros(offset), t])[offset:] for name, t in made.items()}


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
    """Four calls: the same twice, at other places; other numbers, at the same rates; other rates,
    at the same t."""
    answer, rates, bits, first = interpreted(answer), drawn["rates"], [], None
    other = rates | {"lr": 3 * rates["lr"], "betas": (0.6, 0.7), "weight_decay": 0.3}
    calls = [
        ("first call", drawn, 0, 0, rates), ("the same call, g elsewhere", drawn, 0, 4, rates),
        ("third call", drawn | {"bad": None, "zero": False}, 9, 0, rates),
        ("the same t, other rates", drawn, 5, 0, other),
    ]
    norm = _tensors(drawn, drawn["seed"], 0)["g"].double().norm().item()
    max_norm = drawn["clip"] * (norm if 0 < norm < math.inf else drawn["size"])
    for case, draw, more, offset, rates in calls[: 2 if drawn["n"] > MANY else 4]:
        given = _tensors(draw, drawn["seed"] + more, offset)
        right, scales = _right(given, max_norm, **rates)
        with Traced(case, **given) as traced:
            found = answer.clipped_step(**given, max_norm=max_norm, **rates)
        _launches(case, traced, drawn["n"])
        hint = traced.hint(found, right["norm"])
        close(case, "the norm", found, right["norm"], dtype=torch.float32, hint=hint)
        bad = not math.isfinite(right["norm"])
        hint = "Where the norm is not finite, nothing is to be changed." if bad else ""
        for name in "mvp":
            close(case, name, given[name], right[name], hint=hint, slack=0 if bad else 16,
                  scale=scales[name])
        if "g" in traced.changed():
            raise Wrong(f"{case}: g is not what it was before the call.")
        _traffic(case, traced, drawn["n"], bad)
        bits.append([found, *(given[name] for name in "pmv")])
        first = first or traced
        if case == "third call" and traced.numbers != first.numbers:
            raise Wrong(
                "Two calls differ in their tensors only, and kernels get other numbers from the "
                "host: does it\nknow anything of the gradient? That would have to wait for it."
            )
    if kept := first.kept(bits[0][0]):
        raise Wrong(f"After the calls {kept:,} bytes of what the first one made are still held.")
    own_memory("the last call", *([results[0]] for results in bits))
    _compare(*bits[:2])


def _same_bits(answer, n: int, seed: int) -> None:
    """Sums in another order often have the same bits, by luck, so it is tried with many g. With one
    large square each addition to it rounds; just above 2·4ᵏ a sum has the coarsest digits, and its
    root the finest."""
    answer, drawn = interpreted(answer), {"n": n, "size": 0.0024, "zero": False, "bad": None}
    for i in range(TRIES):
        found = []
        for offset in (0, 4):
            given = _tensors(drawn, seed + 9 * i, offset)
            given["g"][0] = 91.0
            with Traced("the same call, g elsewhere", **given):
                norm = answer.clipped_step(**given, t=3, max_norm=9.0, lr=0.01)
            found.append([norm, *(given[name] for name in "pmv")])
        _compare(*found)


def _compare(*calls: list[torch.Tensor]) -> None:
    for name, first, second in zip(("the norm", *"pmv"), *calls):
        if not bitwise_equal(first, second):
            raise Wrong(
                f"The same call gives other bits of {name} the second time, where p, g, m and v "
                "lie elsewhere."
            )


def _launches(case: str, traced: Traced, n: int) -> None:
    if traced.moved > 2 * n + 2048:
        raise Wrong(
            f"{case}: torch's own operators move {traced.moved:,} bytes beside the kernels, of "
            f"{4 * n:,} that g has.\nWhich of them works on all numbers?"
        )
    if traced.launches != 2:
        made = f"{counted(traced.launches, 'launch')} ({', '.join(traced.kernels)})"
        raise Wrong(f"{case}: {made}, and two are right.")


def _traffic(case: str, traced: Traced, n: int, bad: bool) -> None:
    if not bad:  # else nothing has to be loaded
        once(case, traced, {"p": 1, "g": 2, "m": 1, "v": 1}, {"p": 1, "m": 1, "v": 1})
    if traced.scratch > BESIDE:
        raise Wrong(
            f"{case}: a program touches {traced.scratch} numbers beside p, g, m and v; {BESIDE} "
            "have to do.\nWho adds up the sums of the programs, and how often?"
        )


def _launched(answer, n: int) -> list:
    """Both launches for n parameters."""
    answer = interpreted(answer)
    tensors = [torch.empty(n, device="meta") for _ in "pgmv"]
    call = functools.partial(answer.clipped_step, *tensors, 3, 1.0, 0.01)
    launches = dry(2, call, moved=2 * n)
    inside(launches)
    return launches


def _host(answer, n: int) -> None:
    _launched(answer, n)


def _code(answer) -> None:
    wide(_launched(answer, LARGE), [0, 12 * LARGE])
