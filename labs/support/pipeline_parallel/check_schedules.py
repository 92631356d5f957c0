"""Given: what the check cells of exercises a and c look at.

First the simulator, for many numbers of ranks and micro-batches: is each list complete, does the
pipeline come to its end, how long does it take, how many micro-batches are kept? Then four real
ranks carry your lists out on a small GPT, and must compute what one rank computes.
"""

import sys
from pathlib import Path

import cloudpickle
import torch
import torch.distributed as dist

from utils.course.checks import Wrong, load_answer, on_ranks
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.parallel.mesh import make_mesh
from utils.parallel.pipeline import Pipeline
from utils.parallel.schedules import Action, check, counts, in_flight, schedule, simulate
from utils.parallel.stages import make_stages
from utils.ranks import Ranks

SIZES = [(1, 3), (2, 1), (2, 2), (2, 5), (3, 3), (3, 7), (4, 2), (4, 4), (4, 6), (4, 9)]
CONFIG = GPTConfig(vocab_size=64, hidden_size=16, layers=4, heads=2)
FORWARD, BACKWARD, WEIGHT = 1.0, 2.0, 1.0  # WEIGHT is the part of BACKWARD that a W takes
RANKS, MICRO_BATCHES = 4, 6


def less_memory(path: Path) -> str:
    """Judges `order` of exercise a."""
    for (ranks, micro_batches), orders in _simulated(path):
        case = f"{ranks} ranks, {micro_batches} micro-batches"
        _complete(orders, micro_batches, "FB", case)
        for rank, kept in enumerate(in_flight(orders)):
            most = min(ranks - rank, micro_batches)
            if kept > most:
                raise Wrong(
                    f"{case}: rank {rank} keeps {kept:.0f} micro-batches at once, and {most} would "
                    "do.\nHow many forward passes come before its first backward pass?"
                )
        takes, gpipe = _span(orders), _span(schedule("gpipe", ranks, micro_batches))
        if takes > gpipe + 1e-9:
            raise Wrong(
                f"{case}: this takes {takes:g} forward passes, GPipe takes {gpipe:g}.\n"
                "Who waits for whom? Some ranks go too few F's ahead, or do their B's\n"
                "in another order than the gradients come."
            )
    _same_model(path)
    return (
        f"complete and as fast as GPipe for {len(SIZES)} sizes; rank r keeps p − r at most;\n"
        f"on {RANKS} real ranks: loss and gradients of one rank, and as little is kept."
    )


def less_bubble(path: Path) -> str:
    """Judges `order` of exercise c."""
    for (ranks, micro_batches), orders in _simulated(path):
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
        idle = _span(orders) - micro_batches * (FORWARD + BACKWARD)
        before = _span(schedule("1f1b", ranks, micro_batches))
        before -= micro_batches * (FORWARD + BACKWARD)
        if micro_batches >= ranks and idle > (ranks - 1) * FORWARD + 1e-9:
            raise Wrong(
                f"{case}: a rank is idle for {idle:g} forward passes, 1F1B {before:g}, and "
                f"{ranks - 1} can be reached.\nWho waits, and has a W that it could do just then?"
            )
        if idle > before + 1e-9:
            raise Wrong(f"{case}: a rank is idle for {idle:g} forward passes, 1F1B {before:g}.")
    _same_model(path)
    return (
        f"complete for {len(SIZES)} sizes; idle a third of 1F1B's time, and no more is kept;\n"
        f"on {RANKS} real ranks: loss and gradients of one rank, and as little is kept."
    )


# ---- the simulator


def _simulated(path: Path) -> list:
    """[((ranks, micro-batches), lists)]; made in another process, which has a time limit."""
    return list(zip(SIZES, on_ranks(1, path, lists, SIZES)[0]))


def lists(answer, sizes) -> list:
    """On a rank: the answer's lists for each size."""
    return [actions(answer, ranks, count) for ranks, count in sizes]


def actions(answer, ranks: int, micro_batches: int) -> list[list[Action]]:
    """The answer's lists of all ranks."""
    orders = []
    for rank in range(ranks):
        order = answer.order(rank, ranks, micro_batches)
        if not isinstance(order, list) or not all(len(tuple(pair)) == 2 for pair in order):
            raise Wrong(f"order({rank}, {ranks}, {micro_batches}) is not a list of (kind, number)")
        orders.append([Action(*pair) for pair in order])
    return orders


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
    if counts(orders)[2] != micro_batches:
        raise Wrong(f"{case}: the lists have {counts(orders)[2]} micro-batches.")


def _span(orders: list) -> float:
    return simulate(orders, FORWARD, BACKWARD, WEIGHT).span


# ---- real ranks


def _same_model(path: Path) -> None:
    # the lists cannot deadlock, the simulator has seen to that: be patient on a busy machine
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with Ranks(RANKS, device="cpu", timeout=60.0) as ranks:
        results = ranks.run(train, str(path), MICRO_BATCHES)
    case = f"on {RANKS} real ranks with {MICRO_BATCHES} micro-batches"
    for rank, (loss, apart, kept, expected) in enumerate(results):
        if loss > 1e-4 or apart > 1e-4:
            raise Wrong(f"{case}: rank {rank}'s gradients differ from one rank's by {apart:.2g}.")
        if kept != expected:
            raise Wrong(f"{case}: rank {rank} keeps {kept} micro-batches, not {expected:.0f}.")


def train(path: str, count: int) -> tuple[float, float, int, float]:
    """On a rank: one step. (distance of the loss, of the gradients, kept, kept by the lists)."""
    mesh = make_mesh(pp=dist.get_world_size())
    orders = actions(load_answer(Path(path)), mesh.pp.size, count)
    tokens = torch.randint(64, (count, 9), generator=torch.Generator().manual_seed(1))
    pairs = [(row[:, :-1], row[:, 1:]) for row in tokens.split(1)]
    loss, expected = _alone(tokens)

    stages = make_stages(_model(), mesh.pp)
    pipeline = Pipeline(stages, mesh.pp, orders, _loss)
    distance = abs(pipeline.run(pairs).item() - loss)
    named = dict(stages[0].named_parameters())
    apart = max((p.grad - expected[name]).abs().max().item() for name, p in named.items())
    last = "W" if any(event.kind == "W" for event in pipeline.events) else "B"
    kept = most = 0
    for event in pipeline.events:
        kept += (event.kind == "F") - (event.kind == last)
        most = max(most, kept)
    return distance, apart, most, in_flight(orders)[mesh.pp.index]


def _model() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def _loss(logits, y):
    return cross_entropy(logits, y, reduction="sum") / 50


def _alone(tokens) -> tuple[float, dict]:
    model = _model()
    loss = _loss(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}
