"""Given: the contracts of lab 04's exercises, and the judges behind their check cells."""

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import compress, product

import torch
from hypothesis import strategies as st
from torch import nn

from labs.support.activation_checkpointing.network import Layer, measured, network, real_peak
from utils.course.assertions import Wrong, a_number, close
from utils.course.observe import Look
from utils.course.properties import EXAMPLES, for_all
from utils.course.runner import Trial, fractions

LIBRARY = ("torch.utils.checkpoint", "checkpoint_sequential", "utils.memory")
STATE = 5100  # bytes: the random number generator's state and a little more
SLACK = 64  # bytes of a real pass: the loss and the like
BUDGETS = (0.9, 0.75, 0.6, 0.45)  # fractions of the bytes that keeping everything needs
MOST = 9  # layers, for `choose`

# ---- a: checkpoint

LAYERS = 4


@dataclass(frozen=True)
class Case:
    """A linear layer, then checkpoints; x is (rows, width). With dropout, each checkpointed block
    also takes mask and other."""

    shape: tuple[int, int]
    seed: int
    dtype: torch.dtype = torch.float64
    dropout: float = 0.4
    autocast: torch.dtype | None = None  # the forward pass's autocast type

    def __str__(self) -> str:
        odd = ", dropout, mask and other" * (self.dropout > 0)
        odd += f", autocast {self.autocast}" * (self.autocast is not None)
        return f"{LAYERS} checkpoints, x {self.shape}, {self.dtype}{odd}"


class Block(nn.Module):
    """(rows, width) -> (rows, width): linear, tanh twice, dropout; times mask, plus other."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.linear, self.dropout, self.runs = nn.Linear(width, width), nn.Dropout(dropout), 0

    def forward(self, x, mask=None, other=None):
        self.runs += 1
        x = self.dropout(self.linear(x).tanh().tanh())
        return x if mask is None else x * mask + other


def step(wrap: Callable, case: Case) -> dict:
    """Run a forward pass through `wrap(block, x, …)` and the backward pass; return their results
    and what they kept."""
    torch.manual_seed(case.seed)
    width = case.shape[1]
    blocks = [Block(width, case.dropout) for _ in range(LAYERS)]
    model = nn.ModuleList([nn.Linear(width, width), *blocks]).to(case.dtype)
    x, other = (
        fractions(case.seed + i, *case.shape, dtype=case.dtype).requires_grad_() for i in (0, 1)
    )
    more = (fractions(case.seed + 2, *case.shape) > 0, other)[: 2 * (case.dropout > 0)]
    to, enabled = case.autocast or torch.bfloat16, case.autocast is not None
    with Look() as look, torch.autocast("cpu", to, enabled):
        y = model[0](x)
        for block in blocks:
            y = wrap(block, y, *more)
    kept, before = look.alive - y.nbytes, torch.get_rng_state()
    y.backward(fractions(case.seed + 4, *y.shape, dtype=y.dtype))
    gradients = {name: p.grad for name, p in reversed(list(model.named_parameters()))}
    return {
        "y": y.detach(), "moved": not before.equal(torch.get_rng_state()),
        "gradients": gradients | {"x": x.grad} | ({"other": other.grad} if more else {}),
        "again": [block.runs - 1 for block in blocks],
        "more": kept - LAYERS * (x.nbytes + STATE),
    }


def same_step(answer, case: Case) -> None:
    """On a rank: checkpoints change nothing except time and memory."""
    right = step(lambda function, *inputs: function(*inputs), case)
    seen = step(answer.checkpoint, case)
    close(str(case), "the output", seen["y"], right["y"])
    if missing := [name for name, gradient in seen["gradients"].items() if gradient is None]:
        raise Wrong(
            f"{case}: {missing[-1]} got no gradient. torch.autograd.backward(output, gradient) "
            "reaches\nthe parameters too, and `backward` returns one gradient for each input."
        )
    hint = "Does `backward` start from the gradient that it is given?"
    if case.dropout:
        hint = "Does the recomputation draw the same random numbers as the forward pass?"
    for name, wanted in right["gradients"].items():  # from the last layer to the first
        if not name.startswith(f"{LAYERS}."):
            hint = (
                "The last layer's gradients are right. Does the recomputation stop at its inputs?\n"
                "Detach them, or the inner backward pass continues into the outer graph."
            )
        close(str(case), f"the gradient of {name}", seen["gradients"][name], wanted, hint=hint)
    for wrong, words in [
        (seen["moved"],
         "the backward pass changes the random state: later draws repeat old numbers. Restore\n"
         "the state from before the recomputation afterwards."),
        (seen["again"] != [1] * LAYERS,
         f"the layers ran {seen['again']} times after the forward pass; each should run once, in\n"
         "the backward pass."),
        (seen["more"] > 0,
         f"after the forward pass {seen['more']:,} bytes are kept in addition to inputs and\n"
         "random states. Does the function run with gradients on? Is more saved than its inputs?"),
    ]:
        if wrong:
            raise Wrong(f"{case}: {words}")


def changes_noticed(answer) -> None:
    """Changing an input in place before the backward pass must raise an error."""
    x = torch.ones(4, dtype=torch.double, requires_grad=True) * 1
    y = answer.checkpoint(torch.exp, x)
    x.mul_(2)
    with contextlib.suppress(RuntimeError):
        y.sum().backward()
        raise Wrong(
            "an input was changed in place before the backward pass without an error: the\n"
            "gradient is silently wrong. Keep tensors with ctx.save_for_backward(…), which checks."
        )


def checkpointing(trial: Trial) -> str:
    """Judge `checkpoint`."""
    trial.forbid(LIBRARY)
    width, rows, large = (trial.draw.randrange(*one) for one in ((2, 9), (2, 9), (180, 240)))
    small, single = (rows, width), torch.float32
    with trial.ranks(1) as group:  # one process: nothing here depends on ranks
        for case in (
            Case(small, trial.new_seed(), dropout=0.0),
            Case(small, trial.new_seed()),
            Case((large, 70), trial.new_seed(), dtype=single),
            Case(small, trial.new_seed(), dtype=single, autocast=torch.float16),  # not bf16
        ):
            group.run(str(case), same_step, case)
            if not case.dropout:  # the first one
                group.run("an input that is changed in place", changes_noticed)
    return (
        "gradients of inputs and parameters equal those without checkpoints, in fp32, fp64 and\n"
        "under autocast, with dropout and masks; after the forward pass only the layers' inputs\n"
        "are kept; each layer runs once more, in the backward pass; in-place changes are detected."
    )


# ---- b and c: the reference, which counts the bytes at each moment


def held(layers: list[Layer], recomputed: Collection[int]) -> list[int]:
    """Bytes that each layer holds when the forward pass ends."""
    return [x.input_bytes + (i not in recomputed) * x.inside_bytes for i, x in enumerate(layers)]


def peak_of(layers: list[Layer], recomputed: Collection[int]) -> int:
    """Peak bytes: at the end of the forward pass, or where a layer is recomputed."""
    kept = held(layers, recomputed)
    return max(sum(kept), *(sum(kept[: i + 1]) + layers[i].inside_bytes for i in recomputed), 0)


def work_of(layers: list[Layer], recomputed: Iterable[int]) -> int:
    """FLOPs of the recomputation."""
    return sum(layers[index].flops for index in recomputed)


def percent(layers: list[Layer], recomputed: Iterable[int]) -> float:
    """Percent of the forward pass that is recomputed."""
    return 100 * work_of(layers, recomputed) / work_of(layers, range(len(layers)))


def all_sets(layers: list[Layer]) -> list[tuple[int, int, set[int]]]:
    """(FLOPs, peak, set) for each set of layers."""
    flags = product((False, True), repeat=len(layers))
    sets = [set(compress(range(len(layers)), each)) for each in flags]
    return [(work_of(layers, chosen), peak_of(layers, chosen), chosen) for chosen in sets]


def least_work(share: float) -> float:
    """Percent of the forward pass that must be recomputed to fit this fraction of the memory."""
    _, _, costs, whole = measured()
    *_, best = min(one for one in all_sets(costs) if one[1] <= int(share * whole))
    return percent(costs, best)


def any_layer() -> st.SearchStrategy:
    """A layer of a few bytes or of terabytes, whose work may differ only in the last digits."""
    size = st.integers(0, 9) | st.integers(0, 10**12)
    return st.builds(Layer, size, size, st.integers(1, 9) | st.integers(10**6, 10**6 + 99))


def shown(layers: list[Layer]) -> str:
    listed = [str(tuple(vars(layer).values())) for layer in layers]
    return f"layers (input, inside, FLOPs) {', '.join(listed)}"


# ---- b: peak_bytes


def predictions(answer, seed: int, plans: list[set[int]]) -> None:
    """Check `peak_bytes` on drawn plans and against real passes."""

    def predicted(layers: list[Layer], again: set[int]) -> float:
        where, right = f"recomputed {sorted(again)} of {shown(layers)}", peak_of(layers, again)
        got = a_number(where, "it", answer.peak_bytes(layers, set(again)))
        if got != right:
            end = sum(held(layers, again))
            words = "Does every layer hold its input, and a kept layer its inside too?"
            if again and got == end:
                words = "That is the end of the forward pass; the peak may come later."
            elif again and got == end + max(layers[index].inside_bytes for index in again):
                words = "When a layer is recomputed, later layers have already been released."
            raise Wrong(f"{where}: peak_bytes says {got:,.0f}, and {right:,} is right.\n{words}")
        return got

    def holds(plan: list[tuple[Layer, bool]]) -> None:
        predicted([layer for layer, _ in plan], {i for i, (_, again) in enumerate(plan) if again})

    for_all(seed, st.lists(st.tuples(any_layer(), st.booleans()), min_size=1, max_size=40), holds)
    layers, x, costs, _ = measured()
    for again in plans:
        real = real_peak(layers, x, again)
        if abs(predicted(costs, again) - real) > SLACK:
            raise Wrong(f"recomputed {sorted(again)} of 8 layers: a real pass has {real:,} bytes.")


def peak(trial: Trial) -> str:
    """Judge `peak_bytes`."""
    numbers = range(len(network()))
    plans = [{i for i in numbers if trial.draw.random() < 0.5} for _ in range(4)]
    plans += [set(), set(numbers), {trial.draw.choice(numbers)}]
    trial.alone("peak_bytes", predictions, trial.new_seed(), plans, seconds=60)
    return (
        f"right to within {SLACK} bytes for {len(plans)} plans, each compared with a real pass;\n"
        f"exact for {EXAMPLES} plans of drawn networks with 1 to 40 layers."
    )


# ---- c: choose


def right_choice(answer, where: str, layers: list[Layer], budget: int, sets: list) -> set[int]:
    """Return the answer's choice after checking its memory and work; an empty set where `choose`
    has to refuse."""
    work, _, fits = min((one for one in sets if one[1] <= budget), default=(0, 0, None))
    try:
        chosen = set(answer.choose(list(layers), budget))
    except ValueError as error:
        if fits is not None:
            raise Wrong(f"{where}: choose raises “{error}” although {fits} fits.") from None
        least = min(peak for _, peak, _ in sets)
        if str(least) not in str(error).replace(",", "").replace("_", ""):
            raise Wrong(
                f"{where}: the ValueError “{error}” does not name the smallest possible budget, "
                f"{least:,}."
            ) from None
        return set()
    if fits is None:
        raise Wrong(f"{where}: nothing fits, but choose returns {chosen}.")
    needs, costs = peak_of(layers, chosen), work_of(layers, chosen)
    if needs > budget:
        end = "\nIt fits when the forward pass ends, but not where a layer is recomputed."
        raise Wrong(
            f"{where}: recomputing {chosen} peaks at {needs:,} bytes, above the budget."
            + end * (sum(held(layers, chosen)) <= budget)
        )
    if costs > work:
        raise Wrong(
            f"{where}: recomputing {chosen} costs {costs:,} FLOPs; {fits} fits too and costs "
            f"{work:,}."
        )
    return chosen


def choices(answer, seed: int) -> list[float]:
    """Percent of the forward pass that the answer recomputes for each of BUDGETS."""

    def chooses(example: tuple[list[Layer], int]) -> None:
        layers, number = example
        sets = all_sets(layers)
        peaks = sorted({peak for _, peak, _ in sets})
        budget = peaks[number % len(peaks)] if number >= 0 else peaks[0] - 1
        right_choice(answer, f"a budget of {budget:,} for {shown(layers)}", layers, budget, sets)

    some = st.lists(any_layer(), min_size=1, max_size=MOST)
    for_all(seed, st.tuples(some, st.integers(0, 2**MOST)), chooses)
    for_all(seed, st.tuples(some, st.just(-1)), chooses, examples=10)
    _, _, costs, whole = measured()
    sets, shares = all_sets(costs), []
    for share in BUDGETS:
        where, budget = f"with {share:.0%} of the memory", int(share * whole)
        shares.append(percent(costs, right_choice(answer, where, costs, budget, sets)))
    return shares


def choice(trial: Trial) -> str:
    """Judge `choose`."""
    shares = trial.alone("choose", choices, trial.new_seed(), seconds=60)
    report = ", ".join(f"{share:.0%}: {work:.0f}%" for share, work in zip(BUDGETS, shares))
    return (
        "fits the budget of a real pass with the least work (budget: recomputed work)\n"
        f"{report};\nas good as the best of all sets in {EXAMPLES} drawn networks of 1 to {MOST} "
        "layers;\na budget that is too small is refused, with the smallest possible one named."
    )
