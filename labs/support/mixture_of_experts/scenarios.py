"""Given: what the ranks do for a check, with loads that are as uneven as they come."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong
from utils.course.observe import Look
from utils.course.runner import fractions

# ---- exercise a


@dataclass(frozen=True)
class Table:
    """Rows to exchange. counts[r][d]: rows that rank r has for rank d; odd: some are NaN or −0, on
    every other rank they are not contiguous, and on the rest the gradient of what arrives is one
    value, expanded."""

    counts: tuple[tuple[int, ...], ...]
    width: int  # C
    dtype: torch.dtype
    seed: int
    odd: bool = False

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        return f"rows of {self.width} {kind} numbers, by rank and goal {_short(self.counts)}"

    @property
    def size(self) -> int:
        return len(self.counts)

    def send(self, rank: int) -> list[int]:
        return list(self.counts[rank])

    def receive(self, rank: int) -> list[int]:
        return [row[rank] for row in self.counts]

    def rows(self, rank: int) -> torch.Tensor:
        """(sum(send), C)"""
        rows = fractions(self.seed + rank, sum(self.counts[rank]), self.width, dtype=self.dtype)
        if self.odd:
            rows[::2, 0], rows[1::2, 0] = torch.nan, -0.0
            rows = rows.T.contiguous().T if (self.seed + rank) % 2 else rows
        return rows

    def gradient(self, rank: int) -> torch.Tensor:
        """(sum(receive), C), of what arrived."""
        if self.odd and (self.seed + rank) % 2 == 0:
            return torch.full((1, 1), 0.7, dtype=self.dtype).expand(
                sum(self.receive(rank)), self.width
            )
        return fractions(
            self.seed + 100 + rank, sum(self.receive(rank)), self.width, dtype=self.dtype
        )


def exchange(answer, tables: list[Table]) -> list[dict]:
    """On a rank: rows by each table, there, and then the gradients of each back; and once more for
    whoever asks for no gradient."""
    rank, runs, results = dist.get_rank(), [], []
    for table in tables:
        rows = table.rows(rank).requires_grad_()
        send, receive = table.send(rank), table.receive(rank)
        look = Look(rows=rows)
        with look:
            arrived = answer.AllToAll.apply(rows, send, receive)
        _expect_shape("forward", arrived, (sum(receive), table.width), "sum(receive) rows arrive.")
        if not arrived.requires_grad:
            raise Wrong("forward: no gradient can come back to the rows from what arrived.")
        result = {
            "saved": look.kept(arrived),
            "arrived": arrived.detach().clone(),
            "forward": look.events[:],
            "spare": look.spare(arrived),
        }
        with torch.no_grad(), look:
            lists = table.send(rank), table.receive(rank)
            asked = answer.AllToAll.apply(rows.detach(), *lists)
        result |= {
            "asked": asked.clone(),
            "asking": look.events[len(result["forward"]) :],
            "changed": look.changed(),
        }
        runs.append((table, rows, send, receive, arrived, look))
        results.append(result)
    del arrived, rows, look, asked
    for result, (table, rows, send, receive, arrived, look) in zip(results, runs):
        gradient, before = table.gradient(rank), len(look.events)
        with Look(gradient=gradient) as back, look:
            arrived.backward(gradient)
        result |= {
            "gradient": rows.grad,
            "backward": look.events[before:],
            "changed back": back.changed(),
        }
        result["changed"] += look.changed() + ["send"] * (send != table.send(rank))
        result["changed"] += ["receive"] * (receive != table.receive(rank))
        result["spare"] += back.spare(rows.grad)
        del arrived, gradient, back
    looks = [(look, rows.grad) for _, rows, *_, look in runs]
    runs.clear()
    for result, (look, gradient) in zip(results, looks):
        result["kept"] = look.kept(gradient)
    return results


# ---- exercises b and c


@dataclass(frozen=True)
class Case:
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

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        wanted = "" if self.wanted is None else f", all of experts {list(self.wanted)}"
        return (
            f"tokens of {self.width} {kind} numbers, {_short(self.tokens)} of them by rank, each "
            f"with {self.choices} of {self.experts} experts{wanted}"
        )

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.per_rank * self.size

    def own(self, rank: int) -> range:
        """The numbers of a rank's experts."""
        return range(self.per_rank * rank, self.per_rank * (rank + 1))

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
        weights = fractions(
            self.seed + 200 + rank, self.tokens[rank], self.choices, dtype=self.dtype
        )
        if self.unweighted is not None:
            weights[slice(None) if rank == self.unweighted else slice(2, None, 3)] = 0
        return weights

    def counts_of(self, rank: int, most: int, turn: int = 0) -> torch.Tensor:
        """(E) numbers below `most`, for `tell` alone; in every turn others, but not on rank 0."""
        generator = torch.Generator().manual_seed(self.seed + 300 + rank + 1000 * turn * rank)
        return torch.randint(most, (self.experts,), generator=generator)

    def expert(self, number: int) -> torch.Tensor:
        """(C, C): expert `number` makes tanh(x @ matrix) of x."""
        shape = self.width, self.width
        return fractions(self.seed + 400 + number, *shape, dtype=self.dtype) / self.width**0.5

    def gradient_of(self, rank: int, rows: int) -> torch.Tensor:
        """(rows, C), of what comes back to a rank, or of what its experts get."""
        return fractions(self.seed + 500 + rank, rows, self.width, dtype=self.dtype)


# for the picture in the notebook: rank 1 has no token
EXAMPLE = Case((5, 0, 3, 8), choices=2, per_rank=2, width=6, dtype=torch.float64, seed=1)


def send_out(answer, cases: list[Case]) -> list[dict]:
    """On a rank: `tell`, `dispatch` and its gradients for every case."""
    rank, runs, results = dist.get_rank(), [], []
    for case in cases:
        _told(answer, case, rank, 10)
        _told(answer, case, rank, 10, turn=1)
        tokens, chosen = case.tokens_of(rank).requires_grad_(), case.chosen_of(rank)
        look = Look(tokens=tokens, chosen=chosen)
        with look:
            rows, way = answer.dispatch(tokens, chosen, case.experts)
        _right_way(case, way, rank)
        _expect_shape(
            "dispatch", rows, (sum(numbers(way.receive)), case.width), "one row for each choice of "
            "an expert of this rank."
        )
        if not rows.requires_grad:
            raise Wrong(
                "dispatch: the rows carry no gradient.\nRows must travel through AllToAll.apply."
            )
        results.append({
            "rows": rows.detach().clone(),
            **{name: numbers(getattr(way, name)) for name in ("order", "by_expert", "loads")},
            "forward": look.events[:],
            "spare": look.spare(rows),
        })
        with torch.no_grad(), look:
            asked, _ = answer.dispatch(tokens.detach(), chosen, case.experts)
        results[-1] |= {
            "asked": asked.clone(),
            "asking": look.events[len(results[-1]["forward"]) :],
            "changed": look.changed(),
        }
        runs.append((case, tokens, rows, look))
    del tokens, chosen, rows, way, look, asked, _
    for result, (case, tokens, rows, look) in zip(results, runs):
        before = len(look.events)
        with look:
            rows.backward(case.gradient_of(rank, len(rows)))
        result |= {"gradient": tokens.grad, "backward": look.events[before:]}
        result["changed"] += look.changed()
        result["spare"] += look.spare(tokens.grad)
        del rows
    for case in cases:
        _told(answer, case, rank, 2**30)  # last: whoever remembers it asks for all memory
    looks = [(look, tokens.grad) for _, tokens, _, look in runs]
    runs.clear()
    for result, (look, gradient) in zip(results, looks):
        result["kept"] = look.kept(gradient)
    return results


def _told(answer, case: Case, rank: int, most: int, turn: int = 0) -> None:
    """Numbers of rows that do not fit together would end the process, so `tell` comes first."""
    counts = case.counts_of(rank, most, turn)
    right = [case.counts_of(r, most, turn)[case.own(rank)] for r in range(case.size)]
    right = torch.stack(right)
    with Look(counts=counts) as look:
        told = answer.tell(counts)
    _expect_shape("tell", told, tuple(right.shape), "(N, E/N).")
    if not torch.equal(told, right):
        hint = "Row r is what rank r has for each expert of this rank: from every rank its part."
        if torch.equal(told.flatten(), counts):
            hint = "These are this rank's own counts: who tells it the others'?"
        raise Wrong(
            f"tell({_short(counts.tolist())}) returns {_short(told.tolist())}, and "
            f"{_short(right.tolist())} is right.\n{hint}"
        )
    if look.changed():
        raise Wrong("tell changes its counts, and their owner still needs them.")


def _right_way(case: Case, way: Any, rank: int) -> None:
    """The numbers of rows, which the way back relies on."""
    counts = torch.stack([
        case.chosen_of(r).flatten().bincount(minlength=case.experts) for r in range(case.size)
    ])  # (N, E)
    here = counts[:, list(case.own(rank))]
    send = counts[rank].view(case.size, -1).sum(dim=1)
    for name, right, also, hint in (
        ("loads", here.sum(dim=0), counts[rank, list(case.own(rank))],
         "These are this rank's own tokens only: tell() must bring the others' counts."),
        ("send", send, None, ""),
        ("receive", here.sum(dim=1), send, "These are the rows that this rank sends."),
    ):
        got = numbers(getattr(way, name))
        if got == right.tolist():
            continue
        if also is None or got != also.tolist():
            hint = "Add up the counts of all ranks for this rank's experts, or its own by rank."
        raise Wrong(
            f"dispatch: way.{name} is {_short(got)}, and {right.tolist()} is right.\n{hint}"
        )


def there_and_back(answer, cases: list[Case]) -> list[dict]:
    """On a rank: dispatch and experts of every case, then combine of each, then all gradients."""
    rank, runs, results = dist.get_rank(), [], []
    for case in cases:
        tokens, weights = case.tokens_of(rank), case.weights_of(rank)
        experts = [case.expert(number).requires_grad_() for number in case.own(rank)]
        tokens.requires_grad_(), weights.requires_grad_()
        rows, way = answer.dispatch(tokens, case.chosen_of(rank), case.experts)
        parts = rows.split(numbers(way.loads))
        made = torch.cat([torch.tanh(part @ matrix) for part, matrix in zip(parts, experts)])
        leaves = {"tokens": [tokens], "weights": [weights], "experts": experts}
        runs.append([case, leaves, way, made, Look(results=made, weights=weights)])
    del tokens, weights, experts, rows, way, parts, made, leaves
    for run in runs:
        case, leaves, way, made, look = run
        before = _noted(way)
        with look:
            y = answer.combine(made, *leaves["weights"], way)
        _expect_shape("combine", y, (case.tokens[rank], case.width), "one row for each token.")
        if not y.requires_grad:
            raise Wrong("combine: no gradient can come back from what it returns.")
        result = {"y": y.detach().clone(), "forward": look.events[:], "spare": look.spare(y)}
        changed = [f"way.{name}" for name, value in _noted(way).items() if value != before[name]]
        with torch.no_grad(), look:
            asked = answer.combine(made.detach(), leaves["weights"][0].detach(), way)
        asking = look.events[len(result["forward"]) :]
        changed += look.changed()
        results.append(result | {"asked": asked.clone(), "asking": asking, "changed": changed})
        run[2:4] = weakref.ref(way), y
        del way, made, y, asked
    for result, (case, leaves, _, y, look) in zip(results, runs):
        before = len(look.events)
        with look:
            y.backward(case.gradient_of(rank, len(y)))
        result["gradients"] = {
            name: [leaf.grad for leaf in several] for name, several in leaves.items()
        }
        result["backward"] = look.events[before:]
        result["changed"] += look.changed()
        result["spare"] += look.spare(result["gradients"])
        del y
    looks = [(look, way) for _, _, way, _, look in runs]
    runs.clear()
    del leaves, run, look
    for result, (look, way) in zip(results, looks):
        result["kept"] = look.kept(result["gradients"])
        result["way kept"] = way() is not None
    return results


# ---- for all


def _noted(way: Any) -> dict[str, list[int]]:
    """What a way says."""
    names = "order", "send", "receive", "by_expert", "loads"
    return {name: numbers(getattr(way, name)) for name in names}


def numbers(values: Any) -> list[int]:
    """A list, tuple or tensor of whole numbers as a list."""
    return [int(value) for value in values]


def _expect_shape(function: str, got: Any, shape: tuple, hint: str) -> None:
    if not isinstance(got, torch.Tensor) or got.shape != shape:
        seen = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
        raise Wrong(f"{function} returns the shape {seen}, and {shape} is right:\n{hint}")


def _short(values: Any) -> str:
    text = str(values).replace("(", "[").replace(")", "]").replace(",]", "]")
    return text if len(text) <= 60 else text[:57] + "…"
