"""Given: the contracts of exercises 09a, b and c, and the judges behind their check cells.

Rows are exchanged among 1 to 6 real ranks, with very uneven loads: ranks without a token, ranks
whose experts no token chooses, experts without rows. The rows that arrive, the results that return
and all gradients must equal those of one rank, and not a byte too many may be sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, close, unchanged
from utils.course.contract import BOTH
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

LIBRARY = (
    "utils", "deepspeed", "megablocks", "tutel", "fairscale", "transformers", "distributed.nn",
    "dist.nn", "_functional_collectives", "all_to_all_single_autograd",
)
HANG = "Do all ranks call the same all-to-alls, even a rank that has nothing to send?"
WAITS = "\nSome calls are asynchronous: is each waited on before its result is read?"


# ---- cases


@dataclass(frozen=True)
class Layer:
    """A layer of experts, and the tokens of all ranks."""

    tokens: tuple[int, ...]  # S, by rank
    choices: int  # k
    per_rank: int  # experts of a rank, E/N
    width: int  # C
    dtype: torch.dtype
    seed: int
    wanted: tuple[int, ...] = ()  # all choices fall on these experts

    def __str__(self):
        wanted = f", all of experts {list(self.wanted)}" if self.wanted else ""
        return (
            f"tokens of {self.width} values in {self.dtype}, {list(self.tokens)} of them by rank, "
            f"each with {self.choices} of {self.experts} experts{wanted}"
        )

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.per_rank * self.size

    def own(self, rank: int) -> range:
        """The indices of a rank's experts."""
        return range(self.per_rank * rank, self.per_rank * (rank + 1))

    def drawn(self, number: int, *shape: int) -> torch.Tensor:
        """Values of the layer's type, the same on every rank."""
        return fractions(self.seed + number, *shape, dtype=self.dtype)

    def tokens_of(self, rank: int) -> torch.Tensor:
        """(S, C)"""
        return self.drawn(rank, self.tokens[rank], self.width)

    def chosen_of(self, rank: int) -> torch.Tensor:
        """(S, k): different experts for each token."""
        liking = fractions(self.seed + 100 + rank, self.tokens[rank], self.experts)
        liking[:, list(self.wanted)] += 100
        return liking.argsort(dim=1, descending=True)[:, : self.choices].contiguous()

    def table(self) -> torch.Tensor:
        """(N, E): rows that each rank has for each expert."""
        chosen = (self.chosen_of(rank).flatten() for rank in range(self.size))
        return torch.stack([one.bincount(minlength=self.experts) for one in chosen])

    def rows(self) -> list[list[int]]:
        """[r][d]: rows that rank r has for rank d."""
        return self.table().view(self.size, self.size, -1).sum(dim=2).tolist()

    def bytes(self, rank: int) -> tuple[list[int], list[int]]:
        """Bytes ([of a rank's rows for others], [of the rows that others send it])."""
        rows, row = torch.tensor(self.rows()).fill_diagonal_(0), self.width * self.dtype.itemsize
        return [row * int(rows[rank].sum())], [row * int(rows[:, rank].sum())]


# for the picture in the notebook: rank 1 has no token
EXAMPLE = Layer((5, 0, 3, 8), choices=2, per_rank=2, width=6, dtype=torch.float64, seed=1)


def layers(trial: Trial, size: int) -> list[Layer]:
    """A layer with uneven tokens, and one in which all tokens choose a few experts. On several
    ranks, one has no tokens and, in the second layer, none for its experts if possible."""
    draw, found = trial.draw, []
    for dtype in draw.sample(BOTH, 2):
        per_rank = draw.randrange(1 + (size == 1), 4)
        choices = draw.randrange(1, min(8, per_rank * size) + 1)
        tokens, idle = [draw.randrange(1, 9) for _ in range(size)], draw.randrange(size)
        tokens[idle] *= size == 1
        width, seed = draw.randrange(1, 8), trial.new_seed()
        found.append(Layer(tuple(tokens), choices, per_rank, width, dtype, seed))
    first = draw.randrange(per_rank) + (idle + 1) * per_rank
    wanted = sorted((first + i) % (per_rank * size) for i in range(choices))
    return [found[0], replace(found[1], wanted=tuple(wanted))]


# ---- the form of all three exercises: rows go out, and their gradients come back


@dataclass(frozen=True)
class Journey:
    """The contract of a function that moves rows between ranks, forward and backward.

    leaves   (layer, rank) -> {name: a tensor that gets a gradient}
    begin    (answer, layer, rank, leaves) -> function, its arguments
    right    (layer, [leaves of each rank]) -> [result of each rank], differentiable
    sent     (layer, rank) -> bytes for others in each all-to-all: forward, backward
    result   its name in messages; hints: questions, "" for the result, others by leaf
    tells    whether its first message tells the ranks how many rows will come
    says     the text for a right answer
    """

    leaves: Callable[[Layer, int], dict[str, torch.Tensor]]
    begin: Callable[[Any, Layer, int, dict], tuple[Callable, tuple]]
    right: Callable[[Layer, list[dict]], list[torch.Tensor]]
    sent: Callable[[Layer, int], tuple[list[int], list[int]]]
    result: str
    hints: dict[str, str]
    says: str
    tells: bool = False

    def judge(self, trial: Trial) -> str:
        """For `check`: return what was checked; raises Wrong."""
        trial.forbid(LIBRARY)
        for group in trial.groups(hang=HANG):
            # late messages catch answers that do not wait: they come first
            for late in (True, False) if group.size in (2, 3) else (False,):
                several, slow = layers(trial, group.size), ", messages that arrive late" * late
                case = group.case(" and ".join(map(str, several))) + slow
                group.run(case, travels, self, several, late=late)
        return self.says


def travels(answer: Any, journey: Journey, several: list[Layer]) -> None:
    """On a rank: call the function with each layer, and only then run all backward passes; raises
    Wrong."""
    rank, on_the_way = dist.get_rank(), []
    for layer in several:
        every = [journey.leaves(layer, r) for r in range(layer.size)]
        leaves = {name: x.clone().requires_grad_() for name, x in every[rank].items()}
        function, given = journey.begin(answer, layer, rank, leaves)
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        with Look(**{f"argument {i}": x for i, x in enumerate(tensors, 1)}) as look:
            result = function(*given)
        unchanged(str(layer), look.changed())
        wide = [{n: x.double().requires_grad_() for n, x in one.items()} for one in every]
        right, waits = journey.right(layer, wide), waited(look)
        close(str(layer), journey.result, result, right[rank], dtype=layer.dtype,
              hint=journey.hints[""] + waits, scale=1)
        if not result.requires_grad:
            raise Wrong(
                "no gradient can flow back from what it returns.\nRows must pass through "
                "AllToAll.apply, whose forward returns a new tensor."
            )
        exchanges("forward", layer, look, journey.sent(layer, rank)[0], journey.tells)
        on_the_way.append((layer, leaves, wide, right, result, waits))
    for layer, leaves, wide, right, result, waits in on_the_way:
        back = [layer.drawn(500 + r, *x.shape) for r, x in enumerate(right)]
        if layer.wanted:  # as from sum()
            back = [torch.full((), 0.7, dtype=layer.dtype).expand(x.shape) for x in right]
        total = sum((x * gradient).sum() for x, gradient in zip(right, back))
        wanted = torch.autograd.grad(total, [*wide[rank].values()], materialize_grads=True)
        with Look() as look:
            result.backward(back[rank])
        for (name, leaf), gradient in zip(leaves.items(), wanted):
            hint = journey.hints[name.split()[0]] + (waits or waited(look))
            if leaf.grad is None:
                raise Wrong(f"{layer}: no gradient flows back to the {name}.\n{hint}")
            close(str(layer), f"the gradient of the {name}", leaf.grad, gradient, hint=hint,
                  slack=512, scale=1)
        exchanges("backward", layer, look, journey.sent(layer, rank)[1])


def waited(look: Look) -> str:
    return WAITS * any(event.asynchronous for event in look.events)


def exchanges(when: str, layer: Layer, look: Look, right: list[int], tells: bool = False) -> None:
    """There is one all-to-all for each entry of `right`, with that many bytes for other ranks; a
    single rank may do without. tells: another message comes first."""
    seen = [(event.op, int(event.sent)) for event in look.events]
    wanted = seen[:tells] + [("all_to_all", sent) for sent in right]
    if seen != wanted and (seen[tells:] or layer.size > 1):
        calls = ", ".join(f"{op} with {sent:,} bytes for others" for op, sent in seen)
        sizes = " and one of ".join(f"{sent:,}" for sent in right)
        raise Wrong(
            f"{layer}, {when}: this rank calls {calls or 'nothing'}; one all-to-all of {sizes} "
            f"is enough{', after one of the counts' * tells}.\nEach row goes to one rank only, and "
            "no padding is needed: an all-to-all takes a size for every rank."
        )


# ---- exercise a


def rows_to_send(layer: Layer, rank: int) -> dict[str, torch.Tensor]:
    """(sum(send), C); not contiguous on every other rank."""
    rows = layer.drawn(600 + rank, layer.width, sum(layer.rows()[rank])).T
    return {"rows": rows if rank % 2 else rows.contiguous()}


def exchange(answer: Any, layer: Layer, rank: int, leaves: dict) -> tuple[Callable, tuple]:
    rows = layer.rows()
    return answer.AllToAll.apply, (leaves["rows"], rows[rank], [row[rank] for row in rows])


def exchanged(layer: Layer, leaves: list[dict]) -> list[torch.Tensor]:
    parts = [one["rows"].split(counts) for one, counts in zip(leaves, layer.rows())]
    return [torch.cat(came) for came in zip(*parts)]


ALL_TO_ALL = Journey(
    rows_to_send, exchange, exchanged, lambda layer, rank: layer.bytes(rank),
    result="what arrives",
    hints={
        "": "send[d] rows go to rank d, receive[r] come from rank r.",
        "rows": "A row came from rank r: its gradient goes back there. Backward, `receive` is what "
        "a rank sends.",
    },
    says="every row arrives on 1 to 6 ranks, in fp32 and fp64, with ranks that send or get none,\n"
    "late messages, and two exchanges before the first backward pass;\n"
    "gradients return to the rows that they belong to;\n"
    "one all-to-all in each direction, and not a byte too many.",
)

# ---- exercise b

WAY = {
    "loads": "tell() returns the counts of all ranks: add them up for each expert of this rank.",
    "send": "Add up this rank's own counts for the experts of each rank.",
    "receive": "tell() says how many rows each rank sends to this one.",
}


def send_out(answer: Any, layer: Layer, rank: int, leaves: dict) -> tuple[Callable, tuple]:
    """The rows of an expert may arrive in any order, and are sorted for the comparison."""
    table, rows = layer.table(), layer.rows()
    right = {
        "loads": table[:, layer.own(rank)].sum(dim=0).tolist(), "send": rows[rank],
        "receive": [row[rank] for row in rows],
    }

    def dispatched(*given: Any) -> torch.Tensor:
        found, way = answer.dispatch(*given)
        for name, hint in WAY.items():
            if (got := [int(n) for n in getattr(way, name)]) != right[name]:
                raise Wrong(f"{layer}: way.{name} is {got}, and {right[name]} is right.\n{hint}")
        if len(found) != sum(right["loads"]):
            raise Wrong(f"{layer}: {len(found)} rows arrive; {sum(right['loads'])} are right.")
        return by_size(found.split(right["loads"]))

    return dispatched, (leaves["tokens"], layer.chosen_of(rank), layer.experts)


def by_size(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part[part[:, 0].argsort()] for part in parts])


def sent_out(layer: Layer, leaves: list[dict]) -> list[torch.Tensor]:
    tokens = torch.cat([one["tokens"] for one in leaves])
    chosen = torch.cat([layer.chosen_of(r) for r in range(layer.size)])
    return [
        by_size([tokens[(chosen == expert).any(dim=1)] for expert in layer.own(r)])
        for r in range(layer.size)
    ]


DISPATCH = Journey(
    lambda layer, rank: {"tokens": layer.tokens_of(rank)}, send_out, sent_out, ALL_TO_ALL.sent,
    result="rows", tells=True,
    hints={
        "": "Are they the rows of this rank's first expert, then those of its second …? A row is\n"
        "tokens[place // k]; way.order puts those for rank 0 first. Rows arrive ordered by rank.",
        "tokens": "A token has one row for each choice, and its gradient is their sum. Rows must "
        "pass\nthrough AllToAll.apply.",
    },
    says="every row reaches its expert, and its gradient returns, on 1 to 6 ranks, in fp32 and\n"
    "fp64, even with ranks without tokens and late messages;\n"
    "two messages, the counts and the rows, and not a row too many.",
)

# ---- exercise c


def of_a_layer(layer: Layer, rank: int) -> dict[str, torch.Tensor]:
    """Weights that do not add up to one; an expert computes tanh(x @ matrix)."""
    c = layer.width
    experts = {f"expert {e}": layer.drawn(400 + e, c, c) / c**0.5 for e in layer.own(rank)}
    weights = layer.drawn(200 + rank, layer.tokens[rank], layer.choices)
    return {"weights": weights, "tokens": layer.tokens_of(rank)} | experts


def bring_home(answer: Any, layer: Layer, rank: int, leaves: dict) -> tuple[Callable, tuple]:
    rows, way = answer.dispatch(leaves["tokens"], layer.chosen_of(rank), layer.experts)
    parts = zip(rows.split([int(n) for n in way.loads]), layer.own(rank))
    made = torch.cat([torch.tanh(part @ leaves[f"expert {e}"]) for part, e in parts])
    return answer.combine, (made, leaves["weights"], way)


def brought_home(layer: Layer, leaves: list[dict]) -> list[torch.Tensor]:
    """The result of one rank, where every expert computes every token."""
    experts = torch.stack([
        leaves[r][f"expert {e}"] for r in range(layer.size) for e in layer.own(r)
    ])
    found = []
    for r, one in enumerate(leaves):
        made = torch.tanh(one["tokens"] @ experts)  # (E, S, C)
        chosen = layer.chosen_of(r)
        mine = made[chosen, torch.arange(len(chosen))[:, None]]  # (S, k, C)
        found.append((one["weights"][..., None] * mine).sum(dim=1))
    return found


def sent_home(layer: Layer, rank: int) -> tuple[list[int], list[int]]:
    """Bytes sent forward, back to the tokens, and backward: to the experts, then to the tokens."""
    out, came = layer.bytes(rank)
    return came, out + came


COMBINE = Journey(
    of_a_layer, bring_home, brought_home, sent_home, result="the layer's output",
    hints={
        "": "Undo the steps of dispatch, the last one first: each sort has an inverse, argsort().\n"
        "Then multiply each result by its weight, as it is, and add them up.",
        "weights": "Does the router get a gradient? Multiply the results by `weights` itself.",
        "tokens": "Rows must pass through AllToAll.apply in both directions.",
        "expert": "An expert's gradient is the sum over the tokens of all ranks.",
    },
    says="outputs and gradients equal one rank's on 1 to 6 ranks, in fp32 and fp64, even\n"
    "on ranks without tokens and when messages arrive late;\n"
    "each result is sent once, back to its token, and so is each gradient.",
)
all_to_all, dispatching, combining = ALL_TO_ALL.judge, DISPATCH.judge, COMBINE.judge
