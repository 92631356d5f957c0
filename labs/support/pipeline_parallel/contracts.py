"""Given: what exercises a to d ask for, and how their check cells judge it.

a, c  the simulator carries the lists of drawn numbers of ranks and micro-batches out
b     the gradients of two micro-batches, after their B's and after their W's, are those of float64
d     1 to 6 real ranks carry lists out, drawn ones too; float64 on one rank says what is right
"""

import functools
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn

from utils.course.assertions import Wrong, a_number, close, communication, described, unchanged
from utils.course.messages import never_waited, noted
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial, fractions
from utils.parallel.schedules import Action, check, in_flight, needs, schedule, simulate

LIBRARY = (
    "utils.parallel", "utils.training", "torch.distributed.pipelining", "deepspeed",
    "labs.support.pipeline_parallel",
)

# ---- a, c: lists, by the simulator

LARGEST = (17, 60)  # ranks, micro-batches


def less_memory(trial: Trial) -> str:
    """Judges `order` of exercise a."""
    trial.forbid(LIBRARY)
    trial.alone("the lists", of_sizes, trial.new_seed(), fast_with_less_memory)
    return (
        f"complete and as fast as GPipe for drawn sizes, up to {LARGEST[0]} ranks and "
        f"{LARGEST[1]} micro-batches;\nrank r of p keeps p − r at most."
    )


def less_bubble(trial: Trial) -> str:
    """Judges `order` of exercise c."""
    trial.forbid(LIBRARY)
    trial.alone("the lists", of_sizes, trial.new_seed(), less_idle)
    return (
        f"complete for drawn sizes, up to {LARGEST[0]} ranks and {LARGEST[1]} micro-batches;\n"
        "idle a third of 1F1B's time, and no more is kept."
    )


def of_sizes(answer, seed: int, holds: Callable) -> None:
    """On a rank: `holds(case, lists, ranks, micro_batches)` for few and many of both."""
    few, many = st.integers(1, 5), (st.integers(1, most) for most in LARGEST)

    def of_size(size: tuple[int, int]) -> None:
        holds(f"{size[0]} ranks, {size[1]} micro-batches", actions(answer, *size), *size)

    for_all(seed, st.tuples(few, few) | st.tuples(*many), of_size, examples=40)


def actions(answer, ranks: int, micro_batches: int) -> list[list[Action]]:
    """The answer's lists of all ranks."""
    orders = []
    for rank in range(ranks):
        order = answer.order(rank, ranks, micro_batches)
        try:
            orders.append([Action(str(kind), operator.index(n)) for kind, n, *_ in order])
        except (TypeError, ValueError):
            raise Wrong(
                f"order({rank}, {ranks}, {micro_batches}) is {described(order)}, not a list of "
                "(kind, number)."
            ) from None
    return orders


def fast_with_less_memory(case: str, orders: list, ranks: int, micro_batches: int) -> None:
    """What lists of exercise a promise."""
    most = [min(ranks - rank, micro_batches) for rank in range(ranks)]
    _complete(case, orders, micro_batches, "FB", most,
              "How many forward passes come before its first backward pass?")
    for backward in (0.7, 3.3):
        takes, gpipe = (
            simulate(lists, 1.0, backward).span
            for lists in (orders, schedule("gpipe", ranks, micro_batches))
        )
        if takes > gpipe + 1e-9:
            raise Wrong(
                f"{case}, a backward pass as long as {backward:g} forward passes: this takes "
                f"{takes:g} forward passes, GPipe takes {gpipe:g}.\n"
                "Who waits for whom? Some ranks go too few F's ahead, or do their B's\n"
                "in another order than the gradients come."
            )


def less_idle(case: str, orders: list, ranks: int, micro_batches: int) -> None:
    """What lists of exercise c promise."""
    _complete(case, orders, micro_batches, "FBW", [min(ranks, micro_batches)] * ranks,
              "A W may wait, but until it is done its micro-batch is kept.")
    idle, before = (
        simulate(lists).span - 3 * micro_batches
        for lists in (orders, schedule("1f1b", ranks, micro_batches))
    )
    most = ranks - 1 if micro_batches >= ranks else before
    if idle > most + 1e-9:
        raise Wrong(
            f"{case}: a rank is idle for {idle:g} forward passes, 1F1B {before:g}, and {most:g} "
            "can be reached.\nWho waits, and has a W that it could do just then?"
        )


def _complete(
    case: str, orders: list, micro_batches: int, kinds: str, most: list[int], hint: str
) -> None:
    """Each action once, no rank waits for ever, and each keeps `most` micro-batches, by rank."""
    wanted = {Action(kind, n) for n in range(micro_batches) for kind in kinds}
    for rank, order in enumerate(orders):
        if missing := sorted(wanted - set(order)):
            raise Wrong(f"{case}: rank {rank} never does {missing[0]}.")
        if odd := sorted(set(order) - wanted):
            raise Wrong(
                f"{case}: rank {rank} does {odd[0]}, and there are {', '.join(kinds)} of 0 to "
                f"{micro_batches - 1}."
            )
    try:
        check(orders)
    except ValueError as error:
        raise Wrong(f"{case}: {error}") from None
    for rank, (kept, allowed) in enumerate(zip(in_flight(orders), most)):
        if kept > allowed:
            raise Wrong(
                f"{case}: rank {rank} keeps {kept:.0f} micro-batches at once, and {allowed} would "
                f"do.\n{hint}"
            )


# ---- b: the backward pass of a linear layer in two halves


@dataclass(frozen=True)
class Layer:
    """shapes: of the x of both micro-batches."""

    shapes: list[tuple[int, ...]]
    out: int
    bias: bool
    dtype: torch.dtype
    seed: int
    strided: bool = False  # nothing lies one number after the other, and weights have a gradient

    def __str__(self):
        return (
            f"{'sequences' if len(self.shapes[0]) > 2 else 'rows'}, x "
            f"{' and '.join(map(str, self.shapes))} {self.dtype}, {self.out} outputs"
            + ", a bias" * self.bias
            + ", not contiguous, gradients already there" * self.strided
        )

    def drawn(self, number: int, *shape: int) -> torch.Tensor:
        x = fractions(self.seed + number, *shape, dtype=self.dtype)
        return x.mT.contiguous().mT if self.strided and x.ndim > 1 else x


def halves(trial: Trial) -> str:
    """Judges `LaterLinear`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:
        for case in _layers(trial):
            group.run(str(case), in_halves, case)
    return (
        "B: the gradient of x, one product, and nothing else; W: those of weight and bias, one\n"
        "product, added to what is there, in any order; for rows and sequences of drawn sizes in\n"
        "fp32, fp64 and bf16, with a bias and without; after W nothing is kept, and no graph."
    )


def _layers(trial: Trial) -> Iterator[Layer]:
    draw, single, double = trial.draw, torch.float32, torch.float64
    for dimensions, bias, dtype, strided in [
        (2, True, double, False), (2, False, single, False), (3, True, single, False),
        (2, True, torch.bfloat16, False), (3, True, double, True), (4, False, single, True),
    ]:
        into, out = draw.sample(range(2, 12), 2)
        shapes = [(*(draw.randrange(2, 9) for _ in range(dimensions - 1)), into) for _ in range(2)]
        yield Layer(shapes, out, bias, dtype, trial.new_seed(), strided)
    yield Layer([(5, 1), (0, 1)], 1, True, double, trial.new_seed())


def in_halves(answer, case: Layer) -> None:
    """On a rank: B of both micro-batches, then their W's, the second one first."""
    where = "LaterLinear"
    p = {"weight": nn.Parameter(case.drawn(1, case.out, case.shapes[0][-1]))}
    if case.bias:
        p["bias"] = nn.Parameter(case.drawn(2, case.out))
    before = {name: case.drawn(3, *w.shape) * case.strided for name, w in p.items()}
    for name, w in p.items():
        w.grad = before[name].clone() if case.strided else None
    xs = [case.drawn(n, *shape).requires_grad_() for n, shape in enumerate(case.shapes, 4)]
    dys = [case.drawn(n, *shape[:-1], case.out) for n, shape in enumerate(case.shapes, 6)]
    waiting, ys = [[], []], []  # somebody may hold ys, or the loss, for long
    with Look(x=xs, weights=[w.data for w in p.values()]) as look:
        gradients = [dy.clone() for dy in dys]
        for x, dy, later in zip(xs, gradients, waiting):
            ys.append(answer.LaterLinear.apply(x, p["weight"], p.get("bias"), later))
            ys[-1].backward(dy)
            for name, w in p.items():
                if w.grad is not None and not (case.strided and w.grad.equal(before[name])):
                    raise Wrong(
                        f"{where}: after B the {name} has a gradient already, or another one than "
                        "before: B should leave it for later."
                    )
            if x.grad is None:
                raise Wrong(
                    f"{where}: after B there is no gradient of x, for which the rank before waits."
                )
            if not later:
                raise Wrong(f"{where}: after B nothing waits: put a function into ctx.waiting.")
            _products(f"{where}, y and B", look, 2 * dy.numel() * x.shape[-1])
        held = 0 if case.strided else look.kept([x.grad for x in xs], ys, gradients)
        if held:  # of strided ones it may have made copies
            raise Wrong(
                f"{where}: {held:,} bytes were made in B and wait for W, besides the gradient of "
                "x: x and\nthe gradient of y were there before. What of W is done in B?"
            )
        for x, dy, later in list(zip(xs, dys, waiting))[::-1]:
            while later:
                later.pop(0)()
            # the sum for the bias may be a product, too
            _products(f"{where}, W", look, dy.numel() * (x.shape[-1] + 1))
    unchanged(where, look.changed())
    if not all(map(torch.equal, gradients, dys)):
        unchanged(where, ["the gradient of y"])
    for n, (x, dy) in enumerate(zip(xs, dys)):
        close(where, f"the gradient of x of micro-batch {n}", x.grad,
              dy.double() @ p["weight"].double(), dtype=case.dtype, scale=40.0)
    flat = [[t.detach().double().flatten(0, -2) for t in pair] for pair in zip(xs, dys)]
    right = {"weight": sum(dy.T @ x for x, dy in flat), "bias": sum(dy.sum(0) for _, dy in flat)}
    for name, w in p.items():
        close(where, f"after two micro-batches the gradient of the {name}", w.grad,
              right[name] + before[name], dtype=case.dtype, scale=40.0,
              hint="Is it the sum of both, and of what was there before?")
    if any(w.grad.requires_grad for w in p.values()):
        raise Wrong(
            f"{where}: a gradient has a history: it keeps a graph from step to step.\n"
            "Is W done under torch.no_grad()?"
        )
    del gradients, dy
    if held := look.kept([t.grad for t in (*xs, *p.values())], ys):
        raise Wrong(
            f"{where}: {held:,} bytes are still held after W, when the caller has let go of the "
            "functions.\nWho still holds x or its gradient?"
        )


def _products(where: str, look: Look, most: int) -> None:
    """No more multiplications than needed, since it was asked last."""
    done = sum(product.multiplications for product in look.products)
    look.products.clear()
    if done > most:
        raise Wrong(
            f"{where}: matrix products of {done:,} multiplications, and {most:,} would do.\n"
            "What is computed in this half that belongs to the other, or to none?"
        )


# ---- d: the executor

HANG = (
    "Who waits for whom? A send that waits (dist.send comes back when the other rank receives)\n"
    "blocks the rank; a receive without a number takes whatever was sent first."
)


def executor(trial: Trial) -> str:
    """Judges `run` in the file."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        for case in _steps(trial, group.size):
            name = group.case(f"{case}{', on a slow network' * case.late}")
            group.run(name, one_step, case, late=case.late)
    return (
        "the loss and gradients of one rank, on 1 to 6 ranks, for GPipe, 1F1B and drawn lists,\n"
        "in fp32, fp64 and bf16, with micro-batches of different sizes, outputs that are not\n"
        "contiguous, and when messages come late; one message each way for a micro-batch, and not\n"
        "a byte too many; activations are let go after their B, and nothing is kept."
    )


@dataclass(frozen=True)
class Step:
    """A step of a pipeline."""

    name: str  # of the schedule
    lists: list[list[Action]]  # by rank
    rows: list[int]  # of each micro-batch
    middle: tuple[int, ...]  # dimensions between rows and width: () or (T,)
    width: int  # of what ranks send
    dtype: torch.dtype
    tokens: bool  # x are whole numbers, for an embedding
    late: bool
    seed: int

    def __str__(self):
        rows = ", ".join(map(str, self.rows[:6])) + ", …" * (len(self.rows) > 6)
        return (
            f"{len(self.rows)} micro-batches ({self.name}) of {rows} rows, {self.dtype}"
            + ", x tokens" * self.tokens
        )

    def micro_batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(x, y) by number."""
        found = []
        for n, rows in enumerate(self.rows):
            shape, seed = (rows, *self.middle), self.seed + 2 * n
            x = fractions(seed, *shape, self.width + 1, dtype=self.dtype)
            x = x[..., 0].mul(10).long() % 10 if self.tokens else x
            found.append((x, fractions(seed + 1, *shape, 3, dtype=self.dtype)))
        return found

    def stage(self, rank: int) -> nn.Sequential:
        """Its gradients are not zero."""
        into, out = self.width, 3 if rank == len(self.lists) - 1 else self.width
        layers = [nn.Linear(into, into), nn.Tanh(), RowsLast(into, out)]
        if rank == 0:
            layers.insert(0, nn.Embedding(10, into) if self.tokens else nn.Linear(into + 1, into))
        stage = nn.Sequential(*layers).to(self.dtype)
        for n, p in enumerate(stage.parameters()):
            p.data, p.grad = (
                fractions(self.seed + 100 * rank + n + more, *p.shape, dtype=self.dtype) / 2
                for more in (50, 5000)
            )
        return stage

    def boundary(self, x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """For the executor; x of a micro-batch."""
        return (len(x), *self.middle, self.width), self.dtype

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().sum() / 7


class RowsLast(nn.Linear):
    """A linear layer whose output lies in memory with its rows last."""

    def forward(self, x):
        return super().forward(x).transpose(0, -1).contiguous().transpose(0, -1)


def _steps(trial: Trial, size: int) -> Iterator[Step]:
    draw = trial.draw
    fp32, fp64 = draw.sample([torch.float32, torch.float64], 2)

    def step(name, count, dtype, late=False, most=4, **more):
        lists = random_lists(draw, size, count) if name == "drawn" else schedule(name, size, count)
        given = {
            "middle": draw.choice([(), (draw.randrange(1, 4),)]), "width": draw.randrange(2, 7),
            "tokens": draw.random() < 0.5, "rows": [draw.randint(1, most) for _ in range(count)],
        } | more
        return Step(name, lists, dtype=dtype, late=late, seed=trial.new_seed(), **given)

    if size in (2, 3):  # a slow network differs only for who does not wait: it comes first
        yield step("1f1b", draw.randrange(4, 7), fp32, late=True)
        yield step("drawn", draw.randrange(3, 6), fp64, late=True)
    if size == 2:
        yield step("drawn", 20, fp32, tokens=True)
        # messages above 50,000 numbers: what is on its way does not hide in a buffer
        yield step("1f1b", 32, torch.float32, most=1, middle=(draw.randrange(900, 999),), width=64)
    if size == 3:
        yield step("1f1b", draw.randrange(2, 5), torch.bfloat16)
    yield step("drawn", draw.randrange(3, 8), fp32)
    yield step("gpipe", draw.randrange(1, 4), fp64, tokens=False)


def random_lists(draw: random.Random, ranks: int, micro_batches: int) -> list[list[Action]]:
    """By rank; in any order that comes to an end: one after another, whatever can be done."""
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
    """Runs the answer once, and looks at all that it has done."""
    rank, last, where = dist.get_rank(), len(case.lists) - 1, "run"
    own, given = [tuple(action[:2]) for action in case.lists[rank]], case.micro_batches()
    stage, done, alive = case.stage(rank), [], []
    numbers = iter([n for kind, n in own if kind == "F"])

    def note_forward(module, args):
        done.append(("F", next(numbers, "again")))

    def note_backward(module, args, out):
        out.register_hook(functools.partial(begins, done[-1][1]))

    def begins(number, gradient):
        done.append(("B", number))
        alive.append(look.alive)

    stage.register_forward_pre_hook(note_forward)
    stage.register_forward_hook(note_backward)
    actions, micro_batches = list(own), list(given)
    with Look(x=[x for x, _ in given], y=[y for _, y in given]) as look, noted() as notes:
        total = answer.run(actions, stage, micro_batches, case.loss, case.boundary)
    if done != own:
        raise Wrong(f"{where}: its stage does {_listed(done)}, and its list says {_listed(own)}.")
    loss, gradients = on_one_rank(case)
    hint = "Gradients add up: over the micro-batches, and to what is there before."
    if last > 0:
        hint += "\nIs each message the one of its micro-batch, and whole when it is used?"
    for (name, p), right in zip(stage.named_parameters(), gradients[rank]):
        close(where, f"the gradient of {name}", p.grad, right, hint=hint,
              scale=4 * right.abs().max().item() + 1)
    if getattr(total, "requires_grad", False):
        raise Wrong(f"{where}: the sum of the losses has a history, and holds its graph.")
    if rank == last:
        value = a_number(where, "what run returns", total)
        close(where, "the sum of the losses", torch.tensor(value, dtype=case.dtype), loss)
    elif total is not None:
        raise Wrong(f"{where}: run returns {described(total)}; only the last rank knows the loss, "
                    "the others return None.")
    for call in never_waited(notes):
        raise Wrong(f"{where}: nobody waits for an {call}. When may its tensor be let go?")
    messages = [torch.Size(case.boundary(x)[0]).numel() * case.dtype.itemsize for x, _ in given]
    messages *= (rank > 0) + (rank < last)
    communication(where, look.events, {"send": messages, "recv": messages},
                  "One message each way for a micro-batch.")
    changed = look.changed() + ["the list of actions or of micro-batches"] * (
        actions != own or list(map(id, micro_batches)) != list(map(id, given))
    )
    if any(x.requires_grad for x, _ in given):
        changed.append("x (it asks for a gradient now)")
    unchanged(where, changed)
    if case.late:  # it keeps messages itself
        return
    most = 3 * bytes_of_one(case, rank) + sum(messages) * (rank > 0)  # gradients may stay
    if alive[-1] > most:
        raise Wrong(
            f"{where}: when its last B begins, {alive[-1]:,} bytes that it has made are alive, and "
            f"{most:,} would do.\nWhat is kept for a micro-batch when its B is done, and who still "
            "names it?"
        )
    if kept := look.kept(total, [p.grad for p in stage.parameters()]):
        raise Wrong(f"{where}: {kept:,} bytes are still held when run has come back.")


def bytes_of_one(case: Step, rank: int) -> int:
    """That are there at once, at most, in the F and B of the largest micro-batch."""
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
        x = x if case.tokens else x.double()
        for stage in stages:
            x = stage(x)
        total = total + case.loss(x, y.double())
    total.backward()
    return total.detach(), [[p.grad for p in stage.parameters()] for stage in stages]


def _listed(actions: list[tuple]) -> str:
    return " ".join(f"{kind}{n}" for kind, n in actions[:12]) + " …" * (len(actions) > 12)
