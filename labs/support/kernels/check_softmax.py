"""Given: what the check cell of exercise 12c looks at.

Both halves of your softmax run in Triton's interpreter on drawn rows, each address looked at, and
are compared with PyTorch's in fp64; then they are compiled for an H100.
"""

import torch

from labs.support.kernels.check_add import CALLS, COMPILES
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
from utils.course.expect import Wrong, close
from utils.course.trial import Trial, fractions
from utils.measure.traffic import tensors_in

A_ROW = 8  # numbers that may be kept, or touched, for each row
ROWS, LONG = 2048, 4096  # of what is compiled


def softmax(trial: Trial) -> str:
    """Judges `softmax` in the file."""
    there()
    trial.by_hand(LIBRARY)
    with trial.ranks(1) as group:
        for drawn in _cases(trial):
            group.run(_named(drawn), _values, drawn)
        group.run(f"{ROWS:,} rows of {LONG:,} fp32 numbers", _code, seconds=COMPILES)
    return (
        "y and dx equal PyTorch's in fp64, in fp32 and fp16, for rows of any length, large\n"
        "numbers, masked places, and gradients whose numbers are not neighbours; forward 8 and\n"
        "backward 12 bytes a number (fp32), one launch each; y alone is kept in between; for an\n"
        "H100 loads and stores have 128 bits."
    )


def _cases(trial: Trial) -> list[dict]:
    """Shape, type, size of the numbers, scale; masked: -inf; gradient and x: as they lie."""
    draw = trial.draw
    cases = [
        {"shape": (draw.randrange(3, 9), draw.randrange(65, 500))},
        {"shape": (2, draw.randrange(2, 4), 2 ** draw.randrange(4, 8)), "size": 200.0},
        {"shape": (5, draw.randrange(1030, 1500)), "type": "float16", "size": 30.0},
        {"shape": (draw.randrange(2, 7), 1)},
        {"shape": (4, draw.randrange(20, 60)), "masked": True, "shift": -50.0},
        {"shape": (3, draw.randrange(5, 40)), "gradient": "expanded"},
        {"shape": (draw.randrange(4, 9), draw.randrange(4, 9)), "gradient": "turned",
         "x": "turned"},
        {"shape": (draw.randrange(300, 400),), "shift": 120.0},
        {"shape": (2, draw.randrange(2**13 + 1, 2**14))},
    ]  # fmt: skip
    usual = {
        "type": "float32", "size": 3.0, "shift": 0.0, "masked": False, "gradient": "", "x": "",
    }  # fmt: skip
    return [
        {**usual, **case, "scale": draw.uniform(0.3, 1.5), "seed": trial.new_seed()}
        for case in cases
    ]


def _named(drawn: dict) -> str:
    said = [f"x of shape {drawn['shape']} in {drawn['type']}"]
    said += ["with -inf"] * drawn["masked"]
    said += [f"around {drawn['shift']:.0f}"] * bool(drawn["shift"])
    said += [f"dy {drawn['gradient']}, strides of dy not its own"] * bool(drawn["gradient"])
    return ", ".join(said)


def _given(drawn: dict, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape, dtype = drawn["shape"], getattr(torch, drawn["type"])
    x = fractions(seed, *shape) * drawn["size"] + drawn["shift"] / drawn["scale"]
    if drawn["masked"]:
        x[fractions(seed + 1, *shape) > 0.4] = -torch.inf
        x[0] = -torch.inf  # a whole row
    x, dy = x.to(dtype), fractions(seed + 2, *shape).to(dtype)
    if drawn["x"]:
        x = x.t().contiguous().t()
    if drawn["gradient"] == "turned":
        dy = dy.t().contiguous().t()
    if drawn["gradient"] == "expanded":
        dy = dy[..., :1].expand(shape)
        x[..., 0] += 1  # a constant dy has dx = 0: so dy differs from row to row only
    return x, dy


def _values(answer, drawn: dict) -> None:
    answer, results = interpreted(answer), []
    for case in CALLS:
        x, dy = _given(drawn, drawn["seed"] + len(case))
        scale = drawn["scale"] * (1 if case == CALLS[0] else 1.25)
        exact = x.double().requires_grad_()
        right = torch.softmax(exact * scale, -1)
        right.backward(dy.double())
        exponent = (exact.detach() * scale).nan_to_num(neginf=0.0).abs().max().item()
        slack = 3 if x.dtype == torch.float16 else 32 + 4 * exponent  # its rounding is e's
        x.requires_grad_()
        with Traced(case, x=x) as forward:
            y = answer.softmax(x, scale)
        close(case, "y", y, right, dtype=x.dtype, slack=slack)
        neighbours = x.is_contiguous()
        forward.name(y=y)
        _traffic(
            f"{case}, forward half", forward, {"x": 1} if neighbours else {"y": 0}, {"y": 1}, x
        )
        if not y.requires_grad:
            raise Wrong(f"{case}: y does not know how it was made: no gradient comes back.")
        _kept(case, y)
        with Traced(case, y=y, dy=dy) as backward:
            (dx,) = torch.autograd.grad(y, x, dy, allow_unused=True)
        large = (right * dy.double()).nan_to_num().abs().max().item() * scale
        close(case, "dx", dx, exact.grad, dtype=x.dtype, slack=slack, scale=large)
        backward.name(dx=dx)
        loads = {"y": 1} | ({"dy": 1} if dy.is_contiguous() else {})
        _traffic(f"{case}, backward half", backward, loads, {"dx": 1}, dy)
        for name, look in (("x", forward), ("y", backward), ("dy", backward)):
            if name in look.changed():
                raise Wrong(f"{case}: {name} is not what it was before the call.")
        results.append([y.detach(), dx])
        own_memory(case, *results)
        held = forward.kept(y, dx) + backward.kept(y, dx)
        del forward, backward
        if held > 4 * A_ROW * y[..., 0].numel():
            raise Wrong(f"{case}: after both halves {held:,} bytes of what was made are held.")


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


def _kept(case: str, y: torch.Tensor) -> None:
    """What waits for the backward half."""
    node = y.grad_fn
    saved = list(tensors_in([list(getattr(node, "saved_tensors", ())), vars(node)]))
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    allowed = y.nbytes + 4 * A_ROW * y[..., 0].numel()
    if sum(held.values()) > allowed:
        raise Wrong(
            f"{case}: {sum(held.values()):,} bytes wait for the backward half, and y has "
            f"{y.nbytes:,}. What does the formula of dx need?"
        )


def _code(answer) -> None:
    answer = interpreted(answer)
    x = torch.empty(ROWS, LONG, device="meta", requires_grad=True)

    def both():
        torch.autograd.grad(answer.softmax(x, 0.5), x, torch.empty(ROWS, LONG, device="meta"))

    wide(dry(2, both, moved=8 * 4 * ROWS), [4 * ROWS * LONG] * 2)
