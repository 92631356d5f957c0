"""Given: what the check cells of b and c look at: values, messages, order, work, balance, memory.

1 to 6 real ranks have the positions of a sequence each, equally many or not; what they compute must
be what one rank computes in float64.
"""

import torch

from labs.support.context_parallel import scenarios
from labs.support.context_parallel.judging import (
    HANG,
    LIBRARY,
    alike,
    cases,
    is_right,
    memory,
    no_more_work,
    right_values,
    ring_messages,
    run_all,
    under_way,
    words_of,
)
from utils.course.assertions import Wrong
from utils.course.runner import Group, Trial
from utils.shares import shares

NOT_WAITED = "Some messages are never waited for. Is what comes there before it is used?"
UNSEEN = "Which blocks do this rank's positions not see at all, and what is computed of them?"


def ring(trial: Trial) -> str:
    """Judges `ring_attention`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        some = cases(trial, group.size)
        for case, ranks, late in run_all(group, scenarios.attentions, "ring_attention", some=some):
            _forward(group, case, ranks, late)
    return (
        "out and lse equal one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths that N does\n"
        "not divide, grouped heads and large scores, also when messages come late; N − 1 blocks a\n"
        "rank at most, under way while it computes; nothing unseen is multiplied; two blocks of\n"
        "others in memory, never all keys nor the scores of the whole sequence."
    )


def backward(trial: Trial) -> str:
    """Judges `ring_attention_backward`."""
    trial.forbid(LIBRARY)
    for group in trial.groups(hang=HANG):
        some = cases(trial, group.size)
        for case, ranks, late in run_all(group, scenarios.backwards, some=some):
            _backward(group, case, ranks, late)
    return (
        "dq, dk and dv equal one rank's on 1 to 6 ranks, in fp32 and fp64, for lengths that N\n"
        "does not divide, grouped heads and large scores, also when messages come late; N − 1\n"
        "blocks and N of gradients a rank at most, under way while it computes; nothing unseen is\n"
        "multiplied; two blocks of others, and of their gradients, in memory."
    )


def zigzag(trial: Trial) -> str:
    """Judges `zigzag_positions` and `zigzag_attention`."""
    trial.forbid(LIBRARY)
    _positions(trial)
    for group in trial.groups(hang=HANG):
        some = cases(trial, group.size, zigzag=True)
        name = "zigzag_attention"
        for case, ranks, late in run_all(group, scenarios.attentions, name, some=some):
            done = _forward(group, case, ranks, late)
            if case["length"] % (2 * group.size) == 0 and len(set(done)) > 1:
                listed = ", ".join(f"{count:,}" for count in done)
                raise Wrong(
                    f"{words_of(group, case, 0, late)} and the others: they multiply {listed} "
                    "times.\nAll blocks are equal, so the ranks can have equal work."
                )
    return (
        "an early and a late block for each rank; out and lse equal one rank's on 1 to 6 ranks,\n"
        "in fp32 and fp64, for any length, also when messages come late; all ranks multiply\n"
        "equally much where blocks are equal, and nowhere more than they need; messages and\n"
        "memory as in the ring."
    )


def _positions(trial: Trial) -> None:
    draw, some = trial.draw, []
    for ranks in draw.sample(range(1, 9), 8):
        some.append((2 * ranks + draw.randrange(50), ranks))
    some.append((2 * draw.randrange(100, 200) + 1, 16))
    found = trial.alone("zigzag_positions", scenarios.zigzags, some)
    for (length, ranks), got in zip(some, found):
        case = {"length": length, "zigzag": True}
        right = scenarios.places_of(case, ranks)
        where = f"zigzag_positions({length}, {ranks})"
        if len(got) != ranks or any(len(mine) != 2 for mine in got):
            raise Wrong(f"{where} has {len(got)} entries; one pair, (early, late), for each rank.")
        for rank, (mine, wanted) in enumerate(zip(got, right)):
            if mine[0] + mine[1] != wanted:
                raise Wrong(
                    f"{where}: rank {rank} has {_ends(mine[0])} and {_ends(mine[1])}, and "
                    f"{_listed(wanted)} are right.\nBlock r from the front and block r from the "
                    "back, of 2N blocks, shares(length, 2N) long."
                )


def _ends(block: list[int]) -> str:
    return f"{block[0]} to {block[-1]}" if block else "nothing"


def _listed(places: list[int]) -> str:
    return ", ".join(map(str, places[:6])) + " …" * (len(places) > 6)


# ---- forward, of both ways


def _forward(group: Group, case: dict, ranks: list[dict], late: bool) -> list[int]:
    """Judges a pass; returns how often each rank multiplies."""
    size, right = group.size, scenarios.right(case)
    places, done = scenarios.places_of(case, size), []
    for rank, found in enumerate(ranks):
        where = words_of(group, case, rank, late)
        hint = _why(case, places, rank, found, right, late)
        right_values(where, case, places[rank], found, right, ("out", "lse"), hint)
    for rank, found in enumerate(ranks):
        where = words_of(group, case, rank, late)
        ring_messages(where, case, found, rank, size, gradients=False)
        if not late:
            under_way(where, found)
            pairs = _pairs(case, places, rank)
            done.append(no_more_work(where, case, found, pairs, 2, UNSEEN))
            memory(where, case, found, len(places[rank]), size, kinds=1)
    return done


def _pairs(case: dict, places: list[list[int]], rank: int) -> int:
    """Of a query of this rank and a key: blocks that are seen, each as a whole."""
    mine, pairs = places[rank], len(places[rank]) ** 2
    for theirs in [place for other, place in enumerate(places) if other != rank]:
        pairs += sum(sum(key < query for key in theirs) for query in mine)
    return pairs


def _why(
    case: dict, places: list[list[int]], rank: int, found: dict, right: dict, late: bool
) -> str:
    """What wrong results look like."""
    mine, length = places[rank], case["length"]
    if found["never waited"]:
        return NOT_WAITED
    got = found["out"]
    if not isinstance(got, torch.Tensor) or not isinstance(found["lse"], torch.Tensor):
        return "Two tensors are returned, (out, lse)."
    if alike(got, right["out"][:, mine]):
        return "out is right, but lse is not: it is the logarithm over all blocks, not of the last."
    if len(places) > 1:
        owner = torch.zeros(length, dtype=torch.long)
        for other, theirs in enumerate(places):
            owner[theirs] = other
        before = torch.ones(length, length, dtype=torch.bool).tril()
        same = owner[:, None] == owner
        likely = [
            ("The positions look at this rank's own keys only. Is what comes computed with, too?",
                before & same),
            ("The positions look at all keys, also at those behind them.", torch.ones_like(before)),
            ("In its own block, too, a position looks at no key behind it: causal=True there.",
                before | same),
            ("The blocks of other ranks are looked at as if they were this rank's own: causal is "
            "for\nthe first turn only.", same & before | before & _in_block(places, length)),
        ]
        if case["zigzag"]:  # one of its questions for two mistakes that may look alike
            question = (
                "Of a rank before, its early block is seen, all of it: how long is it there, and "
                "is causal\nfor the first turn only?"
            )
            likely[-1:] = [(question, likely[-1][1]), (question, _own_length(places, owner))]
        for hint, mask in likely:
            if alike(got, scenarios.right(case, mask)["out"][:, mine]):
                return hint
    if got.isnan().any():
        return "There is a NaN: what does merge do where nothing was seen, or memory is not filled?"
    if late:
        return "Is a message there before it is used? Only after wait() it is."
    return "Whose keys are here in turn t, and which of this rank's positions see them?"


def _in_block(places: list[list[int]], length: int) -> torch.Tensor:
    """(T, T): place by place, the query's on its rank is not before the key's on its own."""
    place = _on_its_rank(places, length)
    return place[:, None] >= place


def _own_length(places: list[list[int]], owner: torch.Tensor) -> torch.Tensor:
    """(T, T): zigzag, but of a rank before as many keys are seen as this rank's early block has."""
    length, size = len(owner), len(places)
    early = torch.tensor(shares(length, 2 * size))[owner]
    before = torch.ones(length, length, dtype=torch.bool).tril()
    earlier = owner[:, None] > owner
    return before & ~earlier | earlier & (_on_its_rank(places, length) < early[:, None])


def _on_its_rank(places: list[list[int]], length: int) -> torch.Tensor:
    place = torch.zeros(length, dtype=torch.long)
    for theirs in places:
        place[theirs] = torch.arange(len(theirs))
    return place


# ---- backward


def _backward(group: Group, case: dict, ranks: list[dict], late: bool) -> None:
    size, right = group.size, scenarios.right(case)
    places = scenarios.places_of(case, size)
    names = ("dq", "dk", "dv")
    for rank, found in enumerate(ranks):
        where = words_of(group, case, rank, late)
        hint = _why_gradients(case, places, rank, ranks, right, late)
        right_values(where, case, places[rank], found, right, names, hint)
    for rank, found in enumerate(ranks):
        where = words_of(group, case, rank, late)
        ring_messages(where, case, found, rank, size, gradients=True)
        if not late:
            under_way(where, found)
            no_more_work(where, case, found, _pairs(case, places, rank), 5, UNSEEN)
            memory(where, case, found, len(places[rank]), size, kinds=2)


def _why_gradients(
    case: dict, places: list[list[int]], rank: int, ranks: list[dict], right: dict, late: bool
) -> str:
    found = ranks[rank]
    if found["never waited"]:
        return NOT_WAITED
    for name in ("dk", "dv"):
        got = found[name]
        for other, theirs in enumerate(places):
            if other != rank and alike(got, right[name][:, theirs]):
                return f"These are rank {other}'s {name}: how many turns does a gradient travel?"
    wrong = [r for r, one in enumerate(ranks) if not is_right(case, places[r], one, right, "dq")]
    if late and rank not in wrong:
        return "Is a message there before it is used? Only after wait() it is."
    if wrong and rank not in wrong:
        return (
            f"dq of rank {wrong[0]} is wrong, too: is it the sum over all blocks that its queries "
            "see, each with\nout and lse of the attention to all keys?"
        )
    if not wrong:
        return (
            "dq is right. Every rank that looks at a key adds to its gradient: who adds to it "
            "last,\nand who has it then? And with which lse are its weights made?"
        )
    return (
        "dq is the sum over all blocks that this rank's queries see, each with out and lse of the\n"
        "attention to all keys."
    )
