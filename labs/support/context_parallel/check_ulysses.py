"""Given: what the check cell of d looks at: heads, values, messages and bytes, work, memory.

1 to 6 real ranks have neighbouring positions, equally many or not, and heads that are not shared
out evenly either.
"""

import itertools

import torch

from labs.support.context_parallel import scenarios
from labs.support.context_parallel.judging import (
    LIBRARY,
    alike,
    cases,
    no_more_work,
    nothing_kept,
    right_values,
    run_all,
    words_of,
)
from utils.course.assertions import Wrong
from utils.course.runner import Group, Trial
from utils.shares import shares

HANG = "Do all ranks call the same all-to-alls, each with the lengths that the others expect?"
CALLS = 4  # q, k, v, and the results


def ulysses(trial: Trial) -> str:
    """Judges `heads_of_ranks` and `ulysses_attention`."""
    trial.forbid(LIBRARY)
    _heads(trial)
    for group in trial.groups(hang=HANG):
        size = group.size
        some = cases(trial, size, least=size)
        some[1] |= _uneven(trial, size)
        for case, ranks, late in run_all(
            group, scenarios.attentions, "ulysses_attention", some=some
        ):
            for judged in (_right, _no_more):
                for rank, found in enumerate(ranks):
                    judged(group, case, rank, found, late)
        if size in (3, 5):
            _too_many(group, some[0])
    return (
        "out equals one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths and heads that N\n"
        "does not divide, and for fewer key-value heads than ranks; all-to-alls only, to each\n"
        "rank no byte more than its heads need; each rank computes its heads; more ranks than\n"
        "heads are refused before anything is sent."
    )


def _uneven(trial: Trial, size: int) -> dict:
    """Query heads that N does not divide, of few key-value heads, in groups that ranks cut."""
    kv_heads = trial.draw.randrange(1, max(2, size - 1))
    group = -(-size // kv_heads) + trial.draw.randrange(1, 3)
    if size > 1 and kv_heads * group % size == 0:
        group += 1
    return {"kv_heads": kv_heads, "heads": kv_heads * group}


def _heads(trial: Trial) -> None:
    """heads_of_ranks by itself, at many numbers."""
    some = []
    for kv_heads, group in itertools.product((1, 2, 3, 8), (1, 2, 3, 4)):
        heads = kv_heads * group
        some += [(heads, kv_heads, trial.draw.randrange(1, heads + 1)), (heads, kv_heads, heads)]
    some.append((4, 2, 4 + trial.draw.randrange(1, 4)))
    for case, got in zip(some, trial.alone("heads_of_ranks", scenarios.heads, some)):
        heads, kv_heads, ranks = case
        where = f"heads_of_ranks({heads}, {kv_heads}, {ranks})"
        if ranks > heads:
            if not isinstance(got, str):
                raise Wrong(f"{where}: more ranks than query heads; a ValueError says so.")
            continue
        if isinstance(got, str):
            raise Wrong(f"{where} raises ValueError ({got}); {ranks} ranks can have these heads.")
        right = _right_heads(heads, kv_heads, ranks)
        for what, mine, wanted in zip(("query", "key-value"), got, right):
            if mine != wanted:
                raise Wrong(
                    f"{where}: the {what} heads are {mine}, and {wanted} are right.\n"
                    "Neighbouring query heads, shares(heads, ranks) of them, and what these look "
                    "at, each once."
                )


def _right_heads(heads: int, kv_heads: int, ranks: int) -> tuple[list, list]:
    counts = shares(heads, ranks)
    queries = [list(range(sum(counts[:r]), sum(counts[: r + 1]))) for r in range(ranks)]
    group = heads // kv_heads
    return queries, [sorted({head // group for head in mine}) for mine in queries]


def _right(group: Group, case: dict, rank: int, found: dict, late: bool) -> None:
    size, right = group.size, scenarios.right(case)
    where, places = words_of(group, case, rank, late), scenarios.places_of(case, size)
    hint = _why(case, places[rank], found, right)
    right_values(where, case, places[rank], found, right, ("out",), hint)


def _no_more(group: Group, case: dict, rank: int, found: dict, late: bool) -> None:
    size, where = group.size, words_of(group, case, rank, late)
    places = scenarios.places_of(case, size)
    queries, keys = _right_heads(case["heads"], case["kv_heads"], size)
    _messages(where, case, places, queries, keys, rank, found)
    if late:
        return
    pairs = case["length"] ** 2
    mine = case | {"heads": len(queries[rank])}
    no_more_work(where, mine, found, pairs, 2, "This rank's heads, and no others.")
    value = case["batch"] * case["dtype"].itemsize
    scores = value * len(queries[rank]) * pairs
    rows = value * case["width"] * case["length"] * (3 * len(queries[rank]))
    sent = value * case["width"] * len(places[rank]) * sum(
        len(q) + 2 * len(k) for q, k in zip(queries, keys)
    )
    if found["largest"] > max(scores, rows, sent):
        raise Wrong(
            f"{where}: a tensor of {found['largest']:,} bytes is made; the scores of its "
            f"{len(queries[rank])} heads have {scores:,}.\nDoes a rank have more than some heads "
            "of all positions, or all heads of some?"
        )
    nothing_kept(where, found)


def _messages(where: str, case: dict, places, queries, keys, rank: int, found: dict) -> None:
    size, events = len(places), found["events"]
    if size == 1 and not events:
        return
    others = sorted({event.op for event in events} - {"all_to_all"})
    if others:
        raise Wrong(f"{where}: {', '.join(others)} is called; all-to-alls will do.")
    if len(events) > CALLS:
        raise Wrong(
            f"{where}: {len(events)} all-to-alls. Two will do: queries, keys and values travel "
            "together."
        )
    value = case["batch"] * case["width"] * case["dtype"].itemsize
    there = sum(
        len(places[rank]) * (len(queries[r]) + 2 * len(keys[r])) for r in range(size) if r != rank
    )
    back = sum(len(places[r]) * len(queries[rank]) for r in range(size) if r != rank)
    right = value * (there + back)
    sent = sum(event.sent for event in events)
    if sent != right:
        raise Wrong(
            f"{where}: this rank sends {float(sent):,.0f} bytes to others, and {right:,} are "
            "right:\nits positions of their heads, and of its heads their positions. A key-value "
            "head goes to a\nrank once, and nothing is filled up: an all-to-all takes a size for "
            "every rank."
        )


def _why(case: dict, mine: list[int], found: dict, right: dict) -> str:
    got, wanted = found["out"], right["out"][:, mine]
    if isinstance(got, torch.Tensor) and got.shape == wanted.shape:
        everything = torch.ones(case["length"], case["length"], dtype=torch.bool)
        if alike(got, scenarios.right(case, everything)["out"][:, mine]):
            return "The positions look at all keys, also at those behind them: causal=True."
        by_head = [alike(got[:, :, h], wanted[:, :, h]) for h in range(case["heads"])]
        bad = [h for h, good in enumerate(by_head) if not good]
        if bad and len(bad) < case["heads"]:
            return f"Only heads {bad} are wrong: which key-value head does each look at?"
        heads = [
            next((o for o in range(case["heads"]) if alike(got[:, :, h], wanted[:, :, o])), None)
            for h in range(case["heads"])
        ]
        if bad and None not in heads:
            return f"These are the right heads in the order {heads}."
    return (
        "What arrives from rank r are r's positions of this rank's heads: in the order of the "
        "ranks\nthey make the whole sequence, and attention over it is causal."
    )


def _too_many(group: Group, case: dict) -> None:
    """More ranks than query heads."""
    few = case | {"heads": group.size - 1, "kv_heads": 1}
    where = group.case(f"{few['heads']} query heads")
    for found in group.run(where, scenarios.refused, few):
        if found["said"] is None:
            raise Wrong(f"{where}: there are fewer heads than ranks; a ValueError says so.")
        if found["events"]:
            raise Wrong(f"{where}: something is sent before the ValueError is raised.")
