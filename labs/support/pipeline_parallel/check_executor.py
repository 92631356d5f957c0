"""Given: what the check cell of exercise d looks at.

1 to 6 real ranks carry out lists with your executor: GPipe's, 1F1B's, and drawn ones in which
nothing is in order, but which can come to an end. Gradients are compared with those of one rank in
float64, messages and bytes are counted, and it is seen when activations are let go.
"""

import random
import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from utils.course.assertions import Wrong, a_number, close, communication, described, unchanged
from utils.course.messages import never_waited, noted
from utils.course.observe import Look, looks
from utils.course.runner import Group, Trial, fractions
from utils.measure.traffic import Watching
from utils.parallel.schedules import Action, needs, schedule

LIBRARY = (
    "utils.parallel", "utils.training", "torch.distributed.pipelining", "deepspeed",
    "labs.support.pipeline_parallel",
)
HANG = (
    "Who waits for whom? A send that waits (dist.send comes back when the other rank receives)\n"
    "blocks the rank; a receive without a number takes whatever was sent first."
)


def executor(trial: Trial) -> str:
    """Judges `run` in the file."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        # a network on which messages come late differs only for who does not wait: it comes first
        for late in (True, False) if group.size in (2, 3) else (False,):
            for case in _drawn(trial, group, late):
                name = group.case(str(case)) + ", messages that come late" * late
                ranks = group.run(name, steps, case, late, late=late)
                _right_sum(name, case, ranks)
                for rank, found in enumerate(ranks):
                    _judged(f"{name}, rank {rank}", case, rank, found)
    return (
        "the loss and gradients of one rank, on 1 to 6 ranks, for GPipe, 1F1B and drawn lists,\n"
        "in fp32, fp64 and bf16, with micro-batches of different sizes, outputs that are not\n"
        "contiguous, and when messages come late; one message each way for a micro-batch, and not\n"
        "a byte too many; activations are let go after their B, and nothing is kept."
    )


# ---- cases


@dataclass(frozen=True)
class Case:
    """Steps of one pipeline. lists[step][rank]: ("F", n) and ("B", n); rows[step][n]: of x."""

    lists: tuple
    names: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    middle: tuple[int, ...]  # dimensions between rows and width: () or (T,)
    width: int  # of what ranks send
    dtype: torch.dtype
    tokens: bool  # x are whole numbers, for an embedding
    seed: int
    turned: bool = False  # outputs of stages are not contiguous

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        counts = " and ".join(
            f"{len(rows)} micro-batch{'es' * (len(rows) > 1)} ({name})"
            for rows, name in zip(self.rows, self.names)
        )
        return (
            f"{counts} of {_short(self.rows[0])} rows, {kind}"
            + ", x tokens" * self.tokens
            + (", outputs not contiguous" * self.turned)
        )

    @property
    def size(self) -> int:
        return len(self.lists[0])

    def micro_batches(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        seed = self.seed + 1000 * step
        result = []
        for n, rows in enumerate(self.rows[step]):
            x = fractions(seed + 2 * n, rows, *self.middle, self.width + 1, dtype=self.dtype)
            if self.tokens:
                x = x[..., 0].mul(10).long() % 10
            result.append((x, fractions(seed + 2 * n + 1, rows, *self.middle, 3, dtype=self.dtype)))
        return result

    def stage(self, rank: int) -> nn.Sequential:
        """Ends of several kinds, and in the middle what keeps four times its input."""
        last = rank == self.size - 1
        into = self.width + (rank == 0 and not self.tokens)
        wide = 4 * self.width
        end = Turned if self.turned else nn.Linear
        layers = [nn.Linear(into, wide), nn.Tanh(), end(wide, 3 if last else self.width)]
        if self.tokens and rank == 0:
            layers.insert(0, nn.Embedding(10, into))
        stage = nn.Sequential(*layers).to(self.dtype)
        for n, p in enumerate(stage.parameters()):
            p.data = fractions(self.seed + 100 * rank + n + 50, *p.shape, dtype=self.dtype) / 2
        return stage

    def boundary(self, x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """For the executor; x of a micro-batch."""
        return (len(x), *self.middle, self.width), self.dtype

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().sum() / 7


def _drawn(trial: Trial, group: Group, late: bool) -> list[Case]:
    """With two and three ranks several, with others one."""
    draw, size = trial.draw, group.size
    dtypes = draw.sample([torch.float32, torch.float64], 2)

    def case(*steps, most=4, dtype=None, **more):
        """steps: (name, micro-batches)"""
        lists = [_lists(draw, name, size, count) for name, count in steps]
        rows = [tuple(draw.randrange(1, most + 1) for _ in range(count)) for _, count in steps]
        given = {
            "middle": draw.choice([(), (draw.randrange(1, 4),)]), "width": draw.randrange(2, 7),
            "tokens": draw.random() < 0.5,
        } | more
        return Case(tuple(lists), tuple(name for name, _ in steps), tuple(rows),
                    dtype=dtype or draw.choice(dtypes), seed=trial.new_seed(), **given)

    some = draw.randrange
    if late:
        return [case(("1f1b", some(4, 7)), ("drawn", some(3, 6)))]
    if size == 2:
        return [
            case(
                ("1f1b", some(5, 8)),
                ("drawn", some(4, 7)),
                dtype=dtypes[0],
                tokens=False,
                turned=True,
            ),
            case(("gpipe", 1), ("drawn", 32), dtype=dtypes[1], tokens=True),
            # messages above 50,000 numbers: what is on its way does not hide in a buffer
            case(("1f1b", 3), most=1, middle=(some(900, 1100),), width=64, dtype=torch.float32),
        ]
    if size == 3:
        return [
            case(("drawn", some(6, 10)), ("gpipe", some(2, 5)), dtype=dtypes[1]),
            case(("1f1b", some(2, 5)), dtype=torch.bfloat16),
        ]
    return [case(("drawn", some(3, 8)), (draw.choice(["gpipe", "1f1b"]), some(1, 4)))]


def _lists(draw: random.Random, name: str, ranks: int, micro_batches: int) -> tuple:
    """The lists of all ranks by the name of a schedule; "drawn": any that come to an end."""
    if name != "drawn":
        orders = schedule(name, ranks, micro_batches)
        return tuple(tuple(tuple(action[:2]) for action in order) for order in orders)
    lists, done = [[] for _ in range(ranks)], set()
    left = {
        (r, Action(kind, n)) for r in range(ranks) for n in range(micro_batches) for kind in "FB"
    }
    while left:  # one after another, whatever can be done
        ready = [
            (rank, action)
            for rank, action in sorted(left)
            if all(pair in done for pair in needs(action, rank, ranks, 1))
        ]
        rank, action = draw.choice(ready)
        left.remove((rank, action))
        done.add((rank, action))
        lists[rank].append(tuple(action[:2]))
    return tuple(map(tuple, lists))


# ---- on a rank


class Turned(nn.Linear):
    """A linear layer whose output lies in memory with its rows last."""

    def forward(self, x):
        return super().forward(x).transpose(0, -1).contiguous().transpose(0, -1)


class Watched(nn.Module):
    """A stage that notes what it is asked to do, and which of its tensors are still held then."""

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage = stage
        self.begin([])

    def begin(self, actions, patient: bool = True) -> None:
        """Another step, with this list."""
        self.actions, self.patient = list(actions), patient
        self.numbers = [n for kind, n in self.actions if kind == "F"]
        self.done, self.tensors, self.held = [], {}, ""

    def forward(self, x):
        number = self.numbers[sum(kind == "F" for kind, _ in self.done) % len(self.numbers)]
        self.note("F", number)
        self.tensors.setdefault(number, {})
        if x.is_floating_point() and dist.get_rank() > 0:
            self.watch(number, "input", x)
        hidden = _Noting.apply(x, self, number) if x.requires_grad else x
        for place, layer in enumerate(self.stage):
            hidden = layer(hidden)
            if place == len(self.stage) - 2:
                self.watch(number, "inside", hidden)
        if not x.requires_grad:  # the first stage: its backward pass ends at its weights
            hidden = _Noting.apply(hidden, self, number)
        self.watch(number, "output", hidden)
        return hidden

    def saw(self, func, tensors, outputs: bool) -> None:
        """Of what is sent to the next rank: it is part of the latest F."""
        if outputs or func.namespace != "c10d" or not func.__name__.startswith("send"):
            return
        (message,), _, goal, *_ = tensors[0]
        if goal == dist.get_rank() + 1 and self.done:
            self.watch([n for kind, n in self.done if kind == "F"][-1], "message", message)

    def watch(self, number: int, what: str, tensor: torch.Tensor) -> None:
        self.tensors[number][what] = weakref.ref(tensor.untyped_storage())

    def note(self, kind: str, number: int) -> None:
        """What begins now; of those whose B was done before the latest all must be gone, but for
        one that a variable may still name."""
        gone = [n for k, n in self.done if k == "B"][:-1]
        self.done.append((kind, number))
        if not self.patient or self.held:
            return
        for _ in looks():
            alive = [(n, what) for n in gone for what, ref in self.tensors[n].items() if ref()]
            if len({n for n, _ in alive}) < 2:
                return
        self.held = f"the {alive[0][1]} of micro-batch {alive[0][0]}"


class _Noting(torch.autograd.Function):
    """The identity; tells the stage that a backward pass has come."""

    @staticmethod
    def forward(ctx, x, watched, number):
        ctx.watched, ctx.number = watched, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        ctx.watched.note("B", ctx.number)
        return gradient, None, None


def steps(answer, case: Case, late: bool) -> list[dict]:
    """Steps one after another; gradients add up. late: on a late network it is seen who waits."""
    rank, results = dist.get_rank(), []
    watched = Watched(case.stage(rank))
    for number, lists in enumerate(case.lists):
        watched.begin(lists[rank], patient=not late)
        results.append(step(answer, case, number, lists[rank], watched, late))
    return results


def step(answer, case: Case, number: int, actions: tuple, watched: Watched, late: bool) -> dict:
    given, losses = case.micro_batches(number), []
    for p in watched.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone()  # of the steps before: made outside of what is looked at

    def loss(out, y):
        losses.append(next((n for n, (_, right) in enumerate(given) if right is y), None))
        return case.loss(out, y)

    own = list(actions), list(given)
    look, notes = Look(x=[x for x, _ in given], y=[y for _, y in given]), []
    with look, Watching(watched.saw):
        if late:
            with noted() as notes:
                total = answer.run(own[0], watched, own[1], loss, case.boundary)
        else:
            total = answer.run(own[0], watched, own[1], loss, case.boundary)
    changed = look.changed()
    if own[0] != list(actions) or list(map(id, own[1])) != list(map(id, given)):
        changed.append("the list of actions or of micro-batches")
    if any(x.requires_grad or x.grad is not None for x, _ in given):
        changed.append("x (it asks for a gradient now)")
    gradients = {name: p.grad for name, p in watched.stage.named_parameters()}
    found = {
        "events": look.events[:], "done": watched.done, "held": watched.held, "changed": changed,
        "losses": losses, "waits": never_waited(notes),
        "history": isinstance(total, torch.Tensor) and total.requires_grad,
        "gradients": {name: None if g is None else g.clone() for name, g in gradients.items()},
        "kept": 0 if late else look.kept(total, list(gradients.values())),
    }
    found["total"] = total.detach().clone() if isinstance(total, torch.Tensor) else total
    return found


# ---- what is wrong, in words


def _alone(case: Case) -> tuple[list[torch.Tensor], list[list[dict]]]:
    """One rank, in fp64: the loss of each step, and after each step the gradients by rank."""
    stages = [case.stage(rank).double() for rank in range(case.size)]
    losses, gradients = [], []
    for step in range(len(case.lists)):
        total = 0.0
        for x, y in case.micro_batches(step):
            x = x if case.tokens else x.double()
            for stage in stages:
                x = stage(x)
            total = total + case.loss(x, y.double())
        total.backward()
        losses.append(total.detach())
        gradients.append(
            [{name: p.grad.clone() for name, p in s.named_parameters()} for s in stages]
        )
    return losses, gradients


def _right_sum(name: str, case: Case, ranks: list[list[dict]]) -> None:
    losses, gradients = _alone(case)
    for step, (loss, by_rank) in enumerate(zip(losses, gradients)):
        for rank, right in enumerate(by_rank):
            where, found = f"{name}, step {step}, rank {rank}", ranks[rank][step]
            if found["done"] != list(case.lists[step][rank]):
                raise Wrong(
                    f"{where}: its stage does {_listed(found['done'])}, and its list says "
                    f"{_listed(case.lists[step][rank])}."
                )
            for parameter, wanted in right.items():
                got = found["gradients"][parameter]
                if got is None:
                    raise Wrong(f"{where}: there is no gradient of {parameter}.")
                hint = "Gradients add up: over the micro-batches, and to what is there before."
                others = [r for r in range(case.size) if r != rank]
                if case.rows[step] and others and rank == 0:
                    hint += (
                        "\nIs each message the one of its micro-batch, and whole when it is used?"
                    )
                close(where, f"the gradient of {parameter}", got, wanted, hint=hint,
                      scale=wanted.abs().max().item() * 4 + 1)
        total, where = ranks[-1][step]["total"], f"{name}, step {step}, the last rank"
        if not isinstance(total, torch.Tensor):
            total = torch.tensor(a_number(where, "what run returns", total), dtype=torch.float64)
        total = total.to(case.dtype)  # more digits would be those of a sum in more digits
        close(where, "the sum of the losses", total.reshape(()), loss)


def _judged(name: str, case: Case, rank: int, steps: list[dict]) -> None:
    for step, found in enumerate(steps):
        where = f"{name}, step {step}"
        _messages(where, case, step, rank, found["events"])
        unchanged(where, found["changed"])
        if rank < case.size - 1 and found["total"] is not None:
            raise Wrong(
                f"{where}: run returns {described(found['total'])}; only the last rank knows the "
                "loss, the others return None."
            )
        if found["history"]:
            raise Wrong(f"{where}: the sum of the losses has a history, and holds its graph.")
        for call in found["waits"]:
            raise Wrong(f"{where}: nobody waits for an {call}. When may its tensor be let go?")
        if found["held"]:
            raise Wrong(
                f"{where}: {found['held']} is still held when its B was done long ago.\nWhat is "
                "kept for a micro-batch, and who still names it?"
            )
        if found["kept"]:
            raise Wrong(f"{where}: {found['kept']:,} bytes are still held when run has come back.")


def _messages(where: str, case: Case, step: int, rank: int, events: list) -> None:
    itemsize = case.dtype.itemsize
    one = [rows * torch.Size(case.middle).numel() * case.width * itemsize
           for rows in case.rows[step]]
    neighbours = {other for other in (rank - 1, rank + 1) if 0 <= other < case.size}
    for other in sorted(neighbours | {-1 if e.peer is None else e.peer for e in events}):
        own = [event for event in events if event.peer == (None if other < 0 else other)]
        whom = "" if other < 0 else f", to and from rank {other}"
        communication(where + whom, own, {"send": one, "recv": one} if other in neighbours else {},
                      "One message each way for a micro-batch.")


def _listed(actions) -> str:
    return " ".join(f"{kind}{n}" for kind, n in actions[:12]) + " …" * (len(actions) > 12)


def _short(numbers: tuple) -> str:
    return ", ".join(map(str, numbers[:6])) + ", …" * (len(numbers) > 6)
