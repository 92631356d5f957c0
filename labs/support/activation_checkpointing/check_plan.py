"""Given: what the check cells of exercises 04b and 04c look at.

Your prediction is held against real passes of a real network, measured by `utils.measure.memory`,
and against another way to count in drawn networks; your plans against the best of all sets.
"""

import contextlib
import operator
import random
from dataclasses import replace

import numpy as np

from labs.support.activation_checkpointing.network import (
    Layer,
    batch,
    measure_layers,
    network,
    real_flops,
    real_peak,
)
from utils.course.assertions import Wrong, a_number, described, unchanged
from utils.course.runner import Trial

LIBRARY = ("utils.measure", "labs.support.activation_checkpointing.check_plan")
SLACK = 64  # bytes: the loss and the like
BUDGETS = (0.9, 0.75, 0.6, 0.45)  # of what everything needs
MOST = 12  # layers, for `choose`


def peak(trial: Trial) -> str:
    """Judges `peak_bytes` in the file."""
    trial.forbid(LIBRARY)
    draw, layers, x = trial.draw, network(), batch()
    costs = measure_layers(layers, x)
    plans = [(costs, some(draw, len(costs))) for _ in range(4)]
    plans += [(costs, set()), (costs, set(range(8))), (costs, {draw.randrange(8)})]
    real, made_up = len(plans), _networks(draw, [1, 2, 3, 5, 8, 13, 40, 300, *[6] * 30])
    for drawn in made_up:
        everything = set(range(len(drawn)))
        chosen = draw.choice([some(draw, len(drawn)), set(), everything])
        plans.append((drawn, some(draw, len(drawn)) if len(drawn) > 8 else chosen))
    answers = trial.alone("peak_bytes", peaks, plans)
    for number, ((costs, recomputed), (theirs, changed)) in enumerate(zip(plans, answers)):
        case = f"recomputed {_short(recomputed)} of {len(costs)} layers"
        theirs = a_number(case, "peak_bytes", theirs)
        if number < real:
            measured = real_peak(layers, x, recomputed)
            if not abs(theirs - measured) <= SLACK:
                raise Wrong(
                    f"{case}: peak_bytes says {theirs:,.0f}, a real pass has {measured:,} bytes at "
                    f"its peak.\n{_advice(theirs, costs, recomputed)}"
                )
        right = _peak(costs, recomputed)
        if theirs != right:
            raise Wrong(
                f"{case}: peak_bytes says {theirs:,.0f}, and {right:,} is right. The layers are\n"
                f"{_short(costs)}.\n{_advice(theirs, costs, recomputed)}"
            )
        unchanged(case, changed)
    return (
        f"right to {SLACK} bytes for {real} plans, each held against a real pass;\n"
        f"and exact for {len(made_up)} plans of drawn networks with 1 to 300 layers."
    )


def choice(trial: Trial) -> str:
    """Judges `choose` in the file."""
    trial.forbid(LIBRARY)
    draw, layers, x = trial.draw, network(), batch()
    costs = measure_layers(layers, x)
    whole, everything = real_peak(layers, x, set()), sum(layer.flops for layer in costs)
    given = [(costs, int(share * whole)) for share in BUDGETS]
    made_up = _networks(
        draw, [5, 3, MOST, 1, 2, *[MOST] * 7, *[draw.randrange(4, 11) for _ in range(30)]]
    )
    given += [(drawn, _budget(draw, drawn)) for drawn in made_up]
    impossible = [costs, *_networks(draw, [1, 4, 7])]
    given += [(drawn, _least(drawn) - draw.choice([2, 7, 1000])) for drawn in impossible]
    report = []
    for number, ((drawn, budget), (chosen, changed)) in enumerate(
        zip(given, trial.alone("choose", choices, given, seconds=30.0))
    ):
        case = f"{len(drawn)} layers and a budget of {budget:,}"
        if number < len(BUDGETS):
            case = f"with {BUDGETS[number]:.0%} of the memory"
        if budget < _least(drawn):
            _impossible(chosen, drawn, budget)
            continue
        chosen = _plan(chosen, drawn, budget, case)
        unchanged(case, changed)
        if number < len(BUDGETS):
            _in_a_real_pass(layers, x, costs, chosen, budget)
            work = sum(costs[i].flops for i in chosen)
            report.append(f"{BUDGETS[number]:.0%}: {work / everything:.0%}")
    return (
        "fits the budget in real passes, with the least work; budget: forward passes again\n"
        + ", ".join(report)
        + f";\nas good as the best of all sets in {len(made_up)} drawn networks of 1 to {MOST} "
        f"layers;\na budget that is too small is refused, with the smallest one, {len(impossible)} "
        "times."
    )


def least_work(share: float) -> float:
    """Per cent of the forward pass that must be computed again with this share of the memory."""
    layers, x = network(), batch()
    costs = measure_layers(layers, x)
    best = _best(costs, int(share * real_peak(layers, x, set())))
    return 100 * sum(costs[i].flops for i in best) / sum(layer.flops for layer in costs)


# ---- cases


def some(draw: random.Random, count: int) -> set[int]:
    """Some of so many layers."""
    return {index for index in range(count) if draw.random() < 0.5}


def _networks(draw: random.Random, sizes: list[int]) -> list[list[Layer]]:
    """Networks of drawn layers, of bytes or of terabytes, with zeros among them; in some the layers
    are nearly alike, in some one is not like the others."""

    def number(most):
        return max(1, int(draw.uniform(0, most) * draw.choice([1, 1, 0.1, 0.01])))

    result = []
    for size in sizes:
        most, kind = draw.choice([4, 100, 10**6, 10**12]), draw.random()
        layers = [
            Layer(number(most), number(most) * draw.choice([0, 1, 3]), number(most))
            for _ in range(size)
        ]
        if kind < 0.2:  # all alike, but for one
            layers = [layers[0]] * (size - 1) + layers[-1:]
        elif kind < 0.5:  # work that differs in its last digits
            layers = [replace(layer, flops=10**6 + draw.randrange(99)) for layer in layers]
        elif kind < 0.8:  # one as large as several, and dearer than all
            one = draw.randrange(size)
            inside = sum(layer.inside_bytes for layer in draw.sample(layers, (size + 1) // 2))
            work = sum(layer.flops for layer in layers)
            layers[one] = replace(layers[one], inside_bytes=inside, flops=work)
        result.append(layers)
    return result


def _budget(draw: random.Random, layers: list[Layer]) -> int:
    """One that is possible and not large: often exactly what some set needs, or a byte less."""
    peaks = sorted(set(_all_sets(layers)[0].tolist()))
    budget = peaks[int(len(peaks) * draw.uniform(0, 0.6))] - draw.choice([0, 0, 1])
    return max(budget, peaks[0])


# ---- in a process of its own


def peaks(answer, plans: list) -> list:
    found, own = [], []
    for layers, recomputed in plans:
        own[:] = layers  # one list, of other layers each time
        given = own, set(recomputed)
        theirs = answer.peak_bytes(*given)
        changed = [name for name, now, before in zip(
            ("layers", "recomputed"), given, (layers, recomputed)) if now != before]
        found.append((theirs, changed))
    return found


def choices(answer, given: list) -> list:
    found = []
    for layers, budget in given:
        own = list(layers)
        try:
            if len(own) < 6:  # whoever has it may change it
                with contextlib.suppress(AttributeError):
                    answer.choose(own, budget).clear()
            chosen = answer.choose(own, budget)
            try:
                chosen = {operator.index(number) for number in chosen}
            except TypeError:
                chosen = f"{described(chosen)}"
        except ValueError as error:
            chosen = error
        found.append((chosen, ["layers"] * (own != layers)))
    return found


# ---- what is wrong, in words


def _plan(chosen, layers: list[Layer], budget: int, case: str) -> set[int]:
    """The answer's set, after a look at its memory and its work."""
    if isinstance(chosen, ValueError):
        raise Wrong(
            f"{case}: choose raises “{chosen}” although {sorted(_best(layers, budget))} fits."
        )
    if isinstance(chosen, str):
        raise Wrong(f"{case}: choose returns {chosen}, not a set of layer numbers.")
    if not chosen <= set(range(len(layers))):
        raise Wrong(f"{case}: choose returns {sorted(chosen)}, of {len(layers)} layers.")
    needs = _peak(layers, chosen)
    if needs > budget:
        raise Wrong(
            f"{case}: recomputing {sorted(chosen)} has its peak at {needs:,} bytes, above the "
            f"budget of {budget:,}.\n{_why_too_much(layers, chosen, budget)}"
        )
    best = _best(layers, budget)
    work, least = (sum(layers[i].flops for i in plan) for plan in (chosen, best))
    if work > least:
        raise Wrong(
            f"{case}: recomputing {sorted(chosen)} costs {work:,} FLOPs; {sorted(best)} fits too "
            f"and costs {least:,}.\n{_why_too_long(layers, chosen, budget)}"
        )
    return chosen


def _in_a_real_pass(layers, x, costs: list[Layer], chosen: set[int], budget: int) -> None:
    real = real_peak(layers, x, chosen)
    if real > budget + SLACK:
        raise Wrong(f"recomputing {sorted(chosen)} needs {real:,} bytes, not {budget:,}.")
    extra = real_flops(layers, x, chosen) - real_flops(layers, x, set())
    if extra != sum(costs[index].flops for index in chosen):
        raise Wrong(f"a real pass needs {extra:,} more FLOPs, which is not the layers' sum.")


def _why_too_much(layers, chosen, budget) -> str:
    held = sum(layer.input_bytes for layer in layers)
    held += sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in chosen)
    if chosen and held <= budget:
        return "It fits when the forward pass ends; the peak is where a layer is recomputed."
    if held - sum(layers[i].input_bytes for i in chosen) <= budget:
        return "A recomputed layer still keeps its input."
    return "Recompute more, or others."


def _why_too_long(layers, chosen, budget) -> str:
    spare = [i for i in sorted(chosen) if _peak(layers, chosen - {i}) <= budget]
    if spare:
        return f"Layer {spare[0]} could keep everything: it fits without recomputing it."
    return "No layer is superfluous, yet another combination is cheaper: look at all sets."


def _impossible(chosen, layers: list[Layer], budget: int) -> None:
    least = _least(layers)
    if not isinstance(chosen, ValueError):
        raise Wrong(f"budget {budget:,} is impossible, but choose returns {chosen}.")
    digits = str(chosen).replace(",", "").replace("_", "")
    if str(least) not in digits:
        raise Wrong(
            f"budget {budget:,}: the ValueError “{chosen}” does not name the smallest possible "
            f"budget, {least:,}."
        )


def _advice(theirs, layers, recomputed) -> str:
    held = sum(layer.input_bytes for layer in layers)
    held += sum(layer.inside_bytes for i, layer in enumerate(layers) if i not in recomputed)
    if theirs == held:
        return "That is the end of the forward pass; the peak may come later, in a recomputation."
    if theirs == held + max((layers[i].inside_bytes for i in recomputed), default=0):
        return "When a layer is recomputed, the layers behind it have been released already."
    if not recomputed:
        return "Nothing is recomputed here: every layer holds its input and its inside."
    return "Does every layer hold its input, and a kept one its inside too?"


def _short(things) -> str:
    shown = [str(thing) if isinstance(thing, int) else str(tuple(vars(thing).values()))
             for thing in list(things)[:8]]
    return f"[{', '.join(shown)}{', …' * (len(things) > 8)}]"


# ---- the judge's own count, written another way than the solution


def _peak(layers: list[Layer], recomputed: set[int]) -> int:
    # a kept layer's tooth is never higher than the end of the forward pass
    kept = [0 if i in recomputed else layer.inside_bytes for i, layer in enumerate(layers)]
    before = np.cumsum([layer.input_bytes for layer in layers]) + np.cumsum([0, *kept[:-1]])
    return int(max(before[-1] + kept[-1], *(before + [layer.inside_bytes for layer in layers])))


def _all_sets(layers: list[Layer]) -> tuple[np.ndarray, np.ndarray]:
    """(peak, FLOPs) of each set of layers: set number n has layer i where bit i of n is 1."""
    numbers = np.arange(2 ** len(layers))
    again = (numbers[:, None] >> np.arange(len(layers))) & 1
    inputs, inside, flops = np.array([tuple(vars(layer).values()) for layer in layers]).T
    kept = (1 - again) * inside
    before = np.cumsum(inputs) + np.cumsum(kept, axis=1) - kept
    peaks = np.maximum((before + inside).max(axis=1), before[:, -1] + kept[:, -1])
    return peaks, again @ flops


def _least(layers: list[Layer]) -> int:
    return int(_all_sets(layers)[0].min())


def _best(layers: list[Layer], budget: int) -> set[int]:
    peaks, flops = _all_sets(layers)
    best = int(np.where(peaks <= budget, flops, np.iinfo(np.int64).max).argmin())
    return {i for i in range(len(layers)) if best >> i & 1}
