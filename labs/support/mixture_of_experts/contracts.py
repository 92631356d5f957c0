"""Given: what exercises 09a, b and c ask for, and how their check cells judge it.

Rows travel between 1 to 6 real ranks, with loads as uneven as they come: ranks without a token,
ranks whose experts nobody wants, experts without rows. What arrives, what comes back and all
gradients must be those of one rank, and no byte too many may travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from utils.course.assertions import SLACK, Wrong, close, nothing_kept, own_size, unchanged
from utils.course.contract import BOTH, Contract
from utils.course.observe import Look
from utils.course.runner import Trial, fractions

LIBRARY = (
    "utils", "deepspeed", "megablocks", "tutel", "fairscale", "transformers", "distributed.nn",
    "dist.nn", "_functional_collectives", "all_to_all_single_autograd",
)
HANG = "Do all ranks call the same all-to-alls, also a rank that has nothing to send?"
ASKED = "without gradients"
WAITS = "\nSome calls are asynchronous: is each waited for before its result is read?"


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
    wanted: tuple[int, ...] | None = None  # all choices fall on these experts
    nan: int | None = None  # the rank whose first token is NaN
    unweighted: int | None = None  # the rank whose weights are all 0; on others those of token 2 …
    late: bool = False
    calls: int = 1

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        wanted = "" if self.wanted is None else f", all of experts {list(self.wanted)}"
        return (
            f"tokens of {self.width} {kind} numbers, {list(self.tokens)} of them by rank, each "
            f"with {self.choices} of {self.experts} experts{wanted}"
        )

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.per_rank * self.size

    def own(self, rank: int) -> slice:
        """The numbers of a rank's experts."""
        return slice(self.per_rank * rank, self.per_rank * (rank + 1))

    def tokens_of(self, rank: int) -> torch.Tensor:
        """(S, C)"""
        tokens = fractions(self.seed + rank, self.tokens[rank], self.width, dtype=self.dtype)
        if rank == self.nan:
            tokens[:1] = torch.nan
        return tokens

    def chosen_of(self, rank: int) -> torch.Tensor:
        """(S, k): different experts for each token."""
        liking = fractions(self.seed + 100 + rank, self.tokens[rank], self.experts)
        if self.wanted is not None:
            liking[:, list(self.wanted)] += 100
        return liking.argsort(dim=1, descending=True)[:, : self.choices].contiguous()

    def weights_of(self, rank: int) -> torch.Tensor:
        """(S, k), which do not add up to one."""
        shape = self.tokens[rank], self.choices
        weights = fractions(self.seed + 200 + rank, *shape, dtype=self.dtype)
        if self.unweighted is not None:
            weights[slice(None) if rank == self.unweighted else slice(2, None, 3)] = 0
        return weights

    def expert(self, number: int) -> torch.Tensor:
        """(C, C): expert `number` makes tanh(x @ matrix) of x."""
        shape = self.width, self.width
        return fractions(self.seed + 400 + number, *shape, dtype=self.dtype) / self.width**0.5

    def gradient_of(self, rank: int, shape: Sequence[int]) -> torch.Tensor:
        """Of what the rank has got; on some ranks one value, expanded."""
        if self.nan is not None and (self.seed + rank) % 2 == 0:
            return torch.tensor(0.7, dtype=self.dtype).expand(shape)
        return fractions(self.seed + 500 + rank, *shape, dtype=self.dtype)

    def counts(self) -> torch.Tensor:
        """(N, E): rows that each rank has for each expert."""
        chosen = (self.chosen_of(rank).flatten() for rank in range(self.size))
        return torch.stack([one.bincount(minlength=self.experts) for one in chosen])

    def table(self) -> torch.Tensor:
        """(N, N): rows that rank r has for rank d."""
        return self.counts().view(self.size, self.size, -1).sum(dim=2)

    def bytes(self, rank: int) -> tuple[int, int]:
        """(of a rank's rows for others, of the rows of others that come to it)."""
        table, row = self.table().fill_diagonal_(0), self.width * self.dtype.itemsize
        return row * int(table[rank].sum()), row * int(table[:, rank].sum())


# for the picture in the notebook: rank 1 has no token
EXAMPLE = Layer((5, 0, 3, 8), choices=2, per_rank=2, width=6, dtype=torch.float64, seed=1)


def layers(trial: Trial, size: int, late: bool = False) -> list[Layer]:
    """A layer with uneven tokens, of a rank that weighs all with 0; and one in which all want few
    experts, with a NaN. On several ranks one has no tokens, and in the second layer none for its
    experts if possible. Hundreds of experts on 3 ranks, hundreds of wide tokens on 2."""
    draw, found = trial.draw, []
    for crowded, dtype in enumerate(draw.sample(BOTH, 2)):
        hundreds = size == 3 and not (late or crowded)
        per_rank = draw.randrange(90, 110) if hundreds else draw.randrange(1 + (size == 1), 4)
        choices = draw.randrange(6 if hundreds else 1, min(8, per_rank * size) + 1)
        tokens, idle = [draw.randrange(1, 9) for _ in range(size)], draw.randrange(size)
        tokens[idle] *= size == 1  # several ranks: one has no token
        layer = Layer(tuple(tokens), choices, per_rank, draw.randrange(1, 8), dtype,
                      trial.new_seed(), late=late)
        if not crowded:
            some = [rank for rank, count in enumerate(tokens) if count]
            found.append(replace(layer, unweighted=draw.choice(some) if len(some) > 1 else -1))
            continue
        if size == 3:  # one expert has far more than its share
            tokens = tuple(count and count + 6 for count in tokens)
            layer = replace(layer, tokens=tokens, choices=1, per_rank=3)
        first = draw.randrange(layer.per_rank) + (idle + 1) * layer.per_rank
        wanted = sorted((first + i) % layer.experts for i in range(layer.choices))
        layer = replace(layer, wanted=tuple(wanted), nan=draw.randrange(size))
        if size == 2 and not late:  # more rows than fit into a byte, more numbers than 50,000
            many = draw.randrange(280, 400), draw.randrange(280, 400)
            layer = replace(layer, tokens=many, choices=1, width=draw.randrange(180, 200))
        found.append(layer)
    return found


# ---- the shape of all three exercises: rows go, and their gradients come back


class Right(NamedTuple):
    """What a rank should get; gradients by leaf; looks_like: {words: what a wrong result is}."""

    result: torch.Tensor
    gradients: dict[str, list[torch.Tensor]]
    looks_like: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Journey:
    """What a function that moves rows between ranks promises, there and back.

    begin    (answer, layer, rank) -> function, {name: argument}, {name: leaves with gradients}
    right    (where, layer, [found on each rank]) -> a Right for each; raises Wrong
    sent     (layer, rank) -> bytes for others in each all-to-all: forward, backward
    result   what the sentences call it; hints: questions, "" for the result, others by leaf
    slack    of the result, as in `close`
    first    a contract that is looked at before; its messages may come before the rows
    says     what was looked at, of an answer that is right
    """

    begin: Callable[..., tuple[Callable, dict, dict]]
    right: Callable[[str, Layer, list[dict]], list[Right]]
    sent: Callable[[Layer, int], tuple[list[int], list[int]]]
    result: str
    hints: dict[str, str]
    says: str
    slack: float = SLACK
    first: Contract | None = None

    def judge(self, trial: Trial) -> str:
        """For `check`: what was looked at; raises Wrong."""
        trial.forbid(LIBRARY)
        for group in trial.groups(hang=HANG):
            if self.first:
                self.first.kept_by(trial, group)
            # a network on which messages come late differs only for who does not wait: first
            for late in (True, False) if group.size in (2, 3) else (False,):
                several, slow = layers(trial, group.size, late), ", messages that come late" * late
                case = group.case(" beside ".join(map(str, several))) + slow
                seen = zip(*group.run(case, observed, self.begin, several, late=late))
                for layer, found in zip(several, seen):
                    self.looked_at(group.case(str(layer)) + slow, layer, found)
        return self.says

    def looked_at(self, case: str, layer: Layer, ranks: Sequence[dict]) -> None:
        """Raises Wrong for what the ranks have found."""
        every = self.right(case, layer, ranks)
        for rank, (found, right) in enumerate(zip(ranks, every)):
            where, likes = f"{case}, rank {rank}", right.looks_like
            unchanged(where, found["changed"])
            hint = next((w for w, x in likes.items() if near(found["result"], x)), self.hints[""])
            for when, name in (("", "result"), (f", {ASKED}", "asked")):
                close(where + when, self.result, found[name], right.result, dtype=layer.dtype,
                      hint=hint + waits(found), slack=self.slack, scale=1)
        scale = 4 * (sum(layer.tokens) * layer.choices) ** 0.5
        for rank, (found, right) in enumerate(zip(ranks, every)):
            where = f"{case}, rank {rank}"
            for name, several in right.gradients.items():
                hint = self.hints[name] + waits(found)
                for number, wanted in enumerate(several):
                    what = f"{name} {number}" if len(several) > 1 else f"the {name}"
                    got = found["gradients"][name][number]
                    if got is None:
                        raise Wrong(f"{where}: no gradient comes back to {what}.\n{hint}")
                    close(where, f"the gradient of {what}", got, wanted, hint=hint, scale=scale)
        for rank, found in enumerate(ranks):
            where, (there, back) = f"{case}, rank {rank}", self.sent(layer, rank)
            for when in ("forward", ASKED):
                events = found[when]  # counts may be gathered, too: the longest way
                if self.first and events[:1] and events[0].sent <= 8 * layer.experts * layer.size:
                    events = events[1:]
                exchanges(f"{where}, {when}", layer.size, events, there)
            exchanges(f"{where}, backward", layer.size, found["backward"], back)
            nothing_kept(where, found["kept"], "What is kept that nobody needs any more?")
            own_size(where, found["spare"])


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = {"rtol": 1e-4, "atol": 1e-6, "equal_nan": True}
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), **same)


def exchanges(case: str, size: int, events: Sequence, right: list[int]) -> None:
    """So many all-to-alls, with so many bytes for other ranks; one rank may do without."""
    seen = [(event.op, int(event.sent)) for event in events]
    wanted = [("all_to_all", sent) for sent in right]
    if seen != wanted and (seen or size > 1):
        calls = ", ".join(f"{op} with {sent:,} bytes for others" for op, sent in seen)
        sizes = " and one of ".join(f"{sent:,}" for sent in right)
        raise Wrong(
            f"{case}: this rank calls {calls or 'nothing'}; one all-to-all of {sizes} will do.\n"
            "Each row goes to one rank only, and nothing needs filling up: it takes a size for "
            "every rank."
        )


def waits(found: dict) -> str:
    events = [*found["forward"], *found["backward"]]
    return WAITS if any(event.asynchronous for event in events) else ""


# ---- on a rank


def observed(answer: Any, begin: Callable, several: list[Layer]) -> list[dict]:
    """The function with each layer, also without gradients; only then all gradients back."""
    rank = dist.get_rank()
    runs = [there(answer, begin, layer, rank) for layer in several]
    for layer, run in zip(several, runs):
        back(run, layer, rank)
    for run in runs:
        run["kept"] = run.pop("look").kept(run["gradients"])
    return runs


def there(answer: Any, begin: Callable, layer: Layer, rank: int) -> dict:
    function, given, leaves = begin(answer, layer, rank)
    inputs = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    way, look = given.get("way"), Look(**inputs)
    before = way and as_lists(way)
    with look:
        result = function(*given.values())
    if way and as_lists(way) != before:
        raise Wrong("the Way is not what it was before the call, and its owner still needs it.")
    result, noted = result if isinstance(result, tuple) else (result, None)
    if not isinstance(result, torch.Tensor) or not result.requires_grad:
        raise Wrong(
            "no gradient can come back from what it returns.\nRows must travel through "
            "AllToAll.apply, whose forward returns a new tensor."
        )
    found = {
        "result": result.detach().clone(), "way": noted and as_lists(noted), "live": result,
        "forward": look.events[:], "spare": look.spare(result), "look": look, "leaves": leaves,
    }
    with torch.no_grad(), look:
        asked = function(*(x.detach() if name in inputs else x for name, x in given.items()))
    found["asked"] = (asked[0] if isinstance(asked, tuple) else asked).clone()
    found[ASKED] = look.events[len(found["forward"]) :]
    return found


def back(run: dict, layer: Layer, rank: int) -> None:
    look, result = run["look"], run.pop("live")
    gradient, before = layer.gradient_of(rank, result.shape), len(look.events)
    with Look(gradient=gradient) as beside, look:
        result.backward(gradient)
    leaves = run.pop("leaves").items()
    run["gradients"] = {name: [leaf.grad for leaf in several] for name, several in leaves}
    run["spare"] += look.spare(run["gradients"])
    run["backward"], run["changed"] = look.events[before:], look.changed() + beside.changed()


def as_lists(way: Any) -> dict[str, list[int]]:
    """What a `Way` says, in lists, tuples or tensors of whole numbers."""
    names = "order", "send", "receive", "by_expert", "loads"
    return {name: [int(number) for number in getattr(way, name)] for name in names}


# ---- exercise a


def rows_of(layer: Layer, rank: int) -> torch.Tensor:
    """(sum(send), C); not contiguous on every other rank."""
    count = int(layer.table()[rank].sum())
    rows = fractions(layer.seed + 600 + rank, count, layer.width, dtype=layer.dtype)
    if rank == layer.nan:
        rows[::2, 0] = torch.nan
    return rows.T.contiguous().T if (layer.seed + rank) % 2 else rows


def exchange(answer: Any, layer: Layer, rank: int) -> tuple[Callable, dict, dict]:
    rows, table = rows_of(layer, rank).requires_grad_(), layer.table()
    given = {"rows": rows, "send": table[rank].tolist(), "receive": table[:, rank].tolist()}
    return answer.AllToAll.apply, given, {"rows": [rows]}


def exchanged(case: str, layer: Layer, ranks: list[dict]) -> list[Right]:
    table, every = layer.table(), range(layer.size)
    rows = [rows_of(layer, r).split(table[r].tolist()) for r in every]
    shapes = [(int(table[:, r].sum()), layer.width) for r in every]
    came = [layer.gradient_of(r, shapes[r]).split(table[:, r].tolist()) for r in every]
    there, back = ([torch.cat(parts) for parts in zip(*one)] for one in (rows, came))
    return [Right(result, {"rows": [gradient]}, {}) for result, gradient in zip(there, back)]


ALL_TO_ALL = Journey(
    exchange, exchanged, lambda layer, rank: tuple([one] for one in layer.bytes(rank)),
    result="what arrives", slack=0.0,
    hints={
        "": "send[d] rows go to rank d, receive[r] come from rank r.",
        "rows": "A row came from rank r: its gradient goes back there. What was received is sent.",
    },
    says="every row arrives on 1 to 6 ranks, in fp32 and fp64, with ranks that send or get none,\n"
    "many and wide rows, late messages, and several exchanges before the first way back;\n"
    "gradients come back to the rows that they belong to, and nothing is kept;\n"
    "one all-to-all in each direction, and not a byte too many.",
)

# ---- exercise b


def counts_to_tell(layer: Layer, rank: int, n: int, call: int) -> tuple[torch.Tensor]:
    """(E) numbers, up to a thousand millions."""
    generator = torch.Generator().manual_seed(layer.seed + 300 + rank)
    return (torch.randint(2**30, (layer.experts,), generator=generator),)


def told(layer: Layer, given: list, rank: int) -> torch.Tensor:
    return torch.stack([counts[layer.own(rank)] for (counts,) in given]).double()


# numbers of rows that do not fit together would end the process: so this is looked at first
TELL = Contract(
    "tell", counts_to_tell, told, cases=lambda trial, n: layers(trial, n, late=n in (2, 3)),
    result="tell's table", slack=0.0,
    symptoms=[
        (lambda seen: seen.result.flatten().equal(seen.own[0]),
         "These are this rank's own counts: who tells it the others'?"),
        (lambda seen: True,
         "Row r is what rank r has for each expert of this rank: from every rank its part."),
    ],
)
WAY = {
    "loads": "tell() brings the counts of all ranks: add them up for each expert of this rank.",
    "send": "Add up this rank's own counts for the experts of each rank.",
    "receive": "How many rows each rank sends to this one: tell() says it.",
}


def send_out(answer: Any, layer: Layer, rank: int) -> tuple[Callable, dict, dict]:
    tokens = layer.tokens_of(rank).requires_grad_()
    given = {"tokens": tokens, "chosen": layer.chosen_of(rank), "experts": layer.experts}
    return answer.dispatch, given, {"tokens": [tokens]}


def sent_out(case: str, layer: Layer, ranks: list[dict]) -> list[Right]:
    """The rows in the order that each `Way` says, which must say it as its comments do."""
    counts, table, sent = layer.counts(), layer.table(), []  # what is sent: (experts, tokens)
    for rank, found in enumerate(ranks):
        where, way, here = f"{case}, rank {rank}", found["way"], counts[:, layer.own(rank)]
        right = {"loads": here.sum(dim=0), "send": table[rank], "receive": table[:, rank]}
        for name, hint in WAY.items():
            if way[name] != right[name].tolist():
                wanted = right[name].tolist()
                raise Wrong(f"{where}: way.{name} is {way[name]}, and {wanted} is right.\n{hint}")
        order = a_permutation(where, "way.order", way["order"], int(table[rank].sum()))
        experts = layer.chosen_of(rank).flatten()[order]
        if (experts // layer.per_rank).diff().lt(0).any():
            raise Wrong(
                f"{where}: way.order does not put the rows for rank 0 first, then those for rank 1 "
                "…"
            )
        sent.append((experts, order // layer.choices + sum(layer.tokens[:rank])))
    experts, origins = map(torch.cat, zip(*sent))
    tokens = torch.cat([layer.tokens_of(r) for r in range(layer.size)])
    gradients, results = torch.zeros_like(tokens, dtype=torch.float64), []
    for rank, found in enumerate(ranks):
        where, here = f"{case}, rank {rank}", experts // layer.per_rank == rank
        order = a_permutation(where, "way.by_expert", found["way"]["by_expert"], int(here.sum()))
        arrived = tokens[origins[here]]
        if experts[here][order].diff().lt(0).any():
            raise Wrong(
                f"{where}: way.by_expert does not put the rows of this rank's first expert first …"
            )
        gradient = layer.gradient_of(rank, found["result"].shape)
        if gradient.shape == arrived.shape:
            gradients.index_add_(0, origins[here][order], gradient.double())
        words = "These are the right rows, not expert by expert: they came rank by rank."
        results.append((arrived[order], {words: arrived}))
    parts = gradients.split(layer.tokens)
    return [Right(x, {"tokens": [part]}, likes) for (x, likes), part in zip(results, parts)]


def a_permutation(case: str, name: str, got: list[int], count: int) -> torch.Tensor:
    if sorted(got) != list(range(count)):
        raise Wrong(f"{case}: {name} does not name each of {count} places once.")
    return torch.tensor(got, dtype=torch.long)


DISPATCH = Journey(
    send_out, sent_out, ALL_TO_ALL.sent, result="rows", slack=0.0, first=TELL,
    hints={
        "": "Whose tokens are they? A row is tokens[place // k], in the order that way says.",
        "tokens": "A token has one row for each choice, and its gradient is their sum.",
    },
    says="every row is at its expert, and its gradient comes back, on 1 to 6 ranks, in fp32 and\n"
    "fp64, from ranks without tokens, with hundreds of experts, and late messages;\n"
    "two messages, the counts and the rows, and no row too many; nothing is kept.",
)

# ---- exercise c


def bring_home(answer: Any, layer: Layer, rank: int) -> tuple[Callable, dict, dict]:
    tokens, weights = layer.tokens_of(rank).requires_grad_(), layer.weights_of(rank)
    own = range(layer.experts)[layer.own(rank)]
    experts = [layer.expert(number).requires_grad_() for number in own]
    rows, way = answer.dispatch(tokens, layer.chosen_of(rank), layer.experts)
    parts = zip(rows.split(as_lists(way)["loads"]), experts)
    made = torch.cat([torch.tanh(part @ matrix) for part, matrix in parts])
    leaves = {"weights": [weights.requires_grad_()], "tokens": [tokens], "experts": experts}
    return answer.combine, {"results": made, "weights": weights, "way": way}, leaves


def brought_home(case: str, layer: Layer, ranks: list[dict]) -> list[Right]:
    """One rank, in fp64."""
    every = range(layer.size)
    tokens = [layer.tokens_of(r).double().requires_grad_() for r in every]
    weights = [layer.weights_of(r).double().requires_grad_() for r in every]
    experts = [layer.expert(e).double().requires_grad_() for e in range(layer.experts)]
    results, likes, total = [], [], 0.0
    for r in every:
        chosen = layer.chosen_of(r)
        made = torch.zeros(*chosen.shape, layer.width, dtype=torch.float64)  # (S, k, C)
        for e in chosen.unique().tolist():
            places = (chosen == e).nonzero(as_tuple=True)
            made = made.index_put(places, torch.tanh(tokens[r][places[0]] @ experts[e]))
        y, plain = (weights[r][..., None] * made).sum(dim=1), made.detach().sum(dim=1)
        total = total + (y * layer.gradient_of(r, y.shape).double()).sum()
        results.append(y.detach())
        likes.append({
            "This is the plain sum of the results: weigh each with its weight.": plain,
            "This is the mean of the results: weigh each with its weight.": plain / layer.choices,
        })
    leaves = [*tokens, *weights, *experts]
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    gradients = [
        {"weights": [found[layer.size + r]], "tokens": [found[r]],
         "experts": found[2 * layer.size :][layer.own(r)]}
        for r in every
    ]
    return [Right(*of_rank) for of_rank in zip(results, gradients, likes)]


def sent_home(layer: Layer, rank: int) -> tuple[list[int], list[int]]:
    """Back from the tokens to the experts, and from there to the tokens."""
    out, came = layer.bytes(rank)
    return [came], [out, came]


COMBINE = Journey(
    bring_home, brought_home, sent_home, result="the layer's output",
    hints={
        "": "Undo the steps of dispatch, the last one first: each sorting has an inverse, "
        "argsort().",
        "weights": "Does the router get a gradient? Weigh the results with `weights` itself.",
        "tokens": "Rows must travel through AllToAll.apply on both ways.",
        "experts": "An expert's gradient is the sum over the tokens of all ranks.",
    },
    says="outputs and gradients equal one rank's on 1 to 6 ranks, in fp32 and fp64, also\n"
    "on ranks without tokens, with a NaN, weights of 0, and when messages come late;\n"
    "each result travels once, back to its token, and so does each gradient; nothing is kept.",
)
all_to_all, dispatching, combining = ALL_TO_ALL.judge, DISPATCH.judge, COMBINE.judge
