"""Given: the contracts of exercises a to d, and the judges behind their check cells.

a, c  the simulator executes the lists, for drawn numbers of ranks and micro-batches
b     the gradients of two micro-batches, after their B's and after their W's, equal float64's
d     1 to 4 real ranks execute lists, some of them drawn; one rank in float64 is the reference
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from utils.course.assertions import Wrong, a_number, close, communication, nothing_kept, unchanged
from utils.course.messages import never_waited, noted
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.parallel.schedules import Action, check, in_flight, needs, schedule, simulate

LIBRARY = (
    "utils.parallel", "utils.training", "torch.distributed.pipelining", "deepspeed",
    "labs.support.pipeline_parallel",
)

# ---- a, c: lists, executed by the simulator

LARGEST = (9, 24)  # ranks, micro-batches


def less_memory(trial: Trial) -> str:
    """Judge `order` of exercise a."""
    trial.forbid(LIBRARY)
    trial.alone("the lists", of_sizes, trial.new_seed(), fast_with_less_memory)
    return (
        f"complete and as fast as GPipe for drawn sizes, up to {LARGEST[0]} ranks and "
        f"{LARGEST[1]} micro-batches;\nrank r of p keeps at most p − r micro-batches."
    )


def less_bubble(trial: Trial) -> str:
    """Judge `order` of exercise c."""
    trial.forbid(LIBRARY)
    trial.alone("the lists", of_sizes, trial.new_seed(), less_idle)
    return (
        f"complete for drawn sizes, up to {LARGEST[0]} ranks and {LARGEST[1]} micro-batches;\n"
        "a third of 1F1B's idle time, and no more micro-batches kept."
    )


def of_sizes(answer, seed: int, holds: Callable) -> None:
    """On a rank: call `holds(case, lists, ranks, micro_batches)` for few and many of both."""
    few, many = st.integers(1, 5), (st.integers(1, most) for most in LARGEST)

    def of_size(size: tuple[int, int]) -> None:
        holds(f"{size[0]} ranks, {size[1]} micro-batches", actions(answer, *size), *size)

    for_all(seed, st.tuples(few, few) | st.tuples(*many), of_size, examples=25)


def actions(answer, ranks: int, micro_batches: int) -> list[list[Action]]:
    """The answer's lists of all ranks."""
    return [
        [Action(str(kind), int(n)) for kind, n in answer.order(rank, ranks, micro_batches)]
        for rank in range(ranks)
    ]


def fast_with_less_memory(case: str, orders: list, ranks: int, micro_batches: int) -> None:
    """The contract of exercise a's lists."""
    most = [min(ranks - rank, micro_batches) for rank in range(ranks)]
    _complete(case, orders, micro_batches, "FB", most,
              "How many forward passes precede its first backward pass?")
    takes, gpipe = simulate(orders, 1.0, 2.0).span, 3 * (micro_batches + ranks - 1)
    if takes > gpipe + 1e-9:
        raise Wrong(
            f"{case}, a backward pass as long as two forward passes: this takes {takes:g} forward "
            f"passes, GPipe takes {gpipe}.\nWhich rank waits for which? Some ranks run too few F's "
            "ahead, or run their B's\nin a different order from that in which gradients arrive."
        )


def less_idle(case: str, orders: list, ranks: int, micro_batches: int) -> None:
    """The contract of exercise c's lists."""
    _complete(case, orders, micro_batches, "FBW", [min(ranks, micro_batches)] * ranks,
              "A W may wait, but its micro-batch is kept until it has run.")
    idle, before = simulate(orders).span - 3 * micro_batches, 3 * (ranks - 1)
    most = ranks - 1 if micro_batches >= ranks else before
    if idle > most + 1e-9:
        raise Wrong(
            f"{case}: a rank is idle for {idle:g} forward passes, with 1F1B for {before}; {most} "
            "is possible.\nWhich rank waits while it has a W that it could run?"
        )


def _complete(
    case: str, orders: list, micro_batches: int, kinds: str, most: list[int], hint: str
) -> None:
    """Each action runs once, no rank waits forever, and rank r keeps at most most[r]
    micro-batches."""
    wanted = {Action(kind, n) for n in range(micro_batches) for kind in kinds}
    for rank, order in enumerate(orders):
        if missing := sorted(wanted - set(order)):
            raise Wrong(f"{case}: rank {rank} never runs {missing[0]}.")
        if odd := sorted(set(order) - wanted):
            raise Wrong(
                f"{case}: rank {rank} runs {odd[0]}, but there are only {', '.join(kinds)} of 0 to "
                f"{micro_batches - 1}."
            )
    try:
        check(orders)
    except ValueError as error:
        raise Wrong(f"{case}: {error}") from None
    for rank, (kept, allowed) in enumerate(zip(in_flight(orders), most)):
        if kept > allowed:
            raise Wrong(
                f"{case}: rank {rank} keeps {kept:.0f} micro-batches at once; {allowed} would be "
                f"enough.\n{hint}"
            )


# ---- b: the backward pass of a linear layer in two halves


def halves(trial: Trial) -> str:
    """Judge `LaterLinear`."""
    trial.forbid(LIBRARY)
    draw = trial.draw
    with trial.ranks(1) as group:
        for what, dimensions, bias, dtype, strided in (
            ("rows", 2, True, torch.float64, False),
            ("sequences", 3, False, torch.float32, False),
            ("rows", 2, True, torch.bfloat16, False),
            ("sequences, not contiguous, gradients already there", 3, True, torch.float64, True),
        ):
            into, out = draw.sample(range(2, 12), 2)
            shapes = [
                (*(draw.randrange(2, 9) for _ in range(dimensions - 1)), into) for _ in range(2)
            ]
            case = f"{what}, x {' and '.join(map(str, shapes))}, {dtype}, {out} outputs"
            group.run(f"{case}{', a bias' * bias}", in_halves, trial.new_seed(), shapes, out, bias,
                      dtype, strided)
    return (
        "B computes the gradient of x, one product, and nothing else; W those of weight and bias,\n"
        "one product, added to the existing gradient, in any order; for rows and sequences of\n"
        "drawn sizes in fp32, fp64 and bf16, with and without a bias; after W no tensor and no\n"
        "graph is kept."
    )


def in_halves(
    answer, seed: int, shapes: list[tuple], out: int, bias: bool, dtype: torch.dtype, strided: bool
) -> None:
    """On a rank: run B of two micro-batches, whose x have these shapes, then their W's, the second
    one's first. strided: no tensor is contiguous, and weights already have a gradient."""

    def drawn(number: int, *shape: int) -> torch.Tensor:
        x = fractions(seed + number, *shape, dtype=dtype)
        return x.mT.contiguous().mT if strided and x.ndim > 1 else x

    where, p = "LaterLinear", {"weight": nn.Parameter(drawn(1, out, shapes[0][-1]))}
    if bias:
        p["bias"] = nn.Parameter(drawn(2, out))
    before = {name: drawn(3, *w.shape) * strided for name, w in p.items()}
    for name, w in p.items():
        w.grad = before[name].clone() if strided else None
    xs = [drawn(n, *shape).requires_grad_() for n, shape in enumerate(shapes, 4)]
    dys = [drawn(n, *shape[:-1], out) for n, shape in enumerate(shapes, 6)]
    waiting, ys = [[], []], []  # the caller may hold ys, or the loss, for long
    with Look(x=xs, weights=[w.data for w in p.values()]) as look:
        gradients = [dy.clone() for dy in dys]
        for x, dy, later in zip(xs, gradients, waiting):
            ys.append(answer.LaterLinear.apply(x, p["weight"], p.get("bias"), later))
            ys[-1].backward(dy)
            for name, w in p.items():
                if w.grad is not None and not (strided and w.grad.equal(before[name])):
                    raise Wrong(
                        f"{where}: B has already computed or changed the gradient of the {name}: "
                        "leave it for W."
                    )
            if x.grad is None:
                raise Wrong(
                    f"{where}: after B there is no gradient of x; the previous rank waits for it."
                )
            if not later:
                raise Wrong(f"{where}: after B nothing waits: put a function into ctx.waiting.")
            _products(f"{where}, y and B", look, 2 * dy.numel() * x.shape[-1])
        for x, dy, later in list(zip(xs, dys, waiting))[::-1]:
            while later:
                later.pop(0)()
            # the sum for the bias may be a matrix product too
            _products(f"{where}, W", look, dy.numel() * (x.shape[-1] + 1))
    unchanged(where, look.changed())
    for n, (x, dy) in enumerate(zip(xs, dys)):
        close(where, f"the gradient of x of micro-batch {n}", x.grad,
              dy.double() @ p["weight"].double(), dtype=dtype, scale=40.0)
    flat = [[t.detach().double().flatten(0, -2) for t in pair] for pair in zip(xs, dys)]
    right = {"weight": sum(dy.T @ x for x, dy in flat), "bias": sum(dy.sum(0) for _, dy in flat)}
    for name, w in p.items():
        close(where, f"after two micro-batches the gradient of the {name}", w.grad,
              right[name] + before[name], dtype=dtype, scale=40.0,
              hint="Is it the sum of both, and of the gradient that was there before?")
    if any(w.grad.requires_grad for w in p.values()):
        raise Wrong(
            f"{where}: a gradient has a history: it keeps a graph from step to step.\n"
            "Does W run under torch.no_grad()?"
        )
    del gradients, dy
    nothing_kept(where, look.kept([t.grad for t in (*xs, *p.values())], ys),
                 "What still holds x or its gradient after W?")


def _products(where: str, look: Look, most: int) -> None:
    """Since the last call, no more than `most` multiplications were done."""
    done = sum(product.multiplications for product in look.products)
    look.products.clear()
    if done > most:
        raise Wrong(
            f"{where}: matrix products of {done:,} multiplications; {most:,} would be enough.\n"
            "What is computed in this half that belongs to the other, or to neither?"
        )


# ---- d: the executor

HANG = (
    "Which rank waits for which? A send that waits (dist.send returns when the other rank\n"
    "receives) blocks the rank; a receive without a tag takes whatever was sent first."
)


def executor(trial: Trial) -> str:
    """Judge `run` in the file."""
    trial.forbid(LIBRARY)
    for group in trial.groups((2, 3, 1, 4), HANG):
        for case in _steps(trial, group.size):
            name = group.case(f"{case}{', on a slow network' * case.late}")
            group.run(name, one_step, case, late=case.late)
    return (
        "loss and gradients equal one rank's, on 1 to 4 ranks, for GPipe, 1F1B and drawn lists,\n"
        "in fp32, fp64 and bf16, with micro-batches of different sizes, non-contiguous outputs\n"
        "and late messages; one message each way per micro-batch, and not a byte too many;\n"
        "activations are released after their B, and nothing is kept."
    )


@dataclass(frozen=True)
class Step:
    """A step of a pipeline.

    name: the schedule's; lists: by rank; rows: of each micro-batch; tokens: per row; width: of the
    hidden states that ranks send
    """

    name: str
    lists: list[list[Action]]
    rows: list[int]
    tokens: int
    width: int
    dtype: torch.dtype
    late: bool
    seed: int

    def __str__(self):
        rows = ", ".join(map(str, self.rows[:6])) + ", …" * (len(self.rows) > 6)
        return f"{len(self.rows)} micro-batches ({self.name}) of {rows} rows, {self.dtype}"

    def micro_batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(x, y) by number; x holds tokens, for an embedding."""
        drawn = [
            fractions(self.seed + n, rows, self.tokens, 4) for n, rows in enumerate(self.rows)
        ]
        return [(x[..., 3].mul(10).long() % 10, x[..., :3].to(self.dtype)) for x in drawn]

    def stage(self, rank: int) -> nn.Sequential:
        """The stage of a rank, with gradients that are not zero."""
        into, out = self.width, 3 if rank == len(self.lists) - 1 else self.width
        layers = [nn.Linear(into, into), nn.Tanh(), RowsLast(into, out)]
        if rank == 0:
            layers.insert(0, nn.Embedding(10, into))
        stage = nn.Sequential(*layers).to(self.dtype)
        for n, p in enumerate(stage.parameters()):
            p.data, p.grad = (
                fractions(self.seed + 100 * rank + n + more, *p.shape, dtype=self.dtype) / 2
                for more in (50, 5000)
            )
        return stage

    def boundary(self, x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the message for a micro-batch x, for the executor."""
        return (*x.shape, self.width), self.dtype

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().sum() / 7


class RowsLast(nn.Linear):
    """A linear layer whose output has its rows as the last dimension in memory."""

    def forward(self, x):
        return super().forward(x).transpose(0, -1).contiguous().transpose(0, -1)


def _steps(trial: Trial, size: int) -> Iterator[Step]:
    draw = trial.draw
    fp32, fp64 = draw.sample([torch.float32, torch.float64], 2)

    def step(name, count, dtype, late=False, **more):
        lists = random_lists(draw, size, count) if name == "drawn" else schedule(name, size, count)
        given = {
            "rows": [draw.randint(1, 4) for _ in range(count)], "tokens": draw.randrange(1, 4),
            "width": draw.randrange(2, 7), "seed": trial.new_seed(),
        } | more
        return Step(name, lists, dtype=dtype, late=late, **given)

    if size in (2, 3):  # a slow network catches answers that do not wait: it comes first
        yield step("drawn", draw.randrange(3, 6), fp64, late=True)
    if size == 2:
        yield step("drawn", 20, fp32)
        # messages of more than 50,000 elements: too large for a buffer to hide one in flight
        yield step("1f1b", 32, torch.float32, rows=[1] * 32, tokens=900, width=64)
    if size == 3:
        yield step("1f1b", draw.randrange(2, 5), torch.bfloat16)
    yield step("drawn", draw.randrange(3, 8), fp32)
    yield step("gpipe", draw.randrange(1, 4), fp64)


def random_lists(draw: random.Random, ranks: int, micro_batches: int) -> list[list[Action]]:
    """Lists by rank, in a random order that can complete: draws from the actions that can run."""
    lists, done = [[] for _ in range(ranks)], set()
    left = [
        (rank, Action(kind, n)) for rank in range(ranks) for n in range(micro_batches)
        for kind in "FB"
    ]
    while left:
        ready = [
            (rank, action) for rank, action in left
            if all(pair in done for pair in needs(action, rank, ranks, 1))
        ]
        chosen = draw.choice(ready)
        left.remove(chosen)
        done.add(chosen)
        lists[chosen[0]].append(chosen[1])
    return lists


# ---- on a rank


def one_step(answer, case: Step) -> None:
    """Run the answer once, and check everything that it did."""
    rank, last, where = dist.get_rank(), len(case.lists) - 1, "run"
    own, given = [tuple(action[:2]) for action in case.lists[rank]], case.micro_batches()
    stage, done, alive = case.stage(rank), [], []
    numbers = iter([n for kind, n in own if kind == "F"])

    def note_forward(module, args):
        done.append(("F", next(numbers, "again")))

    def note_backward(module, args, out):
        number = done[-1][1]

        def begins(gradient):
            done.append(("B", number))
            alive.append(look.alive)

        out.register_hook(begins)

    stage.register_forward_pre_hook(note_forward)
    stage.register_forward_hook(note_backward)
    with Look(x=[x for x, _ in given], y=[y for _, y in given]) as look, noted() as notes:
        total = answer.run(own, stage, given, case.loss, case.boundary)
    if done != own:
        raise Wrong(f"{where}: its stage runs {_listed(done)}, but its list says {_listed(own)}.")
    loss, gradients = on_one_rank(case)
    hint = "Gradients add up over the micro-batches, and to those already there."
    hint += "\nDoes each message belong to its micro-batch, and is it complete when it is used?"
    for (name, p), right in zip(stage.named_parameters(), gradients[rank]):
        close(where, f"the gradient of {name}", p.grad, right, hint=hint,
              scale=4 * right.abs().max().item() + 1)
    if rank == last:
        value = a_number(where, "the result of run", total)
        close(where, "the sum of the losses", torch.tensor(value, dtype=case.dtype), loss)
    for call in never_waited(notes):
        raise Wrong(f"{where}: an {call} is never waited on. When may its tensor be released?")
    messages = [torch.Size(case.boundary(x)[0]).numel() * case.dtype.itemsize for x, _ in given]
    messages *= (rank > 0) + (rank < last)
    communication(where, look.events, {"send": messages, "recv": messages},
                  "One message each way per micro-batch is enough.")
    unchanged(where, look.changed())
    if case.late:  # the slow network keeps messages itself
        return
    most = 3 * bytes_of_one(case, rank) + sum(messages) * (rank > 0)  # gradients may stay
    if alive[-1] > most:
        raise Wrong(
            f"{where}: when its last B begins, {alive[-1]:,} bytes that it allocated are alive; "
            f"{most:,} would be enough.\nWhat is kept for a micro-batch after its B, and what "
            "still refers to it?"
        )
    nothing_kept(where, look.kept(total, [p.grad for p in stage.parameters()]))


def bytes_of_one(case: Step, rank: int) -> int:
    """Peak bytes during the F and B of the largest micro-batch."""
    x, y = max(case.micro_batches(), key=lambda pair: len(pair[0]))
    stage = case.stage(rank)
    with Look() as look:
        if rank > 0:
            x = torch.ones(case.boundary(x)[0], dtype=case.dtype, requires_grad=True)
        out = stage(x)
        message = out.detach().contiguous()
        out = case.loss(out, y) if rank == len(case.lists) - 1 else out
        out.backward(torch.ones_like(out))
        del message
    return look.peak


def on_one_rank(case: Step) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """In float64: the loss, and the gradients by rank."""
    stages, total = [case.stage(rank).double() for rank in range(len(case.lists))], 0.0
    for x, y in case.micro_batches():
        for stage in stages:
            x = stage(x)
        total = total + case.loss(x, y.double())
    total.backward()
    return total.detach(), [[p.grad for p in stage.parameters()] for stage in stages]


def _listed(actions: list[tuple]) -> str:
    return " ".join(f"{kind}{n}" for kind, n in actions[:12]) + " …" * (len(actions) > 12)
