"""Given: what the check cell of exercise 12a looks at.

Drawn vectors of all strides and types are added by your kernel in Triton's interpreter, each
address looked at; then the kernel is compiled for an H100, without one.
"""

import mmap

import torch

from labs.support.kernels.interpreter import LIBRARY, interpreted, there
from labs.support.kernels.launched import dry, inside, wide
from labs.support.kernels.traced import Traced, once
from utils.course.assertions import Wrong, close
from utils.course.runner import Trial, fractions

TYPES = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8")
COMPILES = 120.0  # seconds: a compilation takes 1 to 3, on a busy machine longer
LARGE = 2**24
HUGE = 2**31 + 2**20 + 5  # numbers
CALLS = ("first call", "second call")
ZEROS = (1, 0), (0, 0), (0, 1)  # strides of x and y


def add(trial: Trial) -> str:
    """Judges `add` in the file."""
    there()
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:
        for drawn in _cases(trial):
            group.run(_named(drawn), _values, drawn)
        group.run(f"three vectors of {HUGE:,} fp32 numbers", _host, HUGE)
        group.run(f"three vectors of {LARGE:,} fp32 numbers", _host, LARGE)
        group.run(f"three vectors of {LARGE:,} fp32 numbers", _code, seconds=COMPILES)
    return (
        "sums are right for vectors of any stride and eight types, at sizes that no block\n"
        "divides, in place, and 2³¹ numbers apart, with infinities and NaN; each number is loaded\n"
        "once and stored once, by one launch, and nothing beside them is touched, also where more\n"
        "than 2³¹ are neighbours; for an H100 all loads and stores have 128 bits, which is 12\n"
        "bytes a number."
    )


def _cases(trial: Trial) -> list[dict]:
    """n, the stride of x, y and out, their type, which of them `out` is. Each type is drawn once;
    the strides go round from call to call."""
    draw, large = trial.draw, trial.draw.randrange(66_000, 80_000)
    block = 2 ** draw.randrange(5, 11)
    types = draw.sample(TYPES[:-1], len(TYPES) - 1)
    cases = [
        {"n": large, "strides": (1, 1, 1)},
        {"n": block + draw.choice((-1, 1)), "strides": (3, 1, 1)},
        {"n": draw.randrange(40, 400), "strides": (1, 0, draw.randrange(2, 6))},
        {"n": 1, "strides": (1, 1, 7)},
        {"n": draw.randrange(1100, 2000), "out": draw.choice("xy"),
         "strides": (draw.randrange(1, 5), draw.randrange(2, 5), 1)},
        {"n": block, "strides": tuple(draw.sample(range(1, 9), 3))},
        {"n": draw.randrange(200, 900), "strides": (1, 2, 1)},
        {"n": 3, "strides": (2**30 + draw.randrange(9), 1, 2), "type": TYPES[-1]},
    ]
    return [
        {"out": "", "type": kind, **case, "seed": trial.new_seed()}
        for case, kind in zip(cases, [*types, ""])
    ]


def _named(drawn: dict) -> str:
    x, y, out = drawn["strides"]
    where = f", out is {drawn['out']}" if drawn["out"] else f" and {out}"
    return f"{drawn['n']:,} numbers of {drawn['type']}, strides {x}, {y}{where}"


def _memory(n: int, stride: int, dtype: torch.dtype) -> torch.Tensor:
    """Room for n numbers that lie so far apart."""
    if stride * n < 2**20:
        return torch.zeros(n * max(stride, 1) + 7, dtype=dtype)
    # addresses only: a page that nobody touches takes no memory
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, stride * n + 7, flags=private), dtype=dtype)


def _vector(memory: torch.Tensor, n: int, stride: int, seed: int) -> torch.Tensor:
    """Drawn numbers of all sizes that a type has, `stride` apart, from a quarter of its range; some
    floats are no numbers, or infinite."""
    if memory.dtype.is_floating_point:
        values = fractions(seed, n if stride else 1).to(memory.dtype)
        if len(values) > 9:
            values[seed % 7 :: 31], values[seed % 5 :: 37] = torch.inf, -torch.inf
            values[seed % 9 :: 41] = torch.nan
    else:
        top = torch.iinfo(memory.dtype).max // 4
        low = -top if memory.dtype.is_signed else 0
        generator = torch.Generator().manual_seed(seed)
        shape = (n if stride else 1,)
        values = torch.randint(low, top, shape, generator=generator, dtype=memory.dtype)
    if not stride:
        memory[3] = values[0]
        return memory[3:4].expand(n)
    return memory[3 : 3 + stride * (n - 1) + 1 : stride].copy_(values)


def _values(answer, drawn: dict) -> None:
    answer, dtype = interpreted(answer), getattr(torch, drawn["type"])
    n, strides = drawn["n"], drawn["strides"]
    memories = [_memory(n, max(strides), dtype) for _ in strides]
    calls = CALLS[:1] if n > 2**16 else (*CALLS, "third call")
    for i, call in enumerate(calls):
        turned = strides[i:] + strides[:i]
        if 0 in strides:  # out cannot have it
            turned = (*ZEROS[i], strides[2])
        x, y, out = (
            _vector(memory, n, stride, drawn["seed"] + 10 * i + j)
            for j, (memory, stride) in enumerate(zip(memories, turned))
        )
        given = {"x": x, "y": y, "out": out}
        right = x.double() + y.double() if dtype.is_floating_point else x + y
        if drawn["out"]:
            out = given[drawn["out"]]
            del given["out"]
        with Traced(call, **given) as traced:
            result = answer.add(x, y, out)
        name = drawn["out"] or "out"
        left_out = any(traced.launches and not all(traced.counts(n)[0].ravel()) for n in "xy")
        hint = "The mask says how many numbers there are, a stride how far apart they lie."
        once(call, traced, {"x": 1, "y": 1}, {name: 1}, hint=hint * left_out)
        close(call, name, out, right, slack=1)
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


def _launched(answer, n: int) -> list:
    """The launch for n fp32 numbers that are neighbours."""
    vectors = [torch.empty(n, device="meta") for _ in "xyo"]
    launches = dry(1, lambda: interpreted(answer).add(*vectors))
    inside(launches, loads=2)
    return launches


def _host(answer, n: int) -> None:
    _launched(answer, n)


def _code(answer) -> None:
    wide(_launched(answer, LARGE), [4 * LARGE])
