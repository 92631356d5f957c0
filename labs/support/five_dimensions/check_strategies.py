"""Given: what the check cells look at: does it fit, how fast is it, and if it is slow, why."""

import math
from pathlib import Path

from labs.support.five_dimensions.cases import CASES, Case, best
from utils.course import checks
from utils.course.checks import Wrong, load_answer
from utils.planner import MACHINES, MODELS, Plan, Strategy, plan
from utils.planner.plan import USABLE

NEAR = 0.95  # of the fastest strategy's speed
OWN = 0.98  # of it, for a search
TOO_LONG = 60.0  # seconds for a search; on a free core it takes two

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


def by_hand(path: Path) -> str:
    """Judges `state_bytes` and `activation_bytes`."""
    answer = load_answer(path)
    for parameters in (175e9, 7e9):
        for tp, pp, dp in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (8, 8, 16), (4, 2, 3)):
            for zero in (0, 1, 2, 3):
                got = answer.state_bytes(parameters, tp, pp, dp, zero)
                _same(got, _state(parameters, tp, pp, dp, zero),
                      f"state_bytes({parameters:.0f}, tp={tp}, pp={pp}, dp={dp}, zero={zero})",
                      _state_hint(tp, pp, dp, zero))  # fmt: skip
    for layers, pp, b, m in ((96, 1, 1, 8), (96, 8, 1, 64), (96, 8, 4, 16), (96, 8, 1, 4),
                             (105, 16, 2, 32)):  # fmt: skip
        right = 2 * b * 2048 * 12288 * math.ceil(layers / pp) * min(pp, m)
        got = answer.activation_bytes(layers, 12288, 2048, pp, b, m)
        _same(got, right, f"activation_bytes({layers}, 12288, 2048, pp={pp}, micro_batch={b}, "
              f"micro_batches={m})", _activation_hint(layers, pp, m))  # fmt: skip
    return (
        "40 states and 5 sets of activations are right.\n"
        f"GPT-3 on 8 · 8 · 16 GPUs with zero 1: {_state(175e9, 8, 8, 16, 1) / 1e9:.1f} GB of state."
    )


def _state(parameters, tp, pp, dp, zero):
    parts = ((2, 3), (2, 2), (12, 1))  # bytes, the stage from which they are split
    return parameters / (tp * pp) * sum(b / (dp if zero >= stage else 1) for b, stage in parts)


def _state_hint(tp, pp, dp, zero):
    if tp == pp == dp == 1:
        return "one rank holds 2 + 2 + 12 bytes of every parameter"
    if dp == 1:
        return "tp splits every matrix and pp the layers: each rank has 1/(tp · pp) of them"
    names = {0: "nothing", 1: "the optimizer's 12 bytes", 2: "gradients too", 3: "weights too"}
    return f"zero {zero} shares out {names[zero]} over the {dp} ranks of dp"


def _activation_hint(layers, pp, m):
    if pp == 1:
        return "without stages one micro-batch at a time is under way"
    if m < pp:
        return f"there are only {m} micro-batches: no more can be under way"
    if layers % pp:
        return f"{layers} layers on {pp} stages: the fullest one has the rounded-up number"
    return (
        f"the first stage has {layers // pp} layers, and {pp} micro-batches are under way when "
        "the first one comes back; tp does not split a layer's input"
    )


def _same(got, right, call, hint):
    if not isinstance(got, (int, float)) or not math.isclose(got, right, rel_tol=1e-6):
        shown = f"{got:,.0f}" if isinstance(got, (int, float)) else repr(got)
        raise Wrong(f"{call} is {shown}, and {right:,.0f} is right:\n{hint}.")


# ---- b, c, d: a strategy


def one_node(path: Path) -> str:
    return _submission(path, "one_node")


def cluster(path: Path) -> str:
    return _submission(path, "cluster")


def frontier(path: Path) -> str:
    return _submission(path, "frontier")


def _submission(path: Path, name: str) -> str:
    strategy = getattr(load_answer(path), name)()
    case = CASES[name]
    return judge(strategy, case, NEAR)


def judge(strategy: object, case: Case, near: float) -> str:
    """What is good about a strategy; raises Wrong with the reason why it is rejected."""
    if not isinstance(strategy, Strategy):
        raise Wrong(f"a Strategy is asked for, and this is of type {type(strategy).__name__}")
    if strategy.gpus != case.gpus:
        raise Wrong(
            f"dp · pp · tp = {strategy.dp} · {strategy.pp} · {strategy.tp} = {strategy.gpus}, and "
            f"there are {case.gpus} GPUs: all of them must work"
        )
    if strategy.schedule != "1f1b" or strategy.offload != "none" or strategy.ep > 1:
        raise Wrong("in this lab the schedule is 1f1b, nothing is offloaded and there is no ep")
    if (strategy.attention, strategy.precision) != (None, None):
        raise Wrong("attention and precision are not yours to choose here: leave them None")
    strategy = Strategy(**{**vars(strategy), "global_batch": case.global_batch})
    try:
        yours = plan(case.model, strategy, case.machine)
    except ValueError as error:
        raise Wrong(str(error)) from None
    if not yours.fits:
        raise Wrong(_too_large(yours))
    top = best(case)
    speed = top.seconds["total"] / yours.seconds["total"]
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

UNSEEN = {
    "13 billion on 64 V100": Case(MODELS["gpt3-13b"], MACHINES["dgx-v100"], 64, 512),
    "Llama 3 70B on 64 H100": Case(MODELS["llama3-70b"], MACHINES["dgx-h100"], 64, 512),
    "530 billion on 560 A100": Case(MODELS["mt-nlg-530b"], MACHINES["dgx-a100"], 560, 560),
}


def search(path: Path) -> str:
    """Judges `best_strategy` on machines that the exercise does not name."""
    answer = load_answer(path)
    seen = []
    for name, case in UNSEEN.items():
        with checks._time_limit(TOO_LONG):
            found = answer.best_strategy(*case)
        try:
            judge(found, case, OWN)
        except Wrong as error:
            raise Wrong(f"{name}: {found}\n{error}") from None
        seen.append(f"{name}: {found}")
    return "the fastest strategy is found on three machines.\n" + "\n".join(seen)
