"""Given: what the check cells look at: does it fit, how fast is it, and if it is slow, why.

`by_hand` and `search` are functions: they are asked about drawn models, machines and sizes. The
three submissions answer one fixed question each, so there is nothing to draw: the planner holds a
layout against all others, and each that is as good passes, however it is written.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from labs.support.five_dimensions.cases import CASES, Case, best
from utils.choices import RECOMPUTE
from utils.course.assertions import Wrong, a_number, described, not_called
from utils.course.runner import Trial
from utils.planner import MACHINES, Model, Plan, Strategy, plan
from utils.planner.plan import USABLE, evaluate
from utils.planner.search import candidates
from utils.planner.strategy import Columns, defaults

NEAR = 0.95  # of the fastest strategy's speed
OWN = 0.98  # of it, for a search
TOO_LONG = 60.0  # seconds for a search; on a free core it takes one at most
PLANNER, SEARCH = "utils/planner/", "utils/planner/search.py"  # what is to be done by hand

MEMORY_ADVICE = {
    "weights": "split the model further: tp, pp, or zero 3",
    "gradients": "split the model further: tp or pp",
    "optimizer": "zero 1 shares it out over dp at no cost",
    "activations": "recompute more, take smaller micro-batches, split them by sequence_parallel",
    "buffers": "take smaller micro-batches",
}
TIME_ADVICE = {
    "compute": "its matrix products are too small for the device: larger micro-batches or less tp",
    "recompute": "activations are computed again although there is room: recompute less",
    "bubble": "stages wait: fewer stages, smaller micro-batches, or more chunks (interleave)",
    "tp": "tensor parallelism talks in every layer: less tp, and never beyond the node",
    "pp": "hidden states travel between stages too often: fewer stages or fewer chunks",
    "dp": "gradients or weights travel too often: zero 1 in place of 3, or fewer ranks in dp",
    "optimizer": "every rank of dp makes the same optimizer step: zero 1",
}


# ---- a: by hand

STATE = ("parameters", "tp", "pp", "dp", "zero")
ACTIVATIONS = ("layers", "hidden", "seq", "pp", "micro_batch", "micro_batches")


def by_hand(trial: Trial) -> str:
    """Judges `state_bytes` and `activation_bytes`."""
    states, kept = _states(trial.draw), _activations(trial.draw)
    found = trial.alone("by hand", _work_out, states, kept)
    for got, case in zip(found[0], states):
        _same(got, _state(*case), "state_bytes", STATE, case, _state_hint(*case))
    for got, case in zip(found[1], kept):
        _same(got, _activation(*case), "activation_bytes", ACTIVATIONS, case,
              _activation_hint(got, *case))
    return (
        f"{len(states)} states and {len(kept)} sets of activations are right.\n"
        f"GPT-3 on 8 · 8 · 16 GPUs with zero 1: {_state(175e9, 8, 8, 16, 1) / 1e9:.1f} GB of state."
    )


def _states(draw) -> list[tuple]:
    """Each split alone, then all of them, at each stage of ZeRO."""
    cases = []
    for _ in range(3):
        tp, pp = draw.choice((2, 3, 4, 6, 8, 16)), draw.choice((2, 3, 7, 12, 35, 64))
        dp = draw.choice((2, 3, 5, 16, 31, 3072))
        parameters = draw.choice((draw.randrange(10**6, 10**9), draw.uniform(1e9, 2e12)))
        for sizes in ((1, 1, 1), (tp, 1, 1), (1, pp, 1), (tp, pp, 1), (1, 1, dp), (tp, pp, dp)):
            cases += [(parameters, *sizes, zero) for zero in range(4)]
    return cases


def _activations(draw) -> list[tuple]:
    """One stage and several, whose layers are not alike; fewer, as many and more micro-batches."""
    cases = []
    for pp in (draw.choice((2, 3, 5, 8)), draw.randrange(9, 70), draw.randrange(1001, 2000)):
        for stages, layers in (
            (1, 1),
            (1, draw.randrange(2, 130)),
            (pp, pp * draw.randrange(1, 9)),
            (pp, pp * draw.randrange(1, 9) + draw.choice((1, draw.randrange(1, pp)))),
        ):
            for micro_batches in (draw.randrange(pp + 1, pp + 400), pp, draw.randrange(1, pp), 1):
                sizes = layers, draw.randrange(100, 20_000), draw.randrange(100, 9000), stages
                cases.append((*sizes, draw.choice((1, 2, 3, 8)), micro_batches))
    return cases


def _work_out(answer, states: list[tuple], kept: list[tuple]) -> list[list[float]]:
    """In a process of its own: every case, by position and by name in turn; then all once more."""

    def ask(name: str, names: tuple, cases: list[tuple]) -> list[float]:
        function, found = getattr(answer, name), []
        for index, case in enumerate(cases):
            said = function(*case) if index % 2 else function(**dict(zip(names, case)))
            found.append(a_number(_call(name, names, case), "what it returns", said))
        return found

    every = (("state_bytes", STATE, states), ("activation_bytes", ACTIVATIONS, kept))
    with not_called(PLANNER):
        found = [ask(*one) for one in every]
        for (name, names, cases), first in zip(every, found):
            for case, one, two in zip(cases, first, reversed(ask(name, names, cases[::-1]))):
                if one != two:
                    raise Wrong(
                        f"{_call(name, names, case)} is {one:,.0f}, and {two:,.0f} when it is "
                        "asked again.\nWhat does the function remember?"
                    )
    return found


def _call(name: str, names: tuple, case: tuple) -> str:
    first, *others = zip(names, case)
    shown = f"{first[1]:.0f}, " + ", ".join(f"{word}={value}" for word, value in others)
    return f"{name}({shown})"


def _same(got: float, right: float, name: str, names: tuple, case: tuple, hint: str) -> None:
    """A byte, or a billionth, may be missing: somebody has rounded."""
    if not abs(got - right) <= 1 + 1e-9 * right:
        raise Wrong(
            f"{_call(name, names, case)} is {got:,.0f}, and {right:,.0f} is right:\n{hint}."
        )


def _state(parameters, tp, pp, dp, zero):
    parts = ((2, 3), (2, 2), (12, 1))  # bytes, the stage from which they are split
    return parameters / (tp * pp) * sum(b / (dp if zero >= stage else 1) for b, stage in parts)


def _state_hint(parameters, tp, pp, dp, zero):
    if tp == pp == dp == 1:
        return "one rank holds 2 + 2 + 12 bytes of every parameter"
    if dp == 1:
        return "tp splits every matrix and pp the layers: each rank has 1/(tp · pp) of them"
    names = {0: "nothing", 1: "the optimizer's 12 bytes", 2: "gradients too", 3: "weights too"}
    return f"zero {zero} shares out {names[zero]} over the {dp} ranks of dp"


def _activation(layers, hidden, seq, pp, micro_batch, micro_batches):
    return 2 * micro_batch * seq * hidden * math.ceil(layers / pp) * min(pp, micro_batches)


def _activation_hint(got, layers, hidden, seq, pp, micro_batch, micro_batches):
    """A cause where the number shows it, else what is asked for."""
    one, here = 2 * micro_batch * seq * hidden, math.ceil(layers / pp)
    under_way = min(pp, micro_batches)
    way = "one micro-batch at a time is" if under_way == 1 else f"{under_way} micro-batches are"
    for counted, cause in (
        (here * micro_batches, f"all {micro_batches} micro-batches are counted, and {way} under "
                               "way when the first one comes back"),
        (here * pp, f"there are only {micro_batches} micro-batches: no more can be under way"),
        (here, f"one micro-batch is counted, and {way} under way when the first one comes back"),
        (layers // pp * under_way, f"{layers} layers on {pp} stages: the fullest one has the "
                                   "rounded-up number"),
        (layers * under_way, f"all {layers} layers are counted, and the first of {pp} stages has "
                             f"{here}"),
    ):
        if abs(got - one * counted) <= 1:
            return cause
    return (
        "2 bytes for each of micro_batch · seq · hidden values, for each layer of the first stage "
        "and each\nmicro-batch under way; tp does not split a layer's input"
    )


# ---- b, c, d: a strategy


def one_node(trial: Trial) -> str:
    """Judges `one_node`."""
    return _submission(trial, "one_node")


def cluster(trial: Trial) -> str:
    """Judges `cluster`."""
    return _submission(trial, "cluster")


def frontier(trial: Trial) -> str:
    """Judges `frontier`."""
    return _submission(trial, "frontier")


def submitted(file: str | Path, name: str) -> Strategy | None:
    """The strategy of an exercise in `file`; None where none is written, or it is no strategy."""
    try:
        return _strategy(Trial(file).alone(name, _ask, name))
    except (NotImplementedError, Wrong):
        return None


def _submission(trial: Trial, name: str) -> str:
    strategy = _strategy(trial.alone(name, _ask, name))
    return judge(strategy, CASES[name], NEAR)


def _ask(answer, name: str) -> Any:
    with not_called(SEARCH):
        return _sent(getattr(answer, name)())


def _sent(strategy: Any) -> dict | str:
    """What a process sends of what it was given: a strategy's fields, or words."""
    return dict(vars(strategy)) if isinstance(strategy, Strategy) else described(strategy)


def _strategy(sent: dict | str) -> Strategy:
    if isinstance(sent, str):
        raise Wrong(f"a Strategy is asked for, and this is {sent}")
    return Strategy(**sent)


def judge(strategy: Strategy, case: Case, near: float, least: float | None = None) -> str:
    """What is good about a strategy; raises Wrong with the reason why it is rejected.

    least: seconds of the fastest step; None: that of the planner's search.
    """
    if (strategy.schedule, strategy.offload) != ("1f1b", "none") or strategy.ep * strategy.cp > 1:
        raise Wrong(
            "in this lab the schedule is 1f1b, nothing is offloaded, and there is no ep and, for "
            "sequences that are this short, no cp"
        )
    if strategy.gpus != case.gpus:
        raise Wrong(
            f"dp · pp · tp = {strategy.dp} · {strategy.pp} · {strategy.tp} = {strategy.gpus}, and "
            f"there are {case.gpus} GPUs: all of them must work"
        )
    for name, value in defaults(case.model, case.machine).items():
        if getattr(strategy, name) not in (None, value):
            raise Wrong(f"{name} is not yours to choose here: leave it None")
    if strategy.global_batch not in (None, case.global_batch):
        raise Wrong(
            f"global_batch is {strategy.global_batch}, and a step has {case.global_batch} "
            "sequences: leave it None"
        )
    strategy = replace(strategy, global_batch=case.global_batch)
    try:
        yours = plan(case.model, strategy, case.machine)
    except ValueError as error:
        raise Wrong(str(error)) from None
    if not yours.fits:
        raise Wrong(_too_large(yours))
    top = best(case)
    speed = (least or top.seconds["total"]) / yours.seconds["total"]
    if speed < near:
        raise Wrong(_too_slow(yours, top, speed, near))
    return (
        f"{strategy}\nfits: {yours.memory['total'] / 1e9:.1f} GB; MFU {yours.mfu:.1%}, "
        f"{speed:.0%} of the fastest strategy's speed."
    )


def _too_large(yours: Plan) -> str:
    limit = USABLE * yours.machine.memory / 1e9
    kinds = {kind: size for kind, size in yours.memory.items() if kind != "total"}
    largest = max(kinds, key=kinds.get)
    return (
        f"does not fit: {yours.memory['total'] / 1e9:.0f} GB on a rank, and {limit:.0f} can be "
        f"used.\nMost are {largest} ({kinds[largest] / 1e9:.0f} GB): {MEMORY_ADVICE[largest]}."
    )


def _too_slow(yours: Plan, top: Plan, speed: float, near: float) -> str:
    """The kind of time by which the strategy is behind the fastest one most."""
    behind = {kind: yours.seconds[kind] - top.seconds[kind] for kind in TIME_ADVICE}
    worst = max(behind, key=behind.get)
    unit = top.seconds["total"]
    node = yours.machine.node
    advice = TIME_ADVICE[worst]
    if worst == "tp" and yours.strategy.tp > node:
        advice = f"tp {yours.strategy.tp} leaves the node of {node} GPUs: its all-reduces go over "
        advice += "the slow network, in every layer"
    return (
        f"fits, but reaches only {speed:.0%} of the fastest strategy's speed ({near:.0%} passes).\n"
        f"Most is lost by {worst}: {yours.seconds[worst] / unit:.0%} of the fastest step, and "
        f"{top.seconds[worst] / unit:.0%} there.\n{advice}."
    )


# ---- e: a search

GPUS = (6, 8, 12, 16, 20, 24, 35, 40, 48, 56, 64, 96, 105)
DEVICES = ("dgx-a100", "dgx-h100", "dgx-v100", "frontier", "aws-p4d")
TRIES = 400  # until every habit has been met
# What a search may have tried too little of: the strategies that it would still find. The drawn
# cases are such that each of these is too slow, or does not fit, in one of them.
HABITS: dict[str, Callable[[Columns], np.ndarray]] = {
    "powers of two": lambda c: _power(c.tp) & _power(c.pp),
    "tp 1": lambda c: c.tp == 1,
    "tp up to 2": lambda c: c.tp <= 2,
    "tp up to 4": lambda c: c.tp <= 4,
    "tp from 2": lambda c: c.tp > 1,
    "pp 1": lambda c: c.pp == 1,
    "pp up to 4": lambda c: c.pp <= 4,
    "pp from 2": lambda c: c.pp > 1,
    "dp from 2": lambda c: c.dp > 1,
    "micro-batches from 2": lambda c: c.micro_batch > 1,
    **{f"no micro-batches of {b}": lambda c, b=b: c.micro_batch != b for b in (2, 4, 8)},
    "micro-batches up to 4": lambda c: c.micro_batch <= 4,
    "no chunks": lambda c: c.interleave == 1,
    "chunks up to 2": lambda c: c.interleave <= 2,
    "chunks up to 4": lambda c: c.interleave <= 4,
    "chunks by powers of two": lambda c: _power(c.interleave),
    **{f"not {mode}": lambda c, mode=mode: c.recompute != mode for mode in RECOMPUTE},
    **{f"no zero {stage}": lambda c, stage=stage: c.zero != stage for stage in (0, 1, 3)},
    "whole sequences": lambda c: ~c.sequence_parallel,
    "split sequences": lambda c: c.sequence_parallel | (c.pp * c.tp * c.dp == 1),
}


def search(trial: Trial) -> str:
    """Judges `best_strategy` on drawn models and machines."""
    cases = unseen(trial.draw)
    found = []
    with trial.ranks(1) as group:
        for some in (cases[:3], *([case] for case in cases[3:])):
            words = " and then ".join(map(_words, some))
            found += group.run(words, _search, some, seconds=TOO_LONG)[0]
    for case, sent in zip(cases, found):
        strategy = "it returns nothing that is one"
        try:
            strategy = _strategy(sent)
            judge(strategy, case, OWN, _costs(case)[3])
        except Wrong as error:
            raise Wrong(f"{_words(case)}: {strategy}\n{error}") from None
    last = "\n".join(
        f"{_words(case)}: {_strategy(sent)}" for case, sent in zip(cases[-2:], found[-2:])
    )
    return f"the fastest strategy is found for {len(cases)} drawn models and machines.\n{last}"


def _search(answer, cases: list[Case]) -> list:
    found = []
    for case in cases:
        model, machine = replace(case.model), replace(case.machine)
        with not_called(SEARCH):
            found.append(_sent(answer.best_strategy(model, machine, *case[2:])))
        if (model, machine) != case[:2]:
            raise Wrong(f"{case.model.name}: model or machine is not what it was before the call.")
    return found


def unseen(draw) -> list[Case]:
    """One device; a machine, and one of the same name with less memory; then few in which every
    habit is met; at last a large machine."""
    alone = Model(draw.randrange(2, 13), 64 * draw.choice((6, 8, 12)), 2, seq=1024, name="drawn")
    one = Case(alone, MACHINES[draw.choice(DEVICES)], 1, draw.randrange(1, 13))
    drawn, twins, missing = [], [], {*HABITS, "whatever fits"}
    for _ in range(TRIES):
        case = _draw(draw, draw.choice(GPUS))
        c, seconds, held, least = _costs(case)
        if least is None:
            continue
        fits = held <= USABLE * case.machine.memory
        met = {name for name, habit in HABITS.items() if _slow(seconds, fits & habit(c), least)}
        met |= {"whatever fits"} if not fits[seconds.argmin()] else set()
        top = np.flatnonzero(fits)[seconds[fits].argmin()]
        smaller = replace(case.machine, memory=0.97 * held[top] / USABLE)
        if not twins and (held <= USABLE * smaller.memory).any():
            twins = [case, case._replace(machine=smaller)]
        else:
            drawn.append((case, met))
        missing -= met
        if not missing and twins:
            break
    chosen, missing = [], set().union(*(met for _, met in drawn))
    while missing:  # those in which most are met come first
        case, met = max(drawn, key=lambda one: len(one[1] & missing))
        chosen.append(case)
        missing -= met
    while _costs(large := _draw(draw, draw.choice((360, 560, 1024))))[3] is None:
        pass
    return [one, *twins, *chosen, large]


def _draw(draw, gpus: int) -> Case:
    heads = draw.choice((8, 12, 15, 16, 20, 24, 35, 40, 48, 64, 96))
    model = Model(
        layers=draw.randrange(8, 121),
        hidden_size=heads * draw.choice((64, 128)),
        heads=heads,
        vocab_size=draw.choice((32_000, 50_257, 51_200)),
        seq=draw.choice((1024, 2048, 4096)),
        gated=draw.random() < 0.4,
        name="drawn",
    )
    batch = gpus * draw.choice((1, 2, 3, 4, 6, 8, 12, 16))
    return Case(model, MACHINES[draw.choice(DEVICES)], gpus, batch)


def _costs(case: Case) -> tuple[Columns, np.ndarray, np.ndarray, float | None]:
    """All that a search must try at least: their seconds and bytes, and the seconds of the fastest
    that fits."""
    c = candidates(*case, micro_batch=(1, 2, 4, 8, 16), cp=1)
    if not len(c):
        return c, np.array([]), np.array([]), None
    held, _, seconds, _, fits = evaluate(case.model, c, case.machine)
    least = seconds["total"][fits].min().item() if fits.any() else None
    return c, seconds["total"], held["total"], least


def _slow(seconds: np.ndarray, left: np.ndarray, least: float) -> bool:
    return not left.any() or OWN * seconds[left].min() > least


def _power(number: np.ndarray) -> np.ndarray:
    return number & (number - 1) == 0


def _words(case: Case) -> str:
    return (
        f"{case.model.layers} layers of {case.model.hidden_size} on {case.gpus} x "
        f"{case.machine.name} of {case.machine.memory / 1e9:.0f} GB, {case.global_batch} sequences"
    )
