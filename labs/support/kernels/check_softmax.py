"""Given: what the check cell of exercise 12c looks at.

Both halves of your softmax run in Triton's interpreter on drawn rows, each address looked at, and
are compared with PyTorch's in fp64; then they are compiled for an H100.
"""

import gc
import weakref

import torch

from labs.support.kernels.check_add import COMPILES
from labs.support.kernels.interpreter import LIBRARY, interpreted, there
from labs.support.kernels.launched import dry, inside, own, wide
from labs.support.kernels.traced import Traced, once, own_memory
from utils.course.assertions import Wrong, close
from utils.course.runner import Trial, fractions

CALLS = tuple(f"{which} call" for which in ("first", "second", "third", "fourth"))
A_ROW = 8  # numbers that may be kept, or touched, for each row
ROWS = 4096  # of what is compiled
LEAST, LONG = 128, 2**14  # numbers of a row that 128 bits are promised for
NO_SPILL = 2**13  # numbers of a row up to which nothing may spill


def softmax(trial: Trial) -> str:
    """Judges `softmax` in the file."""
    there()
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:
        for drawn in _cases(trial):
            group.run(_named(drawn), _values, drawn)
        rows = 2**31 // LONG + 1000
        group.run(f"{rows:,} rows of {LONG:,} fp16 numbers", _far, rows)
        for rows, d in shapes(trial):
            group.run(f"{rows:,} rows of {d:,} fp32 numbers", _code, rows, d, seconds=COMPILES)
    return (
        "y and dx equal PyTorch's in fp64, in fp32 and fp16, for rows of any length, large\n"
        "numbers, masked places, and gradients whose numbers are not neighbours; forward 8 and\n"
        "backward 12 bytes a number (fp32), one launch each; y alone is kept in between; for an\n"
        "H100 loads and stores of rows from 128 numbers on have 128 bits, and registers suffice."
    )


def shapes(trial: Trial) -> list[tuple[int, int]]:
    """(rows, numbers of a row) that are compiled; once, where many and few rows have one code."""
    lengths = LEAST, 16 * trial.draw.randrange(LEAST // 16 + 1, LONG // 16 + 1), NO_SPILL
    few = 16 * trial.draw.randrange(1, 9)  # an H100 has more SMs
    return [(rows, d) for d in lengths for rows in (ROWS, few)]


def _cases(trial: Trial) -> list[dict]:
    """Shape, type, size of the numbers, scale; last: what the last number of a row is larger by;
    masked: -inf; gradient and x: as they lie, or small; calls: how many."""
    draw = trial.draw
    cases = [
        {"shape": (draw.randrange(3, 9), draw.randrange(65, 500))},
        {"shape": (2, draw.randrange(2, 4), 2 ** draw.randrange(4, 8)), "size": 200.0},
        {"shape": (5, draw.randrange(1030, 1500)), "type": "float16", "size": 30.0},
        {"shape": (draw.randrange(2, 7), 1), "calls": 4},
        {"shape": (4, draw.randrange(20, 60)), "masked": True, "shift": -50.0},
        {"shape": (3, draw.randrange(5, 40)), "gradient": "expanded"},
        {"shape": (draw.randrange(2, 5), draw.randrange(2, 5), draw.randrange(5, 9)),
         "gradient": "turned", "x": "turned"},
        {"shape": (draw.randrange(3000, 5000),), "shift": 120.0, "last": 150.0},
        {"shape": (2, draw.randrange(5000, 7000)), "type": "float16", "gradient": "small",
         "scale": draw.uniform(8000, 9000), "size": 2**-13},
        {"shape": (2, draw.randrange(2**13 + 1, 2**14))},
    ]
    usual = {
        "type": "float32", "size": 3.0, "shift": 0.0, "last": 0.0, "masked": False, "gradient": "",
        "x": "", "calls": 2,
    }
    return [
        {**usual, "scale": draw.uniform(0.3, 1.5), **case, "seed": trial.new_seed()}
        for case in cases
    ]


def _named(drawn: dict) -> str:
    said = [f"x of shape {drawn['shape']} in {drawn['type']}"]
    said += ["with -inf"] * drawn["masked"]
    said += [f"around {drawn['shift']:.0f}"] * bool(drawn["shift"])
    said += [f"its last number larger by {drawn['last']:.0f}"] * bool(drawn["last"])
    if drawn["gradient"]:
        small = drawn["gradient"] == "small"
        said += [f"dy {drawn['gradient']}{', strides of dy not its own' * (not small)}"]
    return ", ".join(said)


def _given(drawn: dict, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = drawn["shape"], getattr(torch, drawn["type"])
    x = fractions(seed, *shape) * drawn["size"] + drawn["shift"] / drawn["scale"]
    x[..., -1] += drawn["last"] / drawn["scale"]
    if drawn["masked"]:
        x[fractions(seed + 1, *shape) > 0.4] = -torch.inf
        x[0] = -torch.inf  # a whole row
    dy = fractions(seed + 2, *shape)
    if drawn["gradient"] == "small":  # y · dy is nothing in fp16, and dx is something
        dy = (1 + dy / 8) * 1e-4
    x, dy = x.to(dtype), dy.to(dtype)
    if drawn["x"]:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    if drawn["gradient"] == "turned":
        dy = dy.transpose(0, -1).contiguous().transpose(0, -1)
    if drawn["gradient"] == "expanded":
        dy = dy[..., :1].expand(shape)
        x[..., 0] += 1  # a constant dy has dx = 0: so dy differs from row to row only
    return x, dy


def _values(answer, drawn: dict) -> None:
    """All forward halves come before the first backward half."""
    answer, results, backward_halves = interpreted(answer), [], []
    for call in CALLS[: drawn["calls"]]:
        leaf, dy = _given(drawn, drawn["seed"] + len(backward_halves))
        scale = drawn["scale"] * 1.25 ** len(backward_halves)
        backward_halves.append(_forward(answer, call, leaf.requires_grad_(), dy, scale))
    for call, backward_half in zip(CALLS, backward_halves):
        results.append(backward_half())
        own_memory(call, *results)


def _forward(answer, case: str, leaf: torch.Tensor, dy: torch.Tensor, scale: float):
    """Judges the forward half. Returns what judges the backward half."""
    exact = leaf.detach().double().requires_grad_()
    right = torch.softmax(exact * scale, -1)
    right.backward(dy.double())
    exponent = (exact.detach() * scale).nan_to_num(neginf=0.0).abs().max().item()
    dtype, rows = leaf.dtype, leaf[..., 0].numel()
    slack = 3 if dtype == torch.float16 else 32 + 4 * exponent  # its rounding is e's
    x = leaf.clone()
    with Traced(case, x=x) as forward:
        y = answer.softmax(x, scale)
    close(case, "y", y, right, dtype=dtype, slack=slack, hint=forward.hint(y, right))
    neighbours = x.is_contiguous()
    forward.name(y=y)
    _traffic(f"{case}, forward half", forward, {"x": 1} if neighbours else {"y": 0}, {"y": 1}, x)
    forward.as_stored(y=y)
    if not y.requires_grad:
        raise Wrong(f"{case}: y does not know how it was made: no gradient comes back.")
    if forward.changed():
        raise Wrong(f"{case}: x is not what it was before the call.")
    kept_x, allowed = weakref.ref(x.untyped_storage()), 4 * A_ROW * rows
    del x
    forward.let_go()
    held = forward.kept(y, allowed=allowed)
    if held > allowed or (kept_x() is not None and gc.collect() and kept_x() is not None):
        what = f"{held:,} bytes" if held > allowed else "the memory of x"
        raise Wrong(
            f"{case}: {what} beside y's {y.nbytes:,} bytes: so much is held when the forward half "
            "has ended, and waits for the backward half. What does the formula of dx need?"
        )

    def backward_half() -> list[torch.Tensor]:
        """[y, dx]"""
        with Traced(case, y=y, dy=dy) as backward:
            (dx,) = torch.autograd.grad(y, leaf, dy, allow_unused=True)
        large = (right * dy.double()).nan_to_num().abs().max().item() * scale
        close(case, "dx", dx, exact.grad, dtype=dtype, slack=slack, scale=large)
        backward.name(dx=dx)
        loads = {"y": 1} | ({"dy": 1} if dy.is_contiguous() else {})
        _traffic(f"{case}, backward half", backward, loads, {"dx": 1}, dy)
        backward.as_stored(dx=dx)
        for name in backward.changed():
            raise Wrong(f"{case}: {name} is not what it was before the call.")
        backward.let_go()
        held = forward.kept(y, dx) + backward.kept(y, dx)
        if held > allowed:
            raise Wrong(f"{case}: after both halves {held:,} bytes of what was made are held.")
        return [y.detach(), dx]

    return backward_half


def _traffic(case: str, traced: Traced, loads: dict, stores: dict, given: torch.Tensor) -> None:
    if traced.launches != 1:
        raise Wrong(f"{case}: {traced.launches} launches, and one is enough.")
    rows = given[..., 0].numel()
    if given.is_contiguous():
        once(case, traced, loads, stores)
        if (beside := traced.beside()) > A_ROW * rows:
            raise Wrong(
                f"{case}: {beside:,} loads and stores go to other tensors. What is read that need "
                "not be?"
            )
    copied = 0 if given.is_contiguous() else 2 * given.numel() * given.element_size()
    if traced.moved > copied + 8 * 4 * rows:
        raise Wrong(
            f"{case}: torch's own operators move {traced.moved:,} bytes beside the kernel. Which "
            "of them is one pass more?"
        )


def _launches(answer, rows: int, d: int, dtype: torch.dtype) -> list:
    """Of both halves."""
    x, dy = (torch.empty(rows, d, device="meta", dtype=dtype) for _ in range(2))
    answer, x = interpreted(answer), x.requires_grad_()

    def both():
        y = answer.softmax(x, 0.5)
        (dx,) = torch.autograd.grad(y, x, dy)
        own({"y": y}, {"x": x})
        own({"dx": dx}, {"x": x, "y": y, "dy": dy})

    return dry(2, both, moved=4 * A_ROW * rows)


def _far(answer, rows: int) -> None:
    inside(_launches(answer, rows, LONG, torch.float16))


def _code(answer, rows: int, d: int) -> None:
    wide(_launches(answer, rows, d, torch.float32), [4 * rows * d] * 2, spills=d > NO_SPILL)
