"""Given: what the check cell of exercise b looks at: what is there after B, and what after W.

Two micro-batches of different sizes go through one or two layers; W's are done in another order
than B's. Gradients are compared with those of float64, products and bytes are counted.
"""

from dataclasses import dataclass

import torch

from utils.course.assertions import Wrong, close, unchanged
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

LIBRARY = (
    "utils.parallel", "utils.training", "torch.distributed.pipelining", "deepspeed",
    "labs.support.pipeline_parallel",
)


def halves(trial: Trial) -> str:
    """Judges `LaterLinear`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:  # nothing here depends on ranks
        for cases in _drawn(trial):
            whole = " beside ".join(map(str, cases))
            for case, found in zip(cases, group.run(whole, steps, cases)[0]):
                _judged(str(case), case, found)
    return (
        "B: the gradient of x, one product, and nothing else; W: those of weight and bias, one\n"
        "product, added to what is there, in any order; for rows and sequences of drawn sizes in\n"
        "fp32, fp64 and bf16, with a bias and without; after W nothing is kept, and no graph."
    )


@dataclass(frozen=True)
class Case:
    """shapes: of the x of each micro-batch; widths: of x and of what each layer gives."""

    shapes: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    bias: bool
    dtype: torch.dtype
    seed: int
    before: bool = False  # the weights have a gradient already
    transposed: bool = False  # x, weights and gradients do not lie one number after the other
    leaf: bool = True  # x wants a gradient
    fresh: bool = False  # the bias is zeros, as many begin

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        kind_of_x = "sequences" if len(self.shapes[0]) > 2 else "rows"
        layers = "layer" if len(self.widths) == 2 else "layers after one another"
        return (
            f"{kind_of_x}, x {' and '.join(map(str, self.shapes))} {kind}, {layers} "
            f"{' → '.join(map(str, self.widths))} with{'' if self.bias else 'out'} a bias"
            + ", gradients already there" * self.before
            + ", not contiguous" * self.transposed
            + ", x wants no gradient" * (not self.leaf)
            + ", zeros as a bias" * self.fresh
        )

    def drawn(self, number: int, *shape: int) -> torch.Tensor:
        """Random numbers of a shape, the same for the same number."""
        if self.transposed and len(shape) > 1:
            *rest, a, b = shape
            return fractions(self.seed + number, *rest, b, a, dtype=self.dtype).transpose(-1, -2)
        return fractions(self.seed + number, *shape, dtype=self.dtype)

    def weights(self) -> list[tuple]:
        """(weight, bias or None) of each layer."""
        size = 0.0 if self.fresh else 1.0
        return [
            (self.drawn(10 + n, out, into), size * self.drawn(20 + n, out) if self.bias else None)
            for n, (into, out) in enumerate(zip(self.widths, self.widths[1:]))
        ]

    def inputs(self) -> list[tuple]:
        """(x, gradient of y) of each micro-batch."""
        return [
            (self.drawn(30 + n, *shape), self.drawn(40 + n, *shape[:-1], self.widths[-1]))
            for n, shape in enumerate(self.shapes)
        ]


def _drawn(trial: Trial) -> list[list[Case]]:
    """Cases by run."""
    draw, single, double = trial.draw, torch.float32, torch.float64

    def size():
        return draw.randrange(2, 9)

    def case(dimensions, layers=1, dtype=double, **more):
        widths = tuple(draw.sample(range(2, 12), layers + 1))
        shapes = tuple((*[size() for _ in range(dimensions - 1)], widths[0]) for _ in range(2))
        more.setdefault("bias", draw.random() < 0.5)
        return Case(shapes, widths, dtype=dtype, seed=trial.new_seed(), **more)

    empty = case(2, bias=True, before=True)
    large = (draw.randrange(60, 70), draw.randrange(20, 30), 70), (3, 1, 70)
    return [
        [case(2, bias=True), case(2, bias=False, dtype=single), case(3, bias=True, dtype=single)],
        [
            case(3, layers=2, before=True), case(2, bias=True, dtype=torch.bfloat16),
            case(4, transposed=True), case(2, transposed=True, dtype=single, bias=True),
            Case(large, (70, 1 + draw.randrange(64, 90)), True, single, trial.new_seed(),
                 before=True),
            Case(((1, 1), (5, 1)), (1, 1), True, double, trial.new_seed()),
            Case((empty.shapes[0], (0, empty.widths[0])), empty.widths, True, double, empty.seed),
            case(2, leaf=False, bias=True), case(2, bias=True, fresh=True),
        ],
    ]


# ---- in a process of its own


def steps(answer, cases: list[Case]) -> list[dict]:
    return [step(answer, case) for case in cases]


def step(answer, case: Case) -> dict:
    """B of all micro-batches, then their W's, the last one first."""
    layers = [[None if p is None else torch.nn.Parameter(p) for p in pair]
              for pair in case.weights()]
    parameters = [p for pair in layers for p in pair if p is not None]
    for n, p in enumerate(parameters):
        p.grad = case.drawn(60 + n, *p.shape) if case.before else None
    first = [None if p.grad is None else p.grad.clone() for p in parameters]
    waiting = [[] for _ in case.shapes]
    inputs = case.inputs()
    look = Look(x=[x for x, _ in inputs], gradient=[g for _, g in inputs],
                weights=[p.data for p in parameters])
    runs, outputs, found = [], [], {"x": [], "B": [], "W": []}
    with look:
        for (x, gradient), later in zip(inputs, waiting):
            x.requires_grad_(case.leaf)
            y = x
            for weight, bias in layers:
                y = answer.LaterLinear.apply(y, weight, bias, later)
            before = len(look.products)
            y.backward(gradient)
            runs.append(look.products[before:])
            for p, value in zip(parameters, first):
                if (p.grad is None) != (value is None) or not (
                    value is None or torch.equal(p.grad, value)
                ):
                    already = "another gradient" if case.before else "a gradient already"
                    raise Wrong(
                        f"{case}: after B the weight has {already}: B should leave it for later."
                    )
            if case.leaf and x.grad is None:
                raise Wrong(
                    f"{case}: after B there is no gradient of x, for which the rank before waits."
                )
            if not later:
                raise Wrong(f"{case}: after B nothing waits: put a function into ctx.waiting.")
            outputs.append(y)  # somebody may hold them, or the loss, for long
            del y
        simple = len(layers) == 1 and not case.transposed  # then what waits is given
        grads = [x.grad for x, _ in inputs]
        found["waits"] = look.kept(*grads, outputs, allowed=0) if simple else 0
        found["B"] = [[p.multiplications for p in products] for products in runs]
        found["x"] = [x.grad for x, _ in inputs]
        for later in reversed(waiting):
            before = len(look.products)
            while later:
                function = later.pop(0)
                try:
                    function()
                except RuntimeError as error:
                    if "second time" in str(error):
                        raise Wrong(
                            f"{case}: W fails: {error}\nctx.saved_tensors are there in B: take "
                            "them out then."
                        ) from None
                    raise
                del function
            found["W"].append([p.multiplications for p in look.products[before:]])
    found["W"].reverse()
    found["gradients"] = [p.grad for p in parameters]
    found["graph"] = any(p.grad is not None and p.grad.requires_grad for p in parameters)
    found["changed"] = look.changed()
    found["largest"] = look.largest
    found["kept"] = look.kept(found["gradients"], found["x"], outputs)
    found["gradients"] = [None if g is None else g.detach() for g in found["gradients"]]
    return found


# ---- what is wrong, in words


def _judged(name: str, case: Case, found: dict) -> None:
    layers = [[None if p is None else p.double().requires_grad_() for p in pair]
              for pair in case.weights()]
    leaves, total = [], 0.0
    for x, gradient in case.inputs():
        y = x.double().requires_grad_()
        leaves.append(y)
        for weight, bias in layers:
            y = torch.nn.functional.linear(y, weight, bias)
        total = total + (y * gradient.double()).sum()
    parameters = [p for pair in layers for p in pair if p is not None]
    total.backward()
    scale = 4.0 * max(case.widths) ** 0.5  # of sums that may cancel
    for number, (got, leaf) in enumerate(zip(found["x"], leaves)):
        if case.leaf:
            close(name, f"the gradient of x of micro-batch {number}", got, leaf.grad, scale=scale,
                  dtype=case.dtype)
    rows = sum(x.numel() // x.shape[-1] for x, _ in case.inputs())
    names = [f"the {kind}" for pair in layers for kind, p in zip(("weight", "bias"), pair)
             if p is not None]
    for number, (what, got, p) in enumerate(zip(names, found["gradients"], parameters)):
        if got is None:
            raise Wrong(f"{name}: after W there is no gradient of {what}.")
        before = case.drawn(60 + number, *p.shape).double() if case.before else 0.0
        close(
            name, f"after two micro-batches the gradient of {what}", got, p.grad + before,
            dtype=case.dtype, scale=scale * (1 + rows) ** 0.5,
            hint="Is it the sum of both" + ", and of what was there before?" * case.before
            + "?" * (not case.before),
        )
    if found["graph"]:
        raise Wrong(
            f"{name}: the weight's gradient has a history: it keeps a graph from step to step.\n"
            "Is W done under torch.no_grad()?"
        )
    unchanged(name, found["changed"])
    products = sum(a * b for a, b in zip(case.widths, case.widths[1:]))  # W: the bias may be one
    for half, whose in (("B", "gradient · weight"), ("W", "gradientᵀ · x")):
        for number, (shape, done) in enumerate(zip(case.shapes, found[half])):
            most = (products + (half == "W") * sum(case.widths[1:])) * torch.Size(
                shape[:-1]
            ).numel()
            if sum(done) > most:
                raise Wrong(
                    f"{name}: {half} of micro-batch {number} does matrix products with "
                    f"{sum(done):,} multiplications; {whose} has {most:,}.\nWhat is computed "
                    "in this half that belongs to the other, or to none?"
                )
    if found["waits"]:
        raise Wrong(
            f"{name}: {found['waits']:,} bytes were made in B and wait for W, besides the gradient "
            "of x: x and\nthe gradient of y were there before. What of W is done in B?"
        )
    most = 2 * max(products, *(width * rows for width in case.widths)) * case.dtype.itemsize
    if found["largest"] > most:
        raise Wrong(
            f"{name}: a tensor of {found['largest']:,} bytes is made: more than twice x, y "
            "and the weight."
        )
    if found["kept"]:
        raise Wrong(
            f"{name}: {found['kept']:,} bytes are still held after W, when the caller has let go of"
            " the functions.\nWho still holds x or its gradient?"
        )
