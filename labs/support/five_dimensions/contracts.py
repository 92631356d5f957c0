"""Given: what the exercises of lab 10 ask for, and how their check cells judge it.

`by_hand` is compared with the formulas for drawn sizes. A strategy is held against the fastest one
that the planner finds, so every strategy that is as good passes; a rejected one gets its reason. A
ladder is climbed on real ranks.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from labs.support.five_dimensions import limit
from labs.support.five_dimensions.cases import CASES, UNSEEN, Case, best
from utils.course.assertions import Wrong, a_number, described
from utils.course.properties import EXAMPLES, for_all
from utils.course.runner import Trial
from utils.planner import Plan, Strategy, plan
from utils.planner.plan import USABLE
from utils.planner.strategy import defaults
from utils.training.config import TrainConfig

NEAR = 0.95  # of the fastest strategy's speed
SEARCHED = 0.98  # of it, for a search
TOO_LONG = 30.0  # seconds of processor time for a search; it takes at most one
RUNGS = 5  # of a ladder, at least
SURE = 0.12  # of the measured peak: how far a prediction may be off
LOWER = 0.98  # of the peak before, at most
APART = {"fp32": 1e-4, "bf16": 1e-2}  # nats, from the losses of one rank

MEMORY_ADVICE = {
    "weights": "split the model further: tp, pp, or zero 3",
    "gradients": "split the model further: tp or pp",
    "optimizer": "zero 1 splits it over dp at no cost",
    "activations": "recompute more, take smaller micro-batches, split them by sequence_parallel",
    "buffers": "take smaller micro-batches",
}
TIME_ADVICE = {
    "compute": "its matrix products are too small for the device: larger micro-batches or less tp",
    "recompute": "activations are recomputed although there is room for them: recompute less",
    "bubble": "stages wait: fewer stages, smaller micro-batches, or more chunks (interleave)",
    "tp": "tensor parallelism communicates in every layer: less tp, and never beyond the node",
    "pp": "hidden states travel between stages too often: fewer stages or fewer chunks",
    "dp": "gradients or weights travel too often: zero 1 instead of 3, or fewer ranks in dp",
    "optimizer": "every rank of dp takes the same optimizer step: zero 1",
}


# ---- a: by hand


def by_hand(trial: Trial) -> str:
    """Judges `state_bytes` and `activation_bytes`."""
    trial.forbid(["utils.planner"])
    trial.alone("by hand", agrees_with_the_formulas, trial.new_seed())
    return (
        f"both agree with the formulas for {EXAMPLES} drawn sets of sizes.\n"
        f"GPT-3 on 8 · 8 · 16 GPUs with zero 1: {state(175e9, 8, 8, 16, 1) / 1e9:.1f} GB of state."
    )


def agrees_with_the_formulas(answer: Any, seed: int) -> None:
    """On a rank."""
    sizes = drawn((10**6, 2 * 10**12), (1, 16), (1, 64), (1, 3072), (0, 3))
    stages = drawn((1, 130), (1, 20_000), (1, 9000), (1, 64), (1, 8), (2, 400))
    no_stage_empty = stages.filter(lambda one: one[0] >= one[3])
    agrees(seed, answer.state_bytes, sizes, state, state_hint)
    agrees(seed, answer.activation_bytes, no_stage_empty, activation, activation_hint)


def drawn(*limits: tuple[int, int]) -> st.SearchStrategy:
    return st.tuples(*(st.integers(*one) for one in limits))


def agrees(
    seed: int, mine: Callable, sizes: st.SearchStrategy, right: Callable, hint: Callable
) -> None:
    """hint: (what is returned, *sizes) -> a cause."""
    names = inspect.signature(right).parameters

    def holds(one: tuple) -> None:
        listed = ", ".join(f"{name}={value}" for name, value in zip(names, one))
        case, wanted = f"{mine.__name__}({listed})", right(*one)
        got = a_number(case, "what it returns", mine(*one))
        if not abs(got - wanted) <= 1 + 1e-9 * wanted:  # it may be rounded to whole bytes
            raise Wrong(f"{case} is {got:,.0f}, and {wanted:,.0f} is right:\n{hint(got, *one)}.")

    for_all(seed, sizes, holds)


def state(parameters: float, tp: int, pp: int, dp: int, zero: int) -> float:
    kinds = ((2, 3), (2, 2), (12, 1))  # bytes, the stage from which they are split
    return parameters / (tp * pp) * sum(size / (dp if zero >= s else 1) for size, s in kinds)


def state_hint(got: float, parameters: int, tp: int, pp: int, dp: int, zero: int) -> str:
    if tp == pp == dp == 1:
        return "one rank holds 2 + 2 + 12 bytes of every parameter"
    if dp == 1:
        return "tp splits every matrix and pp the layers: each rank has 1/(tp · pp) of them"
    names = ("nothing", "the optimizer's 12 bytes", "gradients too", "weights too")
    return f"zero {zero} splits {names[zero]} over the {dp} ranks of dp"


def activation(
    layers: int, hidden: int, seq: int, pp: int, micro_batch: int, micro_batches: int
) -> float:
    return 2 * micro_batch * seq * hidden * math.ceil(layers / pp) * min(pp, micro_batches)


def activation_hint(
    got: float, layers: int, hidden: int, seq: int, pp: int, micro_batch: int, micro_batches: int
) -> str:
    """A cause where the number shows it, else what is asked for."""
    one, here = 2 * micro_batch * seq * hidden, math.ceil(layers / pp)
    under_way = min(pp, micro_batches)
    way = "one micro-batch at a time is" if under_way == 1 else f"{under_way} micro-batches are"
    back = "under way when the first one comes back"
    causes = [
        (here * micro_batches, f"all {micro_batches} micro-batches are counted, and {way} {back}"),
        (here * pp, f"there are only {micro_batches} micro-batches: no more can be under way"),
        (layers // pp * under_way,
         f"{layers} layers on {pp} stages: the fullest one has the rounded-up number"),
        (here, f"one micro-batch is counted, and {way} {back}"),
        (layers * under_way,
         f"all {layers} layers are counted, and the first of {pp} stages has {here}"),
    ]
    asked = (
        "2 bytes for each of micro_batch · seq · hidden values, for each layer of the first stage "
        "and each\nmicro-batch under way; tp does not split a layer's input"
    )
    return next((cause for counted, cause in causes if abs(got - one * counted) <= 1), asked)


# ---- b, c, d: a strategy


def submission(name: str) -> Callable[[Trial], str]:
    """Judges the strategy that the function `name` returns."""

    def judge(trial: Trial) -> str:
        trial.forbid(["planner.search"])
        return judged(strategy_of(trial.alone(name, asked, name)), CASES[name], NEAR)

    return judge


one_node, cluster, frontier = map(submission, CASES)


def submitted(file: str | Path, name: str) -> Strategy | None:
    """The strategy of an exercise in `file`; None where none is written, or it is no strategy."""
    try:
        return strategy_of(Trial(file).alone(name, asked, name))
    except (NotImplementedError, Wrong):
        return None


def asked(answer: Any, function: str, *case: Any) -> dict | str:
    """On a rank: the fields of the strategy that is returned, or what it is instead."""
    strategy = getattr(answer, function)(*case)
    return dict(vars(strategy)) if isinstance(strategy, Strategy) else described(strategy)


def strategy_of(returned: dict | str) -> Strategy:
    if isinstance(returned, str):
        raise Wrong(f"a Strategy is asked for, and this is {returned}")
    return Strategy(**returned)


def judged(strategy: Strategy, case: Case, near: float) -> str:
    """What is good about a strategy; raises Wrong with the reason why it is rejected."""
    model, machine, gpus, batch = case
    open_to = {"global_batch": batch} | defaults(model, machine)
    if (strategy.schedule, strategy.offload) != ("1f1b", "none") or strategy.ep * strategy.cp > 1:
        raise Wrong(
            "in this lab the schedule is 1f1b, nothing is offloaded, and there is no ep and, for "
            "sequences that are this short, no cp"
        )
    if strategy.gpus != gpus:
        raise Wrong(
            f"dp · pp · tp = {strategy.dp} · {strategy.pp} · {strategy.tp} = {strategy.gpus}, and "
            f"there are {gpus} GPUs: all of them must work"
        )
    for name, value in open_to.items():
        if getattr(strategy, name) not in (None, value):
            raise Wrong(f"{name} is {value} here and not yours to choose: leave it None")
    try:
        yours = plan(model, replace(strategy, global_batch=batch), machine)
    except ValueError as error:
        raise Wrong(str(error)) from None
    if not yours.fits:
        raise Wrong(too_large(yours))
    top = best(case)
    speed = top.seconds["total"] / yours.seconds["total"]
    if speed < near:
        raise Wrong(too_slow(yours, top, speed, near))
    return (
        f"{yours.strategy}\nfits: {yours.memory['total'] / 1e9:.1f} GB; MFU {yours.mfu:.1%}, "
        f"{speed:.0%} of the fastest strategy's speed."
    )


def too_large(yours: Plan) -> str:
    limit = USABLE * yours.machine.memory / 1e9
    kinds = {kind: size for kind, size in yours.memory.items() if kind != "total"}
    largest = max(kinds, key=kinds.get)
    return (
        f"does not fit: {yours.memory['total'] / 1e9:.0f} GB on a rank, and {limit:.0f} can be "
        f"used.\nMost are {largest} ({kinds[largest] / 1e9:.0f} GB): {MEMORY_ADVICE[largest]}."
    )


def too_slow(yours: Plan, top: Plan, speed: float, near: float) -> str:
    """Names the kind of time by which the strategy is behind the fastest one most."""
    worst = max(TIME_ADVICE, key=lambda kind: yours.seconds[kind] - top.seconds[kind])
    unit, tp, node = top.seconds["total"], yours.strategy.tp, yours.machine.node
    advice = TIME_ADVICE[worst]
    if worst == "tp" and tp > node:
        advice = (
            f"tp {tp} leaves the node of {node} GPUs: its all-reduces go over the slow network, "
            "in every layer"
        )
    return (
        f"fits, but reaches only {speed:.0%} of the fastest strategy's speed ({near:.0%} passes).\n"
        f"Most is lost by {worst}: {yours.seconds[worst] / unit:.0%} of the fastest step, and "
        f"{top.seconds[worst] / unit:.0%} there.\n{advice}."
    )


# ---- e: a search


def search(trial: Trial) -> str:
    """Judges `best_strategy` on the models and machines of `UNSEEN`."""
    trial.forbid(["planner.search"])
    with trial.ranks(1) as group:
        for case in UNSEEN:
            words, strategy = str(case), "no strategy"
            found = group.run(words, asked, "best_strategy", *case, seconds=TOO_LONG)[0]
            try:
                strategy = strategy_of(found)
                judged(strategy, case, SEARCHED)
            except Wrong as error:
                raise Wrong(f"{words}: {strategy}\n{error}") from None
    return (
        f"the fastest strategy is found for {len(UNSEEN)} models and machines. The last:\n"
        f"{words}: {strategy}"
    )


# ---- f: the limit


def ladder(trial: Trial) -> str:
    """Judges `ladder` on real ranks: what is predicted to fit runs under the cap."""
    limit.rows.clear()
    with trial.ranks(1) as alone:
        returned = alone.run("ladder", lambda answer: answer.ladder())[0]
        rungs = [rung_of(number, one) for number, one in enumerate(listed(returned))]
        one_rank = alone.run("one rank", limit.train, limit.RUN, seconds=limit.SECONDS)[0].losses
    with trial.ranks(limit.RANKS) as group:
        for words, flags, predicted, config in rungs:
            cap = limit.CAP if 1e6 * predicted <= limit.CAP else math.inf
            words += " is predicted to fit" * (cap < math.inf)
            found = group.run(words, limit.train, config, cap, seconds=limit.SECONDS)
            fullest = max(found, key=lambda one: one.peak)
            as_predicted(words, predicted, fullest, config)
            is_lower(words, fullest)
            apart = max(abs(a - b) for a, b in zip(fullest.losses, one_rank))
            if not apart <= APART[config.precision]:
                raise Wrong(f"{words}: a loss is {apart:.2g} from that of one rank")
            limit.rows.append(limit.Rung(flags, predicted, fullest))
    return (
        f"{len(rungs)} rungs on {limit.RANKS} real ranks, each lower than the one before and "
        f"within {SURE:.0%} of its prediction;\nevery curve is that of one rank, and the last fits "
        f"in {limit.CAP / 1e6:.0f} MB."
    )


def listed(rungs: Any) -> list:
    asked = "a list of (options, MB) is asked for, such as [({}, 60.0), …]"
    if not isinstance(rungs, (list, tuple)):
        raise Wrong(f"{asked}, and this is {described(rungs)}")
    for number, one in enumerate(rungs):
        if not isinstance(one, (list, tuple)) or len(one) != 2 or not isinstance(one[0], dict):
            raise Wrong(f"{asked}, and rung {number} is {described(one)}")
    if len(rungs) < RUNGS or rungs[0][0]:
        raise Wrong(f"a ladder begins with the plain run, {{}}, and has {RUNGS} rungs or more")
    if 1e6 * a_number("the last rung", "its prediction", rungs[-1][1]) > limit.CAP:
        raise Wrong(
            f"the last rung is predicted at {rungs[-1][1]:.1f} MB, and a rank may hold "
            f"{limit.CAP / 1e6:.0f}: climb on"
        )
    return list(rungs)


def rung_of(number: int, rung: tuple) -> tuple:
    """(words, options, MB predicted, TrainConfig)."""
    flags, predicted = rung
    words = f"rung {number}, {flags or 'plain'},"
    try:
        config = limit.configured(flags)
    except (TypeError, ValueError) as error:
        raise Wrong(f"{words} {error}") from None
    return words, flags, a_number(words, "its prediction", predicted), config


def as_predicted(
    words: str, predicted: float, found: limit.Measured, config: TrainConfig
) -> None:
    peak = found.peak / 1e6
    if abs(predicted / peak - 1) <= SURE:
        return
    kinds = sorted(found.held.items(), key=lambda kind: -kind[1])
    held = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in kinds)
    hint = "Which kind does your prediction leave out?"
    if predicted > 1e3 * peak:
        hint = "A prediction is in MB, millions of bytes."
    elif predicted < peak and config.accumulate > 1 and config.zero_stage() < 2:
        hint = (
            "DDP's buckets hold every gradient a second time: where micro-batches add up, both are "
            "there at the peak,\nand the planner counts one."
        )
    raise Wrong(f"{words} {predicted:.1f} MB are predicted, {peak:.1f} measured: {held}.\n{hint}")


def is_lower(words: str, found: limit.Measured) -> None:
    """Than the rung before."""
    if limit.rows and found.peak > LOWER * limit.rows[-1].measured.peak:
        raise Wrong(
            f"{words} holds {found.peak / 1e6:.1f} MB, and the rung before "
            f"{limit.rows[-1].measured.peak / 1e6:.1f}: what it saves is not there at the peak. "
            "Ask which kind\nis largest now, and for an option that lowers that one"
        )
