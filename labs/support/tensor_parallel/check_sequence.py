"""Given: what the check cell of e looks at: positions, values, gradients, messages and memory.

1 to 6 real ranks hold the positions of a sequence, equal shares or not, perhaps none.
"""

import torch

from labs.support.tensor_parallel import scenarios
from labs.support.tensor_parallel.check_layers import layers, mlp_cases
from labs.support.tensor_parallel.judging import (
    ASKED,
    HALVES,
    HANG,
    LIBRARY,
    TYPES,
    messages,
    no_tensor_held,
    nothing_kept,
    numbers,
    own_size,
    runs,
    slack_of,
    sum_hint,
    words_of,
)
from labs.support.tensor_parallel.scenarios import part_of
from utils.course.assertions import Wrong, close, unchanged
from utils.course.runner import Group, Trial
from utils.shares import shares


def sequence(trial: Trial) -> str:
    """Judges `EnterSequence`, `LeaveSequence`, `SequenceMLP` and `sum_partial_gradients`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        cases = [_sequence_case(trial, group.size, name, i) for i in range(3) for name in _SEQUENCE]
        for some, late in runs(group, cases):
            ranks = group.run(group.case("some tensors"), scenarios.functions, some, late=late)
            for i, case in enumerate(some):
                _right_sequence(group, case, [found[i] for found in ranks], late)
        layers(trial, group, mlp_cases(trial, "SequenceMLP", group), _right_messages)
    return (
        "all positions in, own positions of the sum out, at lengths that N does not divide and on\n"
        "ranks without a position; output and all gradients equal the whole layer's on 1 to 6\n"
        "ranks; a reduce-scatter and an all-gather in place of an all-reduce, the same bytes sent\n"
        "(with the filling); between the matrices 1/N of the positions is kept."
    )


_SEQUENCE = ("EnterSequence", "LeaveSequence")


def _sequence_case(trial: Trial, size: int, name: str, i: int) -> dict:
    """One of the three cases of a function; in the first, some rank has no position."""
    t = trial.draw.randrange(1, size) if i == 0 and size > 1 else trial.draw.randrange(1, 4 * size)
    b, c = trial.draw.randrange(1, 4), trial.draw.randrange(1, 9)
    if i == 2:  # many numbers
        b, c = trial.draw.randrange(9, 12), 6_000 // t if size == 2 else c
    own, all_ = [(b, n, c) for n in shares(t, size)], [(b, t, c)] * size
    x, dy = (own, all_) if name == "EnterSequence" else (all_, own)
    odd = trial.draw.randrange(size), ("zeros", "", "a NaN")[i]
    return {
        "function": name, "more": (t,) if name == "EnterSequence" else (), "length": t,
        "dtype": TYPES[(i + size) % 3],
        "x": numbers(trial, x, i, odd), "dy": numbers(trial, dy, i, odd),
    }


def _right_sequence(group: Group, case: dict, ranks: list[dict], late: bool) -> None:
    size, name, t = group.size, case["function"], case["length"]
    x, dy = ([scenarios.tensor_of(case, r, part) for r in range(size)] for part in ("x", "dy"))
    summed, gathered = (dy, x) if name == "EnterSequence" else (x, dy)
    total, everything = sum(tensor.double() for tensor in summed), torch.cat(gathered, dim=1)
    b, _, c = everything.shape
    nbytes = c * case["dtype"].itemsize
    for rank, found in enumerate(ranks):
        where = f"{words_of(group, case, rank, late)}, T = {t}"
        own = part_of(total, (1, shares(t, size)), rank)
        rights = (everything, own) if name == "EnterSequence" else (own, everything)
        for half, result, right in zip(("forward", "backward"), ("y", "dx"), rights):
            unchanged(where, found[half]["changed"])
            whole = right is everything
            hint = "All positions, in the order of the ranks, nothing filled up between."
            if not whole:
                mine = part_of(summed[rank], (1, shares(t, size)), rank)
                parts = [part_of(s, (1, shares(t, size)), rank) for s in summed]
                hint = sum_hint(found[result], own, parts, rank) if mine.numel() else ""
            what = f"what {name}.{half} returns"
            slack = slack_of(8, summed, right)
            close(where, what, found[result], right, hint=hint, dtype=case["dtype"], slack=slack)
            if half == "forward":
                unchanged(f"{where}, {ASKED}", found["asking"]["changed"])
                close(f"{where}, {ASKED}", what, found["asked"], right, hint=hint, slack=slack)
            right = {"all_gather": _gathered(b, t, size)} if whole else {
                "reduce_scatter": _scattered(b, t, size)}
            _in_pieces(f"{where}: {name}.{half}", found[half]["events"], right, nbytes, size)
            if half == "forward":
                what = f"{where}, {ASKED}: {name}.forward"
                _in_pieces(what, found["asking"]["events"], right, nbytes, size)
        no_tensor_held(f"{where}: {name}", found["held"])
        longest = -(-t // size)
        filling = (longest - shares(t, size)[rank]) + (longest * size - t)  # of either result
        own_size(f"{where}: {name}", found["spare"], b * filling * nbytes)
        if not late:
            nothing_kept(where, found["kept"])


def _gathered(b: int, t: int, size: int) -> range:
    """Vectors that a rank hands over for an all-gather: not filled up on any rank, or all alike."""
    return range(b * (t // size), b * -(-t // size) + 1)


def _scattered(b: int, t: int, size: int) -> range:
    return range(b * t, b * -(-t // size) * size + 1)


def _in_pieces(where: str, events: list, right: dict, nbytes: int, size: int) -> None:
    """One call of each operation; right: {operation: how many vectors of `nbytes`, a range}."""
    seen = {event.op: event.payload for event in events}
    calls = {}
    for op, vectors in right.items():
        fits = seen.get(op, 0) in range(vectors[0] * nbytes, vectors[-1] * nbytes + 1)
        calls[op] = [seen[op] if fits and op in seen else vectors[-1] * nbytes]
    hint = "Pieces are filled up to the longest of the ranks, and no further."
    messages(where, events, calls, size, hint)


def _right_messages(where: str, one: dict, case: dict, step: dict, rank: int, size: int) -> None:
    """Of `SequenceMLP` and `sum_partial_gradients`; and what it keeps for the backward pass."""
    (b, t), hidden = step["shape"], case["config"].hidden_size * case["dtype"].itemsize
    for half, when in HALVES.items():
        right = {"all_gather": _gathered(b, t, size), "reduce_scatter": _scattered(b, t, size)}
        _in_pieces(f"{where}, {when}", one[half]["events"], right, hidden, size)
    after = {"all_reduce": [2 * hidden]} if step["last"] else {}
    hint = "The norm and the bias of the row layer: two tensors of C numbers."
    messages(f"{where}, sum_partial_gradients", one["after"]["events"], after, size, hint)
    allowed = scenarios.allowed_bytes(case, step["shape"], rank, size)
    if one["saved"] > allowed:
        raise Wrong(
            f"{where}: {one['saved']:,} bytes are kept for the backward pass, and {allowed:,} will "
            "do.\nWhat is computed on all positions, and could be on this rank's own?"
        )
