"""Given: what the check cells of exercises 04b and 04c look at.

Your prediction is held against real passes of a real network, measured by `utils.measure.memory`;
your plans against the best of all sets, in memory and in FLOPs.
"""

import random
from itertools import combinations
from pathlib import Path

from labs.support.activation_checkpointing.network import (
    Layer,
    batch,
    measure_layers,
    network,
    real_flops,
    real_peak,
)
from utils.course.checks import Wrong, load_answer

TRIED = (set(), {0}, {7}, {2, 5}, {3, 4, 7}, {0, 1, 2, 3, 4}, set(range(8)))
SLACK = 64  # bytes: the loss and the like
NEAR = 1.02  # times the least possible work
BUDGETS = (0.9, 0.75, 0.6, 0.45)  # of what everything needs


def peak(path: Path) -> str:
    """Judges `peak_bytes` in the file."""
    answer, layers, x = load_answer(path), network(), batch()
    costs = measure_layers(layers, x)
    for recomputed in TRIED:
        theirs = answer.peak_bytes(costs, set(recomputed))
        real = real_peak(layers, x, recomputed)
        if not isinstance(theirs, int | float) or abs(theirs - real) > SLACK:
            raise Wrong(
                f"recomputed {sorted(recomputed)}: peak_bytes says {theirs}, a real pass has "
                f"{real:,} bytes at its peak.\n{_advice(theirs, costs, recomputed)}"
            )
    return f"right to {SLACK} bytes for {len(TRIED)} plans, each held against a real pass."


def choice(path: Path) -> str:
    """Judges `choose` in the file."""
    answer, layers, x = load_answer(path), network(), batch()
    costs = measure_layers(layers, x)
    whole, everything = real_peak(layers, x, set()), sum(layer.flops for layer in costs)
    report = []
    for share in BUDGETS:
        budget = int(share * whole)
        chosen = _plan(answer, costs, budget, f"with {share:.0%} of the memory")
        real = real_peak(layers, x, chosen)
        if real > budget + SLACK:
            raise Wrong(f"recomputing {sorted(chosen)} needs {real:,} bytes, not {budget:,}.")
        report.append(f"{share:.0%}: {sum(costs[i].flops for i in chosen) / everything:.0%}")
    extra = real_flops(layers, x, chosen) - real_flops(layers, x, set())
    if extra != sum(costs[index].flops for index in chosen):
        raise Wrong(f"a real pass needs {extra:,} more FLOPs, which is not the layers' sum.")
    dice = random.Random(0)
    for case in range(40):
        made_up = [
            Layer(dice.randint(1, 30), dice.randint(0, 100), dice.randint(1, 100))
            for _ in range(dice.randint(1, 9))
        ]
        least = _peak(made_up, set(range(len(made_up))))
        budget = dice.randint(min(least, _least(made_up)), _peak(made_up, set()))
        _plan(answer, made_up, budget, f"with {len(made_up)} made-up layers (case {case})")
    _impossible(answer, costs)
    return (
        "fits the budget in real passes, with the least work; budget: forward passes again\n"
        + ", ".join(report)
        + ";\nas good as the best of all sets in 40 made-up networks."
    )


def _plan(answer, layers: list[Layer], budget: int, case: str) -> set[int]:
    """The answer's set, after a look at its memory and its work."""
    try:
        chosen = answer.choose(list(layers), budget)
    except ValueError as error:
        raise Wrong(
            f"{case}: choose raises “{error}” although {sorted(_best(layers, budget))} fits."
        ) from None
    if not isinstance(chosen, set | frozenset | list | tuple):
        raise Wrong(f"{case}: choose returns {chosen!r}, not a set of layer numbers.")
    chosen = set(chosen)
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
    if work > NEAR * least:
        raise Wrong(
            f"{case}: recomputing {sorted(chosen)} costs {work:,} FLOPs; {sorted(best)} fits too "
            f"and costs {least:,}.\n{_why_too_long(layers, chosen, budget)}"
        )
    return chosen


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


def _impossible(answer, layers: list[Layer]) -> None:
    least = _least(layers)
    try:
        chosen = answer.choose(list(layers), least - 1)
    except ValueError as error:
        digits = str(error).replace(",", "").replace("_", "")
        if str(least) not in digits:
            raise Wrong(
                f"budget {least - 1:,}: the ValueError “{error}” does not name the smallest "
                f"possible budget, {least:,}."
            ) from None
        return
    raise Wrong(f"budget {least - 1:,} is impossible, but choose returns {chosen}.")


def least_work(share: float) -> float:
    """Per cent of the forward pass that must be computed again with this share of the memory."""
    layers, x = network(), batch()
    costs = measure_layers(layers, x)
    best = _best(costs, int(share * real_peak(layers, x, set())))
    return 100 * sum(costs[i].flops for i in best) / sum(layer.flops for layer in costs)


# ---- the judge's own count, written another way than the solution


def _peak(layers: list[Layer], recomputed: set[int]) -> int:
    def held(first):
        """By the first layers, when the forward pass has ended."""
        return sum(
            layer.input_bytes + (0 if i in recomputed else layer.inside_bytes)
            for i, layer in enumerate(layers[:first])
        )

    teeth = [held(i) + layers[i].input_bytes + layers[i].inside_bytes for i in recomputed]
    return max([held(len(layers)), *teeth])


def _sets(layers):
    numbers = range(len(layers))
    return (set(c) for size in range(len(layers) + 1) for c in combinations(numbers, size))


def _least(layers: list[Layer]) -> int:
    return min(_peak(layers, chosen) for chosen in _sets(layers))


def _best(layers: list[Layer], budget: int) -> set[int]:
    fitting = [chosen for chosen in _sets(layers) if _peak(layers, chosen) <= budget]
    return min(fitting, key=lambda chosen: sum(layers[i].flops for i in chosen))


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
