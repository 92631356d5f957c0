"""Given: what the check cell of exercise 12d looks at, and how it counts.

Your kernel runs in Triton's interpreter on drawn rows; bytes are counted address by address. Then
it is compiled for an H100.
"""

from pathlib import Path

import torch

from labs.support.kernels.check_add import COMPILES
from labs.support.kernels.check_softmax import CALLS, LONG, NO_SPILL, ROWS, shapes
from labs.support.kernels.interpreter import LIBRARY, interpreted, there
from labs.support.kernels.launched import dry, inside, own, wide
from labs.support.kernels.traced import Traced, own_memory
from utils.course.assertions import Wrong, close
from utils.course.runner import Trial, fractions

GOAL = 18.0  # bytes a number
SMS = 132  # of an H100
MANY = 3 * SMS  # rows that are counted
WALK = 10**4  # loads and stores of the last program that are looked at: it walks to far rows
LEAST = 16 + 4 * SMS / MANY  # bytes a number: each program needs the weight once


def fused_norm(trial: Trial) -> str:
    """Judges `add_norm` in the file, by its bytes."""
    there()
    trial.forbid((*LIBRARY, "rms_norm"))
    with trial.ranks(1) as group:
        for drawn in _cases(trial):
            rows = drawn["rows"]
            case = f"{rows:,} rows of {drawn['d']:,}"
            found = group.run(case, _values, drawn, seconds=COMPILES if rows == MANY else None)[0]
        if found > GOAL:
            raise Wrong(
                f"values are right, and {case} take {found:.2f} bytes a number; the goal is "
                f"{GOAL:g}.\nA row for each program takes 20. Which of its loads is the same in "
                "all programs?"
            )
        rows = 2**31 // LONG + 1000
        group.run(f"{rows:,} rows of {LONG:,}", _far, rows)
        for rows, d in shapes(trial):
            group.run(f"{rows:,} rows of {d:,}", _code, rows, d, seconds=COMPILES)
    return (
        f"y and h are right for rows of any length, and {MANY} rows take {found:.2f} bytes a "
        f"number\n(the goal was {GOAL:g}), with a program for each of {SMS} SMs; for an H100 loads "
        "and stores of\nrows from 128 numbers on have 128 bits, and registers suffice."
    )


def count(path: str | Path, d: int = 96) -> float:
    """Bytes a number of the answer in the file, for MANY rows of d."""
    drawn = {"rows": MANY, "d": d, "eps": 1e-5, "seed": 0, "large": 1.0, "calls": 1, "nan": False}
    return Trial(path).alone(f"{MANY} rows", _values, drawn, seconds=COMPILES)


def code(path: str | Path) -> dict:
    """What an H100 would execute for 4,096 rows of 4,096 numbers."""
    return Trial(path).alone("an H100", _code, ROWS, 4096, seconds=COMPILES)


def _cases(trial: Trial) -> list[dict]:
    draw = trial.draw
    sizes = [  # the rows that are counted come last
        (draw.randrange(2, 9), draw.randrange(65, 500)), (draw.randrange(SMS + 1, SMS + 20), 1),
        (1, draw.randrange(2**13 + 1, 2**14)), (draw.randrange(2, 9), 2 ** draw.randrange(3, 9)),
        (draw.randrange(MANY + 5, 600), draw.randrange(5, 40)), (MANY, draw.randrange(65, 99)),
    ]
    cases = [
        {"rows": rows, "d": d, "calls": 1 if rows > SMS else 2, "nan": False,
         "eps": draw.choice((1e-5, 1e-2, 0.3)), "large": draw.choice((0.1, 1.0, 30.0)),
         "seed": trial.new_seed()}
        for rows, d in sizes
    ]
    cases[0] |= {"eps": draw.uniform(0.2, 0.4), "large": 0.3, "calls": 4}
    cases[-2] |= {"nan": True}
    return cases


def _values(answer, drawn: dict) -> float:
    """Bytes a number."""
    answer, (rows, d), calls = interpreted(answer), (drawn["rows"], drawn["d"]), []
    for case in CALLS[: drawn["calls"]]:
        seed, eps = drawn["seed"] + 3 * len(calls), drawn["eps"] * (1 + len(calls))
        new, residual = (fractions(seed + i, rows, d).float() * drawn["large"] for i in (0, 1))
        if len(calls) % 2 == 0:  # two calls have one x
            x = new
        weight = fractions(seed + 2, d).float()
        if drawn["nan"]:  # one of the two has a later row in its program
            x[[seed % SMS, seed % SMS + 2], seed % d] = torch.nan
        right = x.double() + residual.double()
        with Traced(case, x=x, residual=residual, weight=weight) as traced:
            results = answer.add_norm(x, residual, weight, eps)
        if not isinstance(results, tuple | list) or len(results) != 2:
            raise Wrong(f"{case}: add_norm returns {type(results).__name__}, not (y, h).")
        y, h = results
        close(case, "h", h, right, dtype=torch.float32)
        scale = (right.square().mean(-1, keepdim=True) + eps).sqrt()
        right = right / scale * weight
        close(case, "y", y, right, dtype=torch.float32, hint=traced.hint(y, right))
        if changed := traced.changed():
            raise Wrong(f"{case}: {changed[0]} is not what it was before the call.")
        if traced.launches != 1:
            raise Wrong(f"{case}: {traced.launches} launches, and one is enough.")
        traced.as_stored(y=y, h=h)
        _enough(case, traced.programs, rows)
        calls.append([y, h])
        own_memory(case, *calls)
        kept = traced.kept(y, h)
        if kept:
            raise Wrong(f"{case}: after the call {kept:,} bytes of what was made are still held.")
    found = (traced.traffic + traced.moved) / (rows * d)
    if rows == MANY and found < LEAST:
        raise Wrong(
            f"{found:.2f} bytes a number, and with {SMS} programs {LEAST:.2f} are the least: some "
            "numbers come or go on a way that is not counted."
        )
    return found


def _enough(case: str, programs: int, rows: int) -> None:
    if programs < min(rows, SMS):
        raise Wrong(
            f"{case}: {programs} programs have a row, and an H100 has {SMS} SMs: some of them have "
            "nothing to do."
        )


def _launch(answer, rows: int, d: int) -> list:
    answer = interpreted(answer)
    x, residual = (torch.empty(rows, d, device="meta") for _ in range(2))
    weight = torch.empty(d, device="meta")

    def call():
        y, h = answer.add_norm(x, residual, weight, 1e-5)
        own({"y": y, "h": h}, {"x": x, "residual": residual})

    launches = dry(1, call)
    _enough(f"{rows:,} rows", launches[0].programs, rows)
    return launches


def _far(answer, rows: int) -> None:
    inside(_launch(answer, rows, LONG), WALK)


def _code(answer, rows: int, d: int) -> dict:
    (code,) = wide(_launch(answer, rows, d), [8 * rows * d], spills=d > NO_SPILL)
    from utils.kernels import occupancy

    held = occupancy(code)
    return {
        "registers": code.registers, "warps": code.threads // 32, "programs an SM": held.programs,
        "occupancy": held.share, "loads": code.loads, "stores": code.stores,
    }
