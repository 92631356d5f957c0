"""Given: the contracts of lab 10's exercises, and the judges behind their check cells.

`by_hand` is compared with the formulas for drawn sizes. A strategy is compared with the fastest one
that the planner finds: any strategy that is as good passes, and a rejected one gets a reason. A
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

NEAR = 0.95  # fraction of the fastest strategy's speed that passes
SEARCHED = 0.98  # the same, for a search
TOO_LONG = 30.0  # seconds of CPU time for a search, which should take at most one
RUNGS = 5  # the fewest a ladder may have
SURE = 0.12  # fraction of the measured peak by which a prediction may be off
LOWER = 0.98  # the most a rung's peak may be, as a fraction of the previous rung's
APART = {"fp32": 1e-4, "bf16": 1e-2}  # nats by which losses may differ from one rank's

MEMORY_ADVICE = {
    "weights": "split the model further: tp, pp, or zero 3",
    "gradients": "split the model further: tp or pp",
    "optimizer": "zero 1 splits it over dp at no cost",
    "activations": "recompute more, use smaller micro-batches, or shard them (sequence_parallel)",
    "buffers": "use smaller micro-batches",
}
TIME_ADVICE = {
    "compute": "its matrix products are too small for the device: use larger micro-batches or less "
    "tp",
    "recompute": "activations are recomputed although there is room for them: recompute less",
    "bubble": "stages wait: use fewer stages, smaller micro-batches, or more chunks (interleave)",
    "tp": "tensor parallelism communicates in every layer: use less tp, and never beyond the node",
    "pp": "hidden states are sent between stages too often: use fewer stages or fewer chunks",
    "dp": "gradients or weights are sent too often: use zero 1 instead of 3, or fewer ranks in dp",
    "optimizer": "every rank of dp takes the same optimizer step: use zero 1",
}


# ---- a: by hand


def by_hand(trial: Trial) -> str:
    """Judge `state_bytes` and `activation_bytes`."""
    trial.forbid(["utils.planner"])
    trial.alone("by hand", agrees_with_the_formulas, trial.new_seed())
    return (
        f"both agree with the formulas for {EXAMPLES} drawn sets of sizes.\n"
        f"GPT-3 on 8 · 8 · 16 GPUs with zero 1 has {state(175e9, 8, 8, 16, 1) / 1e9:.1f} GB of "
        "state per rank."
    )


def agrees_with_the_formulas(answer: Any, seed: int) -> None:
    """On a rank: compare both functions with the formulas."""
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
    """Compare a function with the right one. hint: (result, *sizes) -> a cause."""
    names = inspect.signature(right).parameters

    def holds(one: tuple) -> None:
        listed = ", ".join(f"{name}={value}" for name, value in zip(names, one))
        case, wanted = f"{mine.__name__}({listed})", right(*one)
        got = a_number(case, "its result", mine(*one))
        if not abs(got - wanted) <= 1 + 1e-9 * wanted:  # it may be rounded to whole bytes
            raise Wrong(f"{case} is {got:,.0f}, and {wanted:,.0f} is right:\n{hint(got, *one)}.")

    for_all(seed, sizes, holds)


def state(parameters: float, tp: int, pp: int, dp: int, zero: int) -> float:
    kinds = ((2, 3), (2, 2), (12, 1))  # bytes, the ZeRO stage from which they are sharded
    return parameters / (tp * pp) * sum(size / (dp if zero >= s else 1) for size, s in kinds)


def state_hint(got: float, parameters: int, tp: int, pp: int, dp: int, zero: int) -> str:
    if tp == pp == dp == 1:
        return "one rank holds 2 + 2 + 12 bytes per parameter"
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
    """The cause if the result reveals it, else the formula in words."""
    one, here = 2 * micro_batch * seq * hidden, math.ceil(layers / pp)
    under_way = min(pp, micro_batches)
    way = "one micro-batch at a time is" if under_way == 1 else f"{under_way} micro-batches are"
    back = "in flight when the first one comes back"
    causes = [
        (here * micro_batches, f"all {micro_batches} micro-batches are counted, but {way} {back}"),
        (here * pp, f"there are only {micro_batches} micro-batches: no more can be in flight"),
        (layers // pp * under_way,
         f"{layers} layers on {pp} stages: round up for the fullest stage"),
        (here, f"one micro-batch is counted, but {way} {back}"),
        (layers * under_way,
         f"all {layers} layers are counted, but the first of {pp} stages has {here}"),
    ]
    asked = (
        "2 bytes for each of micro_batch · seq · hidden values, for each layer of the first stage "
        "and each\nmicro-batch in flight; tp does not split a layer's input"
    )
    return next((cause for counted, cause in causes if abs(got - one * counted) <= 1), asked)


# ---- b, c, d: a strategy


def submission(name: str) -> Callable[[Trial], str]:
    """Make a judge of the strategy that the function `name` returns."""

    def judge(trial: Trial) -> str:
        trial.forbid(["planner.search"])
        return judged(strategy_of(trial.alone(name, asked, name)), CASES[name], NEAR)

    return judge


one_node, cluster, frontier = map(submission, CASES)


def submitted(file: str | Path, name: str) -> Strategy | None:
    """The strategy of an exercise in `file`; None if none is written, or it is not a strategy."""
    try:
        return strategy_of(Trial(file).alone(name, asked, name))
    except (NotImplementedError, Wrong):
        return None


def asked(answer: Any, function: str, *case: Any) -> dict | str:
    """On a rank: the fields of the returned strategy, or a description of what is returned
    instead."""
    strategy = getattr(answer, function)(*case)
    return dict(vars(strategy)) if isinstance(strategy, Strategy) else described(strategy)


def strategy_of(returned: dict | str) -> Strategy:
    if isinstance(returned, str):
        raise Wrong(f"it should be a Strategy, and this is {returned}")
    return Strategy(**returned)


def judged(strategy: Strategy, case: Case, near: float) -> str:
    """Return the text for a good strategy; raises Wrong with the reason why it is rejected."""
    model, machine, gpus, batch = case
    open_to = {"global_batch": batch} | defaults(model, machine)
    if (strategy.schedule, strategy.offload) != ("1f1b", "none") or strategy.ep * strategy.cp > 1:
        raise Wrong(
            "in this lab the schedule is 1f1b, nothing is offloaded, and there is no ep and, with "
            "sequences this short, no cp"
        )
    if strategy.gpus != gpus:
        raise Wrong(
            f"dp · pp · tp = {strategy.dp} · {strategy.pp} · {strategy.tp} = {strategy.gpus}, but "
            f"there are {gpus} GPUs: use all of them"
        )
    for name, value in open_to.items():
        if getattr(strategy, name) not in (None, value):
            raise Wrong(f"{name} is fixed at {value} here: leave it None")
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
        f"does not fit: {yours.memory['total'] / 1e9:.0f} GB per rank, of which {limit:.0f} are "
        f"usable.\nMost are {largest} ({kinds[largest] / 1e9:.0f} GB): {MEMORY_ADVICE[largest]}."
    )


def too_slow(yours: Plan, top: Plan, speed: float, near: float) -> str:
    """Name the kind of time in which the strategy loses most to the fastest one."""
    worst = max(TIME_ADVICE, key=lambda kind: yours.seconds[kind] - top.seconds[kind])
    unit, tp, node = top.seconds["total"], yours.strategy.tp, yours.machine.node
    advice = TIME_ADVICE[worst]
    if worst == "tp" and tp > node:
        advice = (
            f"tp {tp} exceeds the node of {node} GPUs: its all-reduces go over the slow network "
            "in every layer"
        )
    return (
        f"fits, but reaches only {speed:.0%} of the fastest strategy's speed ({near:.0%} passes).\n"
        f"Most is lost to {worst}: {yours.seconds[worst] / unit:.0%} of the fastest step's time, "
        f"and {top.seconds[worst] / unit:.0%} in that step itself.\n{advice}."
    )


# ---- e: a search


def search(trial: Trial) -> str:
    """Judge `best_strategy` on the models and machines of `UNSEEN`."""
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
        f"it finds the fastest strategy for {len(UNSEEN)} models and machines. The last:\n"
        f"{words}: {strategy}"
    )


# ---- f: the limit


def ladder(trial: Trial) -> str:
    """Judge `ladder` on real ranks: runs that are predicted to fit run under the cap."""
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
                raise Wrong(f"{words}: a loss is {apart:.2g} away from that of one rank")
            limit.rows.append(limit.Rung(flags, predicted, fullest))
    return (
        f"{len(rungs)} rungs on {limit.RANKS} real ranks, each lower than the previous one and "
        f"within {SURE:.0%} of its prediction;\nevery curve matches that of one rank, and the last "
        f"fits in {limit.CAP / 1e6:.0f} MB."
    )


def listed(rungs: Any) -> list:
    asked = "it should be a list of (options, MB), such as [({}, 60.0), …]"
    if not isinstance(rungs, (list, tuple)):
        raise Wrong(f"{asked}, and this is {described(rungs)}")
    for number, one in enumerate(rungs):
        if not isinstance(one, (list, tuple)) or len(one) != 2 or not isinstance(one[0], dict):
            raise Wrong(f"{asked}, and rung {number} is {described(one)}")
    if len(rungs) < RUNGS or rungs[0][0]:
        raise Wrong(f"a ladder begins with the plain run, {{}}, and has at least {RUNGS} rungs")
    if 1e6 * a_number("the last rung", "its prediction", rungs[-1][1]) > limit.CAP:
        raise Wrong(
            f"the last rung is predicted at {rungs[-1][1]:.1f} MB, but a rank may hold only "
            f"{limit.CAP / 1e6:.0f}: keep climbing"
        )
    return list(rungs)


def rung_of(number: int, rung: tuple) -> tuple:
    """(name, options, predicted MB, TrainConfig)."""
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
            "DDP's buckets hold every gradient a second time: with gradient accumulation, both are "
            "in memory at\nthe peak, and the planner counts one."
        )
    raise Wrong(f"{words} {predicted:.1f} MB are predicted, {peak:.1f} measured: {held}.\n{hint}")


def is_lower(words: str, found: limit.Measured) -> None:
    """A rung's peak is lower than the previous one's."""
    if limit.rows and found.peak > LOWER * limit.rows[-1].measured.peak:
        raise Wrong(
            f"{words} holds {found.peak / 1e6:.1f} MB, and the previous rung "
            f"{limit.rows[-1].measured.peak / 1e6:.1f}: what it saves is not in memory at the "
            "peak. Which kind is\nlargest now, and which option reduces that one?"
        )
