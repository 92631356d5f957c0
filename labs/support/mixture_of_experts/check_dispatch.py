"""Given: what the check cells look at: values, gradients, messages and bytes.

1 to 6 real ranks call your functions with loads as uneven as they come (scenarios.py): ranks
without a token, ranks to whose experts nobody wants, experts without rows. What arrives, what
comes back and all gradients must be those of one rank, and no byte too many may travel.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from labs.support.mixture_of_experts.scenarios import (
    Case,
    Table,
    exchange,
    send_out,
    there_and_back,
)
from utils.course.assertions import Wrong, bitwise_equal, close, unchanged
from utils.course.runner import Trial

LIBRARY = (
    "utils", "deepspeed", "megablocks", "tutel", "fairscale", "transformers", "distributed.nn",
    "dist.nn", "_functional_collectives", "all_to_all_single_autograd",
    # modules
    "torch.distributed.nn", "torch.distributed._functional_collectives", "utils.parallel",
)
HANG = "Do all ranks call the same all-to-alls, also a rank that has nothing to send?"
ASKED = "without gradients"
WAITS = "\nSome calls are asynchronous: is each waited for before its result is read?"


def all_to_all(trial: Trial) -> str:
    """Judges `AllToAll` in the file."""
    for case, table, ranks in _on_all_sizes(trial, exchange, _tables):
        for judged in (_right_rows, _right_way_back, _only_these_rows):
            for rank, found in enumerate(ranks):
                judged(f"{case}, rank {rank}", table, rank, found)
    return (
        "every row arrives on 1 to 6 ranks, in fp32 and fp64, with ranks that send or get none,\n"
        "many and wide rows, late messages, and several exchanges before the first way back;\n"
        "gradients come back to the rows that they belong to, and nothing is kept;\n"
        "one all-to-all in each direction, and not a byte too many."
    )


def dispatching(trial: Trial) -> str:
    """Judges `tell` and `dispatch` in the file."""
    for case, layer, ranks in _on_all_sizes(trial, send_out, _layers):
        _right_dispatch(case, layer, ranks)
    return (
        "every row is at its expert, and its gradient comes back, on 1 to 6 ranks, in fp32 and\n"
        "fp64, from ranks without tokens, with hundreds of experts, and late messages;\n"
        "two messages, the counts and the rows, and no row too many; nothing is kept."
    )


def combining(trial: Trial) -> str:
    """Judges `combine` in the file, and with it the whole layer."""
    for case, layer, ranks in _on_all_sizes(trial, there_and_back, _layers):
        right = _alone(layer)
        for judged in (_right_outputs, _right_gradients):
            for rank, found in enumerate(ranks):
                judged(f"{case}, rank {rank}", layer, rank, found, right)
    return (
        "outputs and gradients equal one rank's on 1 to 6 ranks, in fp32 and fp64, also\n"
        "on ranks without tokens, with a NaN, weights of 0, and when messages come late;\n"
        "each result travels once, back to its token, and so does each gradient; nothing is kept."
    )


def _on_all_sizes(
    trial: Trial, scenario: Callable, draw: Callable
) -> Iterator[tuple[str, Any, list[dict]]]:
    """(the case in words, the case, what each rank found) of drawn cases, two in turn at a time."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        # a network on which messages come late differs only for who does not wait: it comes first
        for late in (True, False) if group.size in (2, 3) else (False,):
            cases = draw(trial, group.size, late)
            slow = ", messages that come late" * late
            whole = group.case(" beside ".join(map(str, cases))) + slow
            ranks = group.run(whole, scenario, cases, late=late)
            for index, case in enumerate(cases):
                found = [results[index] for results in ranks]
                yield group.case(str(case)) + slow, case, found


# ---- cases


def _tables(trial: Trial, size: int, late: bool = False) -> list[Table]:
    """One that no rank can cut into equal parts, one with a rank that is left out, in one direction
    or in both, and equal parts. Wide rows on 3 ranks, many of them on 2."""
    draw, many = trial.draw, size == 2 and not late
    counts = [[draw.randrange(7) for _ in range(size)] for _ in range(size)]
    few = (140, 170) if many else (1, 5)
    odd = [[draw.randrange(*few) for _ in range(size)] for _ in range(size)]
    if size > 1:
        odd[0][1] = odd[1][0] + 1  # what rank 0 sends is not what it gets
    for rank, row in enumerate(odd):
        row[rank] += size > 1 and sum(row) % size == 0
    idle, left_out = draw.randrange(size), draw.choice(("sends", "gets", "sends or gets"))
    left_out = "sends or gets" if size in (3, 5) else left_out
    if "sends" in left_out:
        counts[idle] = [0] * size
    if "gets" in left_out:
        for row in counts:
            row[idle] = 0
    equal = [[draw.randrange(1, 4)] * size] * size
    width = (
        draw.randrange(180, 220) if many else draw.randrange(*((65, 130) if size == 3 else (1, 9)))
    )
    dtype, other = draw.sample([torch.float32, torch.float64], 2)
    return [
        Table(tuple(map(tuple, odd)), width, dtype, trial.new_seed()),
        Table(tuple(map(tuple, counts)), draw.randrange(1, 9), other, trial.new_seed(), odd=True),
        Table(tuple(map(tuple, equal)), width, dtype, trial.new_seed()),
    ]


def _layers(trial: Trial, size: int, late: bool = False) -> list[Case]:
    """A layer with uneven tokens, of a rank that weighs all with 0; and one in which all want few
    experts, with a NaN. Hundreds of experts on 3 ranks, hundreds of wide tokens on 2."""
    draw = trial.draw
    cases = []
    for dtype in draw.sample([torch.float32, torch.float64], 2):
        hundreds = size == 3 and not late and not cases
        per_rank = draw.randrange(90, 110) if hundreds else draw.randrange(1 + (size == 1), 4)
        tokens = [draw.randrange(1, 9) for _ in range(size)]
        if size > 1:
            tokens[draw.randrange(size)] = 0
        some = [rank for rank, count in enumerate(tokens) if count]
        cases.append(
            Case(
                tokens=tuple(tokens),
                choices=draw.randrange(6 if hundreds else 1, min(8, per_rank * size) + 1),
                per_rank=per_rank,
                width=draw.randrange(1, 8),
                dtype=dtype,
                seed=trial.new_seed(),
                unweighted=None if cases else draw.choice(some) if len(some) > 1 else -1,
            )
        )
    crowded = cases[1]
    first = draw.randrange(crowded.experts)
    wanted = [(first + i) % crowded.experts for i in range(crowded.choices)]
    cases[1] = replace(crowded, wanted=tuple(sorted(wanted)), nan=draw.randrange(size))
    if size == 3:  # one expert has far more than its share
        many = tuple(draw.sample([0, *(draw.randrange(6, 10) for _ in range(2))], 3))
        choice = (draw.randrange(9),)
        cases[1] = replace(cases[1], tokens=many, choices=1, per_rank=3, wanted=choice)
    if size == 2 and not late:  # more rows than fit into a byte, more numbers than 50,000
        many = tuple(draw.randrange(280, 400) for _ in range(size))
        cases[1] = replace(cases[1], tokens=many, choices=1, width=draw.randrange(180, 200))
    return cases


# ---- exercise a


def _right_rows(case: str, table: Table, rank: int, found: dict) -> None:
    parts = [table.rows(r).split(table.send(r))[rank] for r in range(table.size)]
    hint = "send[d] rows go to rank d, receive[r] come from rank r." + _waits(found)
    _same_rows(case, "what arrives", found["arrived"], torch.cat(parts), hint)
    unchanged(case, found["changed"])
    _same_rows(f"{case}, {ASKED}", "what arrives", found["asked"], torch.cat(parts), hint)
    if found["saved"] > 16 * table.size:  # more than two lists as tensors
        raise Wrong(
            f"{case}: {found['saved']:,} bytes of tensors are kept for the backward pass.\n"
            "What of the rows does it need?"
        )


def _right_way_back(case: str, table: Table, rank: int, found: dict) -> None:
    parts = [table.gradient(r).split(table.receive(r))[rank] for r in range(table.size)]
    hint = "A row came from rank r: its gradient goes back there. What was received is sent."
    if found["gradient"] is None:
        raise Wrong(f"{case}: no gradient comes back to the rows. What does backward return?")
    _same_rows(
        case, "the gradient of the rows", found["gradient"], torch.cat(parts), hint + _waits(found)
    )
    unchanged(case, ["the gradient of what arrived"] * bool(found["changed back"]))


def _only_these_rows(case: str, table: Table, rank: int, found: dict) -> None:
    value = table.width * torch.finfo(table.dtype).bits // 8
    own = table.counts[rank][rank]
    for name, rows in (
        ("forward", sum(table.send(rank)) - own),
        ("asking", sum(table.send(rank)) - own),
        ("backward", sum(table.receive(rank)) - own),
    ):
        when = ASKED if name == "asking" else name
        _exchanges(f"{case}, {when}", table.size, found[name], [rows * value])
    _nothing_kept(case, found)


def _same_rows(case: str, what: str, got: Any, right: torch.Tensor, hint: str) -> None:
    close(case, what, got, right, hint=hint, dtype=right.dtype, slack=0)
    if not bitwise_equal(got, right):
        raise Wrong(f"{case}: {what} differs in bits that only travel.\n{hint}")


# ---- exercise b


def _right_dispatch(case: str, layer: Case, ranks: list[dict]) -> None:
    chosen = [layer.chosen_of(r).flatten() for r in range(layer.size)]
    for rank, found in enumerate(ranks):
        _a_permutation(f"{case}, rank {rank}", "way.order", found["order"], len(chosen[rank]))
    sent = [expert[found["order"]] for expert, found in zip(chosen, ranks)]
    for rank, expert in enumerate(sent):
        if (expert // layer.per_rank).diff().lt(0).any():
            raise Wrong(
                f"{case}, rank {rank}: way.order does not put the rows for rank 0 first, then those"
                " for rank 1 …"
            )
    gradients = [
        torch.zeros_like(layer.tokens_of(r), dtype=torch.float64) for r in range(layer.size)
    ]
    for rank, found in enumerate(ranks):
        where, waits = f"{case}, rank {rank}", _waits(found)
        arrived, origins, experts = [], [], []
        for r, expert in enumerate(sent):
            here = expert // layer.per_rank == rank
            tokens = torch.tensor(ranks[r]["order"], dtype=torch.long)[here] // layer.choices
            arrived.append(layer.tokens_of(r)[tokens])
            origins += [(r, token) for token in tokens.tolist()]
            experts.append(expert[here])
        _a_permutation(where, "way.by_expert", found["by_expert"], len(origins))
        arrived, experts = torch.cat(arrived), torch.cat(experts)[found["by_expert"]]
        right = arrived[found["by_expert"]]
        if experts.diff().lt(0).any():
            hint = "way.by_expert does not put the rows of this rank's first expert first …"
            if bitwise_equal(found["rows"], arrived):
                hint = "The rows are not expert by expert: they are as they came, rank by rank."
            raise Wrong(f"{where}: {hint}")
        hint = "Whose tokens are they? A row is tokens[place // k], in the order that way says."
        if layer.size > 1 and bitwise_equal(found["rows"], arrived):
            hint = "These are the right rows, not expert by expert: they came rank by rank."
        _same_rows(where, "rows", found["rows"], right, hint + waits)
        unchanged(where, found["changed"])
        rows = [one.sort(dim=0).values for one in (found["asked"], right)]  # perhaps another order
        _same_rows(f"{where}, {ASKED}", "rows, each column sorted,", *rows, hint + waits)
        back = layer.gradient_of(rank, len(right)).double()
        for place, row in zip(found["by_expert"], back):
            r, token = origins[place]
            gradients[r][token] += row
    for rank, (found, right) in enumerate(zip(ranks, gradients)):
        where = f"{case}, rank {rank}"
        hint = "A token has one row for each choice, and its gradient is their sum."
        if found["gradient"] is None:
            raise Wrong(f"{where}: no gradient comes back to the tokens.\n{hint}")
        close(where, "the gradient of the tokens", found["gradient"], right, hint=hint, scale=1)
    for rank, found in enumerate(ranks):
        where = f"{case}, rank {rank}"
        out, came = _bytes(layer, rank)
        for when, events in (("", found["forward"]), (f", {ASKED}", found["asking"])):
            counts, rows = events[:-1], events[-1:]
            _exchanges(f"{where}{when}, the rows", layer.size, rows, [out])
            # the counts may be gathered, too: the longest way
            most = 8 * layer.experts * (layer.size - 1)
            if len(counts) > 1 or sum(event.sent for event in counts) > most:
                raise Wrong(
                    f"{where}{when}: before the rows {_does(counts)} for the counts, and one "
                    f"message of {layer.per_rank} numbers to each rank will do."
                )
        _exchanges(f"{where}, backward", layer.size, found["backward"], [came])
        _nothing_kept(where, found)


def _a_permutation(case: str, name: str, got: list[int], count: int) -> None:
    if sorted(got) != list(range(count)):
        raise Wrong(f"{case}: {name} does not name each of {count} places once.")


# ---- exercise c


def _alone(layer: Case) -> dict:
    """One rank, in fp64: outputs and gradients by rank, and the outputs without weights."""
    ranks = range(layer.size)
    tokens = [layer.tokens_of(r).double().requires_grad_() for r in ranks]
    weights = [layer.weights_of(r).double().requires_grad_() for r in ranks]
    experts = [layer.expert(e).double().requires_grad_() for e in range(layer.experts)]
    y, plain, total = [], [], 0.0
    for r in ranks:
        chosen = layer.chosen_of(r)
        made = torch.zeros(*chosen.shape, layer.width, dtype=torch.float64)  # (S, k, C)
        for e in chosen.unique().tolist():
            places = (chosen == e).nonzero(as_tuple=True)
            made = made.index_put(places, torch.tanh(tokens[r][places[0]] @ experts[e]))
        y.append((weights[r][..., None] * made).sum(dim=1))
        plain.append(made.detach().sum(dim=1))
        total = total + (y[r] * layer.gradient_of(r, len(chosen)).double()).sum()
    leaves = [*tokens, *weights, *experts]
    gradients = iter(torch.autograd.grad(total, leaves, materialize_grads=True))
    of_tokens, of_weights, of_experts = (
        [next(gradients) for _ in several] for several in (tokens, weights, experts)
    )
    return {
        "y": [one.detach() for one in y],
        "plain": plain,
        "gradients": [
            {
                "weights": [of_weights[r]],
                "tokens": [of_tokens[r]],
                "experts": [of_experts[e] for e in layer.own(r)],
            }
            for r in ranks
        ],
    }


HINTS = {
    "weights": "Does the router get a gradient? Weigh the results with `weights` itself.",
    "tokens": "Rows must travel through AllToAll.apply on both ways.",
    "experts": "An expert's gradient is the sum over the tokens of all ranks.",
}


def _right_outputs(case: str, layer: Case, rank: int, found: dict, right: dict) -> None:
    hint = _symptom(found["y"], right["y"][rank], right["plain"][rank], layer.choices)
    close(case, "the layer's output", found["y"], right["y"][rank], hint=hint + _waits(found),
          dtype=layer.dtype, scale=1)
    unchanged(case, found["changed"])
    close(f"{case}, {ASKED}", "the layer's output", found["asked"], right["y"][rank],
          hint=_waits(found).strip(), dtype=layer.dtype, scale=1)


def _right_gradients(case: str, layer: Case, rank: int, found: dict, right: dict) -> None:
    for name, hint in HINTS.items():
        pairs = zip(found["gradients"][name], right["gradients"][rank][name], strict=True)
        for number, (got, wanted) in enumerate(pairs):
            what = f"expert {layer.own(rank)[number]}" if name == "experts" else f"the {name}"
            if got is None:
                raise Wrong(f"{case}: there is no gradient of {what}.\n{hint}")
            close(
                case, f"the gradient of {what}", got, wanted, hint=hint + _waits(found),
                scale=4 * (sum(layer.tokens) * layer.choices) ** 0.5,
            )
    out, came = _bytes(layer, rank)
    _exchanges(f"{case}, combine", layer.size, found["forward"], [came])
    _exchanges(f"{case}, combine {ASKED}", layer.size, found["asking"], [came])
    # back from the tokens to the experts, and from there to the tokens
    _exchanges(f"{case}, backward", layer.size, found["backward"], [out, came])
    _nothing_kept(case, found)


def _symptom(y: torch.Tensor, right: torch.Tensor, plain: torch.Tensor, choices: int) -> str:
    """A question that fits the wrong outputs."""
    if _near(y, plain):
        return "This is the plain sum of the results: weigh each with its weight."
    if _near(y, plain / choices):
        return "This is the mean of the results: weigh each with its weight."
    if _near(y.sum(dim=0), right.sum(dim=0)):
        return "Their sum over the tokens is right: way.order says whose each row is."
    return "Undo the steps of dispatch, the last one first: each sorting has an inverse, argsort()."


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(
        a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True
    )


# ---- messages and memory


def _bytes(layer: Case, rank: int) -> tuple[int, int]:
    """(of a rank's rows for others, of the rows of others that come to it)."""
    goals = [layer.chosen_of(r) // layer.per_rank for r in range(layer.size)]
    row = layer.width * torch.finfo(layer.dtype).bits // 8
    out = int((goals[rank] != rank).sum())
    came = sum(int((goals[r] == rank).sum()) for r in range(layer.size) if r != rank)
    return row * out, row * came


def _exchanges(case: str, size: int, events: Sequence, right: list[int]) -> None:
    """So many all-to-alls, with so many bytes for other ranks; one rank may do without."""
    if size == 1 and not events:
        return
    if [event.op for event in events] != ["all_to_all"] * len(right):
        wanted = "one all-to-all" if len(right) == 1 else f"{len(right)} all-to-alls"
        raise Wrong(f"{case}: {_does(events)}, where {wanted} will do.")
    for event, rows in zip(events, right):
        if event.sent != rows:
            raise Wrong(
                f"{case}: this rank sends {float(event.sent):,.0f} bytes to others, and its rows "
                f"for them are {rows:,}.\nEach row goes to one rank only, and nothing needs "
                "filling up: an all-to-all takes a size for every rank."
            )


def _does(events: Sequence) -> str:
    names = ", ".join(event.op for event in events)
    return f"this rank calls {names}" if names else "there is no message at all"


def _waits(found: dict) -> str:
    events = [*found["forward"], *found["backward"]]
    return WAITS if any(event.asynchronous for event in events) else ""


def _nothing_kept(case: str, found: dict) -> None:
    if found.get("way kept"):
        raise Wrong(f"{case}: somebody still holds the `Way` when its caller has let go of it.")
    if found["kept"]:
        raise Wrong(
            f"{case}: {found['kept']:,} bytes of tensors are still held when the caller has let go "
            "of all results.\nWhat is kept that nobody needs any more?"
        )
    if found["spare"]:
        raise Wrong(
            f"{case}: a result or a gradient is a part of a larger tensor, of which "
            f"{found['spare']:,} bytes stay\nin memory with it. Who needs the rest?"
        )
