"""Given: what the check cells of exercises a and c look at.

The simulator carries your lists out for many numbers of ranks and micro-batches: is each list
complete, does the pipeline come to its end, how long does it take, how many micro-batches are kept?
"""

import operator
import random

import torch.distributed as dist

from utils.course.assertions import Wrong, described
from utils.course.runner import Trial
from utils.parallel.schedules import Action, check, counts, in_flight, schedule, simulate

LIBRARY = (
    "utils.parallel", "utils.training", "torch.distributed.pipelining", "deepspeed",
    "labs.support.pipeline_parallel",
)
FORWARD, BACKWARD, WEIGHT = 1.0, 2.0, 1.0  # WEIGHT is the part of BACKWARD that a W takes


def less_memory(trial: Trial) -> str:
    """Judges `order` of exercise a."""
    tried = 0
    for (ranks, micro_batches), orders in _lists(trial):
        case = f"{ranks} ranks, {micro_batches} micro-batches"
        _complete(orders, micro_batches, "FB", case)
        for rank, kept in enumerate(in_flight(orders)):
            most = min(ranks - rank, micro_batches)
            if kept > most:
                raise Wrong(
                    f"{case}: rank {rank} keeps {kept:.0f} micro-batches at once, and {most} would "
                    "do.\nHow many forward passes come before its first backward pass?"
                )
        for backward in (BACKWARD, round(trial.draw.uniform(0.4, 4), 2)):
            takes = simulate(orders, FORWARD, backward).span
            gpipe = simulate(schedule("gpipe", ranks, micro_batches), FORWARD, backward).span
            if takes > gpipe + 1e-9:
                raise Wrong(
                    f"{case}, a backward pass as long as {backward:g} forward passes: this takes "
                    f"{takes:g} forward passes, GPipe takes {gpipe:g}.\n"
                    "Who waits for whom? Some ranks go too few F's ahead, or do their B's\n"
                    "in another order than the gradients come."
                )
        tried += 1
    return (
        f"complete and as fast as GPipe for {tried} sizes, up to {LARGEST[0]} ranks and "
        f"{LARGEST[1]} micro-batches;\nrank r of p keeps p − r at most."
    )


def less_bubble(trial: Trial) -> str:
    """Judges `order` of exercise c."""
    tried = 0
    for (ranks, micro_batches), orders in _lists(trial):
        case = f"{ranks} ranks, {micro_batches} micro-batches"
        if not any(action.kind == "W" for order in orders for action in order):
            raise Wrong(f"{case}: there is no W in these lists: ('W', n) for every micro-batch.")
        _complete(orders, micro_batches, "FBW", case)
        for rank, kept in enumerate(in_flight(orders)):
            most = min(ranks, micro_batches)
            if kept > most:
                raise Wrong(
                    f"{case}: rank {rank} keeps {kept:.0f} micro-batches at once, 1F1B at most "
                    f"{most}.\nA W may wait, but until it is done its micro-batch is kept."
                )
        idle = _idle(orders, micro_batches)
        before = _idle(schedule("1f1b", ranks, micro_batches), micro_batches)
        if micro_batches >= ranks and idle > (ranks - 1) * FORWARD + 1e-9:
            raise Wrong(
                f"{case}: a rank is idle for {idle:g} forward passes, 1F1B {before:g}, and "
                f"{ranks - 1} can be reached.\nWho waits, and has a W that it could do just then?"
            )
        if idle > before + 1e-9:
            raise Wrong(f"{case}: a rank is idle for {idle:g} forward passes, 1F1B {before:g}.")
        tried += 1
    return (
        f"complete for {tried} sizes, up to {LARGEST[0]} ranks and {LARGEST[1]} micro-batches;\n"
        "idle a third of 1F1B's time, and no more is kept."
    )


def _idle(orders: list, micro_batches: int) -> float:
    span = simulate(orders, FORWARD, BACKWARD, WEIGHT).span
    return span - micro_batches * (FORWARD + BACKWARD)


# ---- cases

LARGEST = (17, 60)  # ranks, micro-batches


def _drawn(draw: random.Random) -> list[tuple[int, int]]:
    """(ranks, micro-batches): more and fewer than ranks, one of each, and large ones."""
    sizes = [
        (draw.randrange(3, 6), draw.randrange(7, 10)), (draw.randrange(4, 8), 2), (2, 3), (3, 3),
        (1, draw.randrange(1, 9)), (draw.randrange(2, 8), 1), (1, 1), (2, 1), (2, 2),
        (draw.randrange(6, 10), draw.randrange(10, 30)), (LARGEST[0], draw.randrange(17, 40)),
        (draw.randrange(10, 17), draw.randrange(2, 10)), (draw.randrange(2, 5), LARGEST[1]),
    ]
    return sizes + [(draw.randrange(2, 10), draw.randrange(1, 20)) for _ in range(8)]


def _lists(trial: Trial) -> list:
    """[((ranks, micro-batches), lists)] as two processes make them, each in an order of its own."""
    trial.forbid(LIBRARY)
    sizes = _drawn(trial.draw)
    orders = [trial.draw.sample(range(len(sizes)), len(sizes)) for _ in range(2)]
    with trial.ranks(2) as group:
        here, there = group.run("two processes", lists, sizes, orders)
    for (ranks, micro_batches), mine, theirs in zip(sizes, here, there):
        if mine != theirs:
            rank = next(r for r in range(ranks) if mine[r] != theirs[r])
            raise Wrong(
                f"{ranks} ranks, {micro_batches} micro-batches: in one process "
                f"order({rank}, …) begins {_short(mine[rank])}, in another "
                f"{_short(theirs[rank])}.\nWhat does the list depend on, besides its arguments?"
            )
    return list(zip(sizes, here))


def _short(order: list) -> str:
    return " ".join(map(str, order[:6])) + " …" * (len(order) > 6)


def _complete(orders: list, micro_batches: int, kinds: str, case: str) -> None:
    for rank, order in enumerate(orders):
        for action in order:
            if not 0 <= action.micro_batch < micro_batches:
                last = micro_batches - 1
                raise Wrong(f"{case}: rank {rank} does {action}, and the last one is {last}.")
        for kind in kinds:
            found = {action.micro_batch for action in order if action.kind == kind}
            missing = sorted(set(range(micro_batches)) - found)
            if missing:
                raise Wrong(f"{case}: rank {rank} never does {kind}{missing[0]}.")
    try:
        check(orders)
    except ValueError as error:
        raise Wrong(f"{case}: {error}") from None
    if counts(orders)[2] != micro_batches or any(
        action.kind not in kinds for order in orders for action in order
    ):
        raise Wrong(f"{case}: the lists have something else than {', '.join(kinds)}.")


# ---- in a process of its own


def lists(answer, sizes: list[tuple[int, int]], orders: list[list[int]]) -> list:
    """The answer's lists for each size, asked for in this process's own order, and twice: whoever
    has a list may change it."""
    found, last_first = {}, dist.get_rank() == 1
    for place in orders[dist.get_rank()]:
        found[place] = actions(answer, *sizes[place], last_first)
        again = actions(answer, *sizes[place], last_first)
        for rank, (first, second) in enumerate(zip(found[place], again)):
            if first != second:
                ranks, micro_batches = sizes[place]
                raise Wrong(
                    f"{ranks} ranks, {micro_batches} micro-batches: order({rank}, …) begins "
                    f"{_short(first)}, and a second time\n{_short(second) or 'nothing'}. What does "
                    "the list depend on, besides its arguments?"
                )
    return [found[place] for place in range(len(sizes))]


def actions(answer, ranks: int, micro_batches: int, last_first: bool = False) -> list[list[Action]]:
    """The answer's lists of all ranks, of which the last one is asked for first, or the first."""
    orders = []
    for rank in range(ranks)[:: -1 if last_first else 1]:
        order = answer.order(rank, ranks, micro_batches)
        try:
            orders.append([Action(str(kind), operator.index(n)) for kind, n, *_ in order])
        except (TypeError, ValueError):
            raise Wrong(
                f"order({rank}, {ranks}, {micro_batches}) is {described(order)}, not a list of "
                "(kind, number)."
            ) from None
        if isinstance(order, list):
            order.clear()
    return orders[:: -1 if last_first else 1]
