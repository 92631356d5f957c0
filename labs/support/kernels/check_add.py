"""Given: what the check cell of exercise 12a looks at.

Drawn vectors of all strides and types are added by your kernel in Triton's interpreter, each
address looked at; then the kernel is compiled for an H100, without one.
"""

import mmap

import torch

from labs.support.kernels.traced import LIBRARY, Traced, dry, interpreted, once, there, wide
from utils.course.expect import Wrong, close
from utils.course.trial import Trial, fractions

TYPES = ("float32", "float16", "int32", "int64")
COMPILES = 120.0  # seconds: a compilation takes 1 to 3, on a busy machine longer
LARGE = 2**24
CALLS = ("first call", "second call")


def add(trial: Trial) -> str:
    """Judges `add` in the file."""
    there()
    trial.by_hand(LIBRARY)
    with trial.ranks(1) as group:
        for drawn in _cases(trial):
            group.run(_named(drawn), _values, drawn)
        group.run(f"three vectors of {LARGE:,} fp32 numbers", _code, seconds=COMPILES)
    return (
        "sums are right for vectors of any stride and four types, at sizes that no block divides,\n"
        "in place, and 2³¹ numbers apart; each number is loaded once and stored once, by one\n"
        "launch, and nothing beside them is touched; for an H100 all loads and stores have 128\n"
        "bits, which is 12 bytes a number."
    )


def _cases(trial: Trial) -> list[dict]:
    """n, the stride of x, y and out, their type, which of them `out` is."""
    draw, large = trial.draw, trial.draw.randrange(66_000, 80_000)
    block = 2 ** draw.randrange(5, 11)
    cases = [
        {"n": large, "strides": (1, 1, 1), "type": "float32"},
        {"n": block + draw.choice((-1, 1)), "strides": (3, 1, 1), "type": "int64"},
        {"n": draw.randrange(40, 400), "strides": (1, 0, draw.randrange(2, 6)), "type": "float16"},
        {"n": 1, "strides": (1, 1, 7), "type": "int32"},
        {"n": draw.randrange(1100, 2000), "type": draw.choice(TYPES), "out": draw.choice("xy"),
         "strides": (draw.randrange(1, 5), draw.randrange(2, 5), 1)},
        {"n": block, "strides": tuple(draw.sample(range(1, 9), 3)), "type": draw.choice(TYPES)},
        {"n": 3, "strides": (2**30 + draw.randrange(9), 1, 2), "type": "int8"},
    ]  # fmt: skip
    return [{"out": "", **case, "seed": trial.new_seed()} for case in cases]


def _named(drawn: dict) -> str:
    x, y, out = drawn["strides"]
    where = f", out is {drawn['out']}" if drawn["out"] else f" and {out}"
    return f"{drawn['n']:,} numbers of {drawn['type']}, strides {x}, {y}{where}"


def _vector(n: int, stride: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Drawn numbers, `stride` apart."""
    values = fractions(seed, n if stride else 1)
    large = min(2.0**40, torch.iinfo(dtype).max / 8) if not dtype.is_floating_point else 1.0
    values = (values * large).clamp(-2 * large, 2 * large).to(dtype)
    if stride * n < 2**20:
        memory = torch.zeros(n * max(stride, 1) + 7, dtype=dtype)
    else:  # addresses only: a page that nobody touches takes no memory
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = torch.frombuffer(mmap.mmap(-1, stride * n, flags=private), dtype=dtype)
    if not stride:
        return values.expand(n)
    vector = memory[3 : 3 + stride * (n - 1) + 1 : stride]
    return vector.copy_(values)


def _values(answer, drawn: dict) -> None:
    answer, dtype = interpreted(answer), getattr(torch, drawn["type"])
    for call in CALLS[: 1 if drawn["n"] > 2**16 else 2]:
        seed = drawn["seed"] + len(call)
        x, y, out = (
            _vector(drawn["n"], stride, dtype, seed + 10 * i)
            for i, stride in enumerate(drawn["strides"])
        )
        given = {"x": x, "y": y, "out": out}
        right = x.double() + y.double() if dtype.is_floating_point else x + y
        if drawn["out"]:
            out = given[drawn["out"]]
            del given["out"]
        with Traced(call, **given) as traced:
            result = answer.add(x, y, out)
        name = drawn["out"] or "out"
        close(call, name, out, right, slack=1)
        once(call, traced, {"x": 1, "y": 1}, {name: 1})
        if result is not None:
            raise Wrong(f"{call}: add returns {type(result).__name__}; the sums belong into out.")
        if traced.launches != 1:
            raise Wrong(f"{call}: {traced.launches} launches, and one is enough.")
        if traced.moved:
            raise Wrong(
                f"{call}: torch's own operators move {traced.moved:,} bytes beside the kernel. Is "
                "there a copy?"
            )
        if traced.largest or traced.scratch:
            raise Wrong(f"{call}: memory is made, or touched, beside the vectors. What is it for?")
        if changed := [other for other in traced.changed() if other != name]:
            raise Wrong(f"{call}: {changed[0]} is not what it was before the call.")


def _code(answer) -> None:
    answer = interpreted(answer)
    vectors = [torch.empty(LARGE, device="meta") for _ in "xyo"]
    wide(dry(1, lambda: answer.add(*vectors)), [4 * LARGE])
