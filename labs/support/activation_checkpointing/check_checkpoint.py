"""Given: what the check cell of exercise 04a looks at.

Chains of layers of drawn sizes run as they are, and through your `checkpoint` from the same random
numbers: gradients, how often the layers run and in which half, what is kept, and what follows.
"""

import contextlib
from dataclasses import dataclass, replace

import torch
from torch import nn

from utils.course.assertions import Wrong, close, unchanged
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

LIBRARY = (
    "torch.utils.checkpoint",
    "utils.memory",
    "checkpoint_sequential",
    "fairscale",
    "deepspeed",
)
STATE = 5100  # bytes: the state of the random numbers and a little more


def checkpointing(trial: Trial) -> str:
    """Judges `checkpoint` in the file."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:  # one process: nothing here depends on ranks
        for number, cases in enumerate(_drawn(trial)):
            whole = " beside ".join(map(str, cases))
            for case, (right, found) in zip(cases, group.run(whole, passes, cases)[0]):
                _right_values(case, right, found)
                _right_state(case, right, found)
                _right_work(case, right, found)
                _right_memory(case, found)
                unchanged(str(case), found["changed"])
            if number == 0:
                group.run("an input that is changed in place", changes_noticed)
    return (
        "gradients of inputs and parameters equal those without it, in fp32, fp64 and under\n"
        "autocast, dropout, masks, empty batches and checkpoints in checkpoints included;\n"
        "after the forward pass the layers' inputs are kept and nothing else, after the backward\n"
        "pass nothing; each layer runs once more, there; changes in place are noticed."
    )


@dataclass(frozen=True)
class Case:
    """A plain layer, then `layers` checkpoints. inputs: of each, 1 (x) or 3 (x, mask, other)."""

    shape: tuple[int, ...]  # of x; the last one is the layers' width
    layers: int
    dtype: torch.dtype
    seed: int
    inputs: int = 1
    dropout: float = 0.0
    autocast: torch.dtype | None = None
    shared: bool = False  # the other input is x itself, and functions are methods
    nested: bool = False  # all of them in one checkpoint more

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.layers} checkpoints of {'x, mask and other' if self.inputs > 1 else 'x'}, "
            f"x {self.shape} {kind}"
            + f", dropout {self.dropout}" * (self.dropout > 0)
            + f", forward under autocast to {self.autocast}" * (self.autocast is not None)
            + ", other is x itself" * self.shared
            + ", all inside of another one" * self.nested
        )


def _drawn(trial: Trial) -> list[list[Case]]:
    """Cases by run; those of a run are alive at the same time."""
    draw, single, double = trial.draw, torch.float32, torch.float64

    def case(*shape, layers=None, dtype=double, **more):
        layers = layers or draw.randrange(2, 6)
        return Case(shape, layers, dtype, trial.new_seed(), **more)

    def size():
        return draw.randrange(2, 9)

    def dropout():
        return round(draw.uniform(0.2, 0.7), 2)

    plain = case(size(), size())
    large = case(
        draw.randrange(1800, 2400), draw.randrange(65, 80), dtype=single, inputs=3,
        layers=draw.randrange(17, 21), dropout=dropout(),
    )
    return [
        [plain, replace(plain, dropout=dropout())],
        [large, case(0, size(), inputs=3)],
        [
            case(1, size(), layers=draw.randrange(60, 90), dropout=dropout()),
            case(size(), size(), 1, inputs=3, nested=True, dropout=dropout()),
        ],
        [
            case(size(), 1, size(), dtype=single, inputs=3, dropout=dropout()),
            case(size(), size(), inputs=3, shared=True, dropout=dropout()),
            *[
                case(size(), size(), dtype=single, inputs=3, autocast=to, dropout=dropout())
                for to in draw.sample([torch.bfloat16, torch.float16], 2)
            ],
        ],
    ]


# ---- in a process of its own


class Layer(nn.Module):
    """Linear, twice tanh, dropout; with a mask and another input, times and plus them."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.inside = nn.Sequential(
            nn.Linear(width, width), nn.Tanh(), nn.Tanh(), nn.Dropout(dropout)
        )
        self.runs = 0

    def forward(self, x, mask=None, other=None):
        self.runs += 1
        x = self.inside(x)
        return x if mask is None else x * mask + other


class Chain(nn.Module):
    """The layers of a case; `wrap` makes checkpoints of all but the first."""

    def __init__(self, case: Case):
        super().__init__()
        width, self.nested, self.shared = case.shape[-1], case.nested, case.shared
        torch.manual_seed(case.seed)
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width, case.dropout) for _ in range(case.layers))
        self.to(case.dtype)

    def forward(self, x, more, wrap):
        x = self.first(x)
        if self.nested:
            return wrap(lambda x, *more: self.rest(x, more, wrap), x, *more)
        return self.rest(x, more, wrap)

    def rest(self, x, more, wrap):
        for layer in self.layers:
            if self.shared:
                x = wrap(layer.forward, x, more[0], x)
            else:
                x = wrap(layer, x, *more)
        return x


def passes(answer, cases: list[Case]) -> list[tuple[dict, dict]]:
    """For each case what a pass has without checkpoints and with them; all forward passes first."""
    plain = [backward(forward(plainly, case)) for case in cases]
    begun = [forward(answer.checkpoint, case) for case in cases]
    return list(zip(plain, map(backward, begun)))  # the first one first: not as on a stack


def plainly(function, *inputs):
    return function(*inputs)


def forward(wrap, case: Case) -> list:
    """All that the backward pass needs."""
    chain = Chain(case)
    x = fractions(case.seed, *case.shape, dtype=case.dtype).requires_grad_()
    mask = fractions(case.seed + 1, *case.shape) > 0
    other = fractions(case.seed + 2, *case.shape, dtype=case.dtype).requires_grad_()
    more = (mask, other)[: case.inputs - 1]
    torch.manual_seed(case.seed + 3)
    look = Look(x=x, mask=mask, other=other)
    to = case.autocast or torch.bfloat16
    with look, torch.autocast("cpu", to, enabled=case.autocast is not None):
        y = chain(x, more, wrap)
    if not isinstance(y, torch.Tensor) or not y.requires_grad:
        raise Wrong("the output has no history: does `checkpoint` return Checkpoint.apply(…)?")
    allowed = case.layers * (x.nbytes + STATE)
    kept = 0 if wrap is plainly else look.kept(y, allowed=allowed) - allowed
    found = {
        "kept": kept, "x": x.nbytes,
        "forward runs": [layer.runs for layer in chain.layers], "state": torch.get_rng_state(),
        "forward products": work(look), "mask": mask.requires_grad or mask.grad is not None,
    }
    return [case, chain, x, other, y, look, found]


def backward(run: list) -> dict:
    """Empties `run`, so that nobody else holds its output."""
    case, chain, x, other, y, look, found = run
    run.clear()
    gradient = fractions(case.seed + 4, *y.shape, dtype=y.dtype)
    before = torch.get_rng_state()
    with Look(gradient=gradient) as back:
        try:
            y.backward(gradient)
        except RuntimeError as error:
            if "does not require grad" in str(error):
                raise Wrong(
                    "the recomputed output has no history: inside `backward` gradients are off.\n"
                    "Run the function under torch.enable_grad()."
                ) from None
            raise
    gradients = {name: p.grad for name, p in chain.named_parameters()}
    gradients["x"] = x.grad
    if case.inputs > 1 and not case.shared:
        gradients["other"] = other.grad
    changed = look.changed() + back.changed() + ["mask"] * found.pop("mask")
    found |= {
        "y": y.detach().clone(), "gradients": gradients, "changed": changed,
        "runs": [layer.runs for layer in chain.layers], "products": work(back),
        "peak": back.peak - sum(p.nbytes for p in chain.parameters()),
        "moved": not torch.equal(before, torch.get_rng_state()),
    }
    del y, gradient
    results = list(gradients.values())
    found["left"] = look.kept(results) + back.kept(results)
    return found


def work(look: Look) -> int:
    """Multiplications of two numbers in matrix products."""
    return sum(product.multiplications for product in look.products)


def changes_noticed(answer) -> None:
    x = torch.ones(4, dtype=torch.double, requires_grad=True) * 1
    y = answer.checkpoint(torch.exp, x)
    x.mul_(2)
    with contextlib.suppress(RuntimeError):
        y.sum().backward()
        raise Wrong(
            "an input was changed in place before the backward pass, and nobody noticed: the\n"
            "gradient is silently wrong. Keep tensors with ctx.save_for_backward(…), which checks."
        )


# ---- what is wrong, in words


def _right_values(case: Case, right: dict, found: dict) -> None:
    got, wanted = found["gradients"], right["gradients"]
    close(str(case), "the output", found["y"], right["y"])
    if got["x"] is None:
        raise Wrong(f"{case}: the first input got no gradient: return one gradient for each input.")
    missing = [name for name, gradient in got.items() if gradient is None]
    if missing:
        raise Wrong(
            f"{case}: {', '.join(missing[:3])} … got no gradient: torch.autograd.backward(output, "
            "gradient)\nreaches the parameters too, torch.autograd.grad only what you name."
        )
    wrong = [name for name in wanted if not _near(got[name], wanted[name])]
    if not wrong:
        return
    hint = "Does `backward` start from the gradient that it is given?"
    if not any(name.startswith(f"layers.{case.layers - 1}.") for name in wrong):
        hint = (
            "The last layer's gradients are right, others are not. Does the recomputation end at\n"
            "its inputs? Detach them, or the inner backward pass goes on into the outer graph."
        )
    elif case.dropout:
        hint = "Does the recomputation draw the random numbers that the forward pass has drawn?"
    close(str(case), f"the gradient of {wrong[0]}", got[wrong[0]], wanted[wrong[0]], hint=hint)


def _near(got: torch.Tensor, right: torch.Tensor) -> bool:
    try:
        close("", "", got, right)
    except Wrong:
        return False
    return True


def _right_state(case: Case, right: dict, found: dict) -> None:
    if not torch.equal(found["state"], right["state"]):
        raise Wrong(
            f"{case}: the forward pass leaves another random state than without checkpoints."
        )
    if found["moved"]:
        raise Wrong(
            f"{case}: after the backward pass the random state is not what it was before it: "
            "everything\ndrawn later repeats old numbers. Put today's state back after the "
            "recomputation."
        )


def _right_work(case: Case, right: dict, found: dict) -> None:
    if found["forward runs"] != right["forward runs"]:
        raise Wrong(
            f"{case}: in the forward pass the layers ran {found['forward runs']} times, not once."
        )
    if not case.nested and found["runs"] != [2] * case.layers:
        again = [runs - 1 for runs in found["runs"]]
        raise Wrong(
            f"{case}: in the backward pass the layers ran {again} times, and once is enough."
        )
    again = 1 + case.nested  # a checkpoint in a checkpoint runs twice more
    for half, most in (
        ("forward", right["forward products"]),
        ("backward", right["products"] + again * right["forward products"]),
    ):
        done = found["forward products" if half == "forward" else "products"]
        if done > most:
            raise Wrong(
                f"{case}: the matrix products of the {half} pass have {done:,} multiplications, "
                f"and {most:,} will do."
            )


def _right_memory(case: Case, found: dict) -> None:
    if found["kept"] > 0:
        raise Wrong(
            f"{case}: after the forward pass {found['kept']:,} bytes more are kept than the "
            "inputs and the random states.\n"
            "Is the function run with gradients on, or is more saved than its inputs?"
        )
    if (
        found["x"] > 10**5 and found["peak"] > 14 * found["x"]
    ):  # of one layer: its inside, gradients
        raise Wrong(
            f"{case}: in the backward pass {found['peak']:,} bytes are made and alive at once: "
            "more than one layer's."
        )
    if found["left"]:
        raise Wrong(
            f"{case}: {found['left']:,} bytes are still held after the backward pass, when the "
            "caller has let go\nof the output. What is kept that nobody needs any more?"
        )
