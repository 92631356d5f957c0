"""Given: what the exercises of lab 04 ask for, and how their check cells judge it.

a: chains of layers run plainly and through `checkpoint`, from the same random state. b and c: the
predictions and plans for drawn networks, against all sets; those for a real one, against passes.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import combinations

import torch
from hypothesis import strategies as st
from torch import nn

from labs.support.activation_checkpointing.network import (
    Layer,
    batch,
    measure_layers,
    network,
    real_peak,
)
from utils.course.assertions import Wrong, a_number, close, described, nothing_kept, unchanged
from utils.course.observe import Look
from utils.course.properties import EXAMPLES, for_all
from utils.course.runner import Trial, fractions

LIBRARY = ("torch.utils.checkpoint", "checkpoint_sequential", "utils.memory")
STATE = 5100  # bytes: the state of the random numbers and a little more
SLACK = 64  # bytes of a real pass: the loss and the like
BUDGETS = (0.9, 0.75, 0.6, 0.45)  # of what everything needs
MOST = 12  # layers, for `choose`

# ---- a: checkpoint


@dataclass(frozen=True)
class Case:
    """A linear layer, then `layers` checkpoints of x (…, width), or of x, mask and other."""

    shape: tuple[int, ...]
    seed: int
    layers: int = 4
    dtype: torch.dtype = torch.float64
    dropout: float = 0.4
    mask: bool = True
    autocast: torch.dtype | None = None  # of the forward pass
    other_is_x: bool = False
    nested: bool = False  # all of them inside one more checkpoint

    def __str__(self) -> str:
        odd = [(f.name, getattr(self, f.name)) for f in fields(self)[3:]]
        odd = [f", {name} {value}" for name, value in odd if value != getattr(Case, name)]
        return f"{self.layers} checkpoints, x {self.shape}{''.join(odd)}"


def drawn(trial: Trial) -> list[list[Case]]:
    """Cases by run; the graphs of a run exist at the same time."""
    draw, single = trial.draw, torch.float32
    width, rows, large = draw.randrange(2, 9), draw.randrange(2, 9), draw.randrange(1800, 2400)
    to = draw.choice([torch.bfloat16, torch.float16])

    def case(*shape: int, **more) -> Case:
        return Case(shape, trial.new_seed(), **more)

    return [
        [case(rows, width, mask=False, dropout=0.0), case(rows, width, mask=False), case(0, width)],
        [case(large, 70, layers=18, dtype=single)],
        [case(1, width, nested=True), case(3, 1, width, other_is_x=True)],
        [case(5, width, dtype=single, autocast=to), case(5, width, dtype=single)],
    ]


class Block(nn.Module):
    """(…, width) -> (…, width): a product, twice tanh, dropout; times mask, plus other."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.linear, self.dropout, self.runs = nn.Linear(width, width), nn.Dropout(dropout), 0

    def forward(self, x, mask=None, other=None):
        self.runs += 1
        x = self.dropout(self.linear(x).tanh().tanh())
        return x if mask is None else x * mask + other


def step(wrap: Callable, case: Case) -> Iterator[dict | None]:
    """A forward pass through `wrap(block, x, …)`, and after a pause the backward pass."""
    torch.manual_seed(case.seed)
    first = nn.Linear(case.shape[-1], case.shape[-1])
    blocks = nn.ModuleList(Block(case.shape[-1], case.dropout) for _ in range(case.layers))
    model = nn.ModuleList([first, blocks]).to(case.dtype)
    x, other = (
        fractions(case.seed + i, *case.shape, dtype=case.dtype).requires_grad_() for i in (0, 1)
    )
    mask = fractions(case.seed + 2, *case.shape) > 0

    def chain(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            x = wrap(block, x, more[0], x) if case.other_is_x else wrap(block, x, *more)
        return x

    to, enabled = case.autocast or torch.bfloat16, case.autocast is not None
    with Look(x=x, mask=mask, other=other) as look, torch.autocast("cpu", to, enabled):
        more = (mask, other)[: 2 * case.mask]
        y = wrap(chain, first(x), *more) if case.nested else chain(first(x), *more)
    state, runs, inputs = torch.get_rng_state(), [b.runs for b in blocks], x.nbytes + STATE
    kept = look.kept(y, allowed=case.layers * inputs)
    yield None
    gradient, before = fractions(case.seed + 4, *y.shape, dtype=y.dtype), torch.get_rng_state()
    with Look(gradient=gradient) as back:
        y.backward(gradient)
    gradients = {name: p.grad for name, p in reversed(list(model.named_parameters()))}
    gradients |= {"x": x.grad} | ({"other": other.grad} if more and not case.other_is_x else {})
    found = {
        "y": y.detach().clone(), "gradients": gradients, "changed": look.changed() + back.changed(),
        "state": state, "moved": not before.equal(torch.get_rng_state()), "runs": runs,
        "again": [block.runs - 1 for block in blocks], "more": kept - case.layers * inputs,
    }
    del y, gradient
    yield found | {"left": max(each.kept(list(gradients.values())) for each in (look, back))}


def passes(answer, cases: list[Case]) -> list[tuple[dict, dict]]:
    """What the passes of each case have without checkpoints and with them."""
    both = []
    for wrap in (lambda function, *inputs: function(*inputs), answer.checkpoint):
        begun = [step(wrap, case) for case in cases]
        both.append([list(map(next, begun)) for _ in ("forward", "backward")][1])
    return list(zip(*both))


def changes_noticed(answer) -> None:
    """An input that is changed in place before the backward pass is an error."""
    x = torch.ones(4, dtype=torch.double, requires_grad=True) * 1
    y = answer.checkpoint(torch.exp, x)
    x.mul_(2)
    with contextlib.suppress(RuntimeError):
        y.sum().backward()
        raise Wrong(
            "an input was changed in place before the backward pass, and nothing noticed: the\n"
            "gradient is silently wrong. Keep tensors with ctx.save_for_backward(…), which checks."
        )


def same_pass(case: Case, right: dict, seen: dict) -> None:
    """Checkpoints change nothing except time and memory; raises Wrong."""
    close(str(case), "the output", seen["y"], right["y"])
    if missing := [name for name, gradient in seen["gradients"].items() if gradient is None]:
        raise Wrong(
            f"{case}: {missing[-1]} got no gradient. torch.autograd.backward(output, gradient) "
            "reaches\nthe parameters too, and `backward` returns one gradient for each input."
        )
    hint = "Does `backward` start from the gradient that it is given?"
    if case.dropout:
        hint = "Does the recomputation draw the random numbers that the forward pass has drawn?"
    for name, wanted in right["gradients"].items():  # from the last layer to the first
        if not name.startswith(f"1.{case.layers - 1}."):
            hint = (
                "The last layer's gradients are right. Does the recomputation end at its inputs?\n"
                "Detach them, or the inner backward pass goes on into the outer graph."
            )
        close(str(case), f"the gradient of {name}", seen["gradients"][name], wanted, hint=hint)
    unchanged(str(case), seen["changed"])
    for wrong, words in [
        (not torch.equal(seen["state"], right["state"]),
         "the forward pass leaves another random state than without checkpoints."),
        (seen["moved"],
         "after the backward pass the random state is not what it was before it: everything\n"
         "drawn later repeats old numbers. Restore today's state after the recomputation."),
        (seen["runs"] != right["runs"],
         f"in the forward pass the layers ran {seen['runs']} times, not once."),
        (seen["again"] != [1 + case.nested] * case.layers,
         f"in the backward pass the layers ran {seen['again']} times, and once is enough."),
        (seen["more"] > 0,
         f"after the forward pass {seen['more']:,} bytes more are kept than the inputs and the\n"
         "random states. Is the function run with gradients on, or is more saved than its inputs?"),
    ]:
        if wrong:
            raise Wrong(f"{case}: {words}")
    nothing_kept(f"{case}, after the backward pass", seen["left"])


def checkpointing(trial: Trial) -> str:
    """Judges `checkpoint`."""
    trial.forbid(LIBRARY)
    with trial.ranks(1) as group:  # one process: nothing here depends on ranks
        for number, cases in enumerate(drawn(trial)):
            for case, found in zip(cases, group.run(str(cases[0]), passes, cases)[0]):
                same_pass(case, *found)
            if number == 0:
                group.run("an input that is changed in place", changes_noticed)
    return (
        "gradients of inputs and parameters equal those without it, in fp32, fp64 and under\n"
        "autocast, dropout, masks, empty batches and checkpoints in checkpoints included;\n"
        "after the forward pass the layers' inputs are kept and nothing else, after the backward\n"
        "pass nothing; each layer runs once more, there; changes in place are noticed."
    )


# ---- b and c: the reference, which counts moment by moment


def held(layers: list[Layer], recomputed: Collection[int]) -> list[int]:
    """Bytes of each layer when the forward pass ends."""
    return [x.input_bytes + (i not in recomputed) * x.inside_bytes for i, x in enumerate(layers)]


def peak_of(layers: list[Layer], recomputed: Collection[int]) -> int:
    """Bytes: at the end of the forward pass, or where a layer is recomputed."""
    kept = held(layers, recomputed)
    return max(sum(kept), *(sum(kept[: i + 1]) + layers[i].inside_bytes for i in recomputed), 0)


def work_of(layers: list[Layer], recomputed: Iterable[int]) -> int:
    """FLOPs that are computed again."""
    return sum(layers[index].flops for index in recomputed)


def all_sets(layers: list[Layer]) -> list[tuple[int, int, set[int]]]:
    """(FLOPs, peak, set) of each set of layers."""
    numbers = range(len(layers))
    sets = [set(chosen) for n in (*numbers, len(layers)) for chosen in combinations(numbers, n)]
    return [(work_of(layers, chosen), peak_of(layers, chosen), chosen) for chosen in sets]


def best(layers: list[Layer], budget: int) -> tuple[int, set[int]]:
    """(FLOPs, set): of those that fit, one of least work."""
    work, _, chosen = min(one for one in all_sets(layers) if one[1] <= budget)
    return work, chosen


def least_work(share: float) -> float:
    """Percent of the forward pass that must be computed again with this share of the memory."""
    layers, x = network(), batch()
    costs = measure_layers(layers, x)
    work, _ = best(costs, int(share * real_peak(layers, x, set())))
    return 100 * work / work_of(costs, range(len(costs)))


def any_layer() -> st.SearchStrategy:
    """A layer of bytes or of terabytes, of work that may differ in its last digits alone."""
    size = st.integers(0, 9) | st.integers(0, 10**12)
    return st.builds(Layer, size, size, st.integers(1, 9) | st.integers(10**6, 10**6 + 99))


def shown(layers: list[Layer]) -> str:
    listed = [str(tuple(vars(layer).values())) for layer in layers]
    return f"layers (input, inside, FLOPs) {', '.join(listed)}"


# ---- b: peak_bytes


def predictions(answer, seed: int, plans: list[set[int]]) -> None:
    """`peak_bytes` for drawn plans, and for real passes."""

    def predicted(layers: list[Layer], again: set[int]) -> float:
        where, given = f"recomputed {sorted(again)} of {shown(layers)}", (list(layers), set(again))
        got, right = a_number(where, "it", answer.peak_bytes(*given)), peak_of(layers, again)
        unchanged(where, ["layers"] * (given[0] != layers) + ["recomputed"] * (given[1] != again))
        if got != right:
            end = sum(held(layers, again))
            words = "Does every layer hold its input, and a kept one its inside too?"
            if again and got == end:
                words = "That is the end of the forward pass; the peak may come later."
            elif again and got == end + max(layers[index].inside_bytes for index in again):
                words = "When a layer is recomputed, the layers behind it are released already."
            raise Wrong(f"{where}: peak_bytes says {got:,.0f}, and {right:,} is right.\n{words}")
        return got

    def holds(plan: list[tuple[Layer, bool]]) -> None:
        predicted([layer for layer, _ in plan], {i for i, (_, again) in enumerate(plan) if again})

    for_all(seed, st.lists(st.tuples(any_layer(), st.booleans()), min_size=1, max_size=40), holds)
    layers, x = network(), batch()
    costs = measure_layers(layers, x)
    for again in plans:
        real = real_peak(layers, x, again)
        if abs(predicted(costs, again) - real) > SLACK:
            raise Wrong(f"recomputed {sorted(again)} of 8 layers: a real pass has {real:,} bytes.")


def peak(trial: Trial) -> str:
    """Judges `peak_bytes`."""
    numbers = range(len(network()))
    plans = [{i for i in numbers if trial.draw.random() < 0.5} for _ in range(4)]
    plans += [set(), set(numbers), {trial.draw.choice(numbers)}]
    trial.alone("peak_bytes", predictions, trial.new_seed(), plans, seconds=60)
    return (
        f"right to {SLACK} bytes for {len(plans)} plans, each held against a real pass;\n"
        f"and exact for {EXAMPLES} plans of drawn networks with 1 to 40 layers."
    )


# ---- c: choose


def chosen_by(answer, where: str, layers: list[Layer], budget: int) -> set[int]:
    """What `choose` returns, after a look at its memory and its work; nothing: it had to refuse."""
    least, given = peak_of(layers, range(len(layers))), list(layers)
    try:
        chosen = answer.choose(given, budget)
    except ValueError as error:
        if budget >= least:
            fits = sorted(best(layers, budget)[1])
            raise Wrong(f"{where}: choose raises “{error}” although {fits} fits.") from None
        if str(least) not in str(error).replace(",", "").replace("_", ""):
            raise Wrong(
                f"{where}: the ValueError “{error}” does not name the smallest possible budget, "
                f"{least:,}."
            ) from None
        return set()
    unchanged(where, ["layers"] * (given != layers))
    if budget < least:
        raise Wrong(f"{where}: that is impossible, but choose returns {described(chosen)}.")
    own = set(chosen) if isinstance(chosen, Iterable) else {None}
    if not own <= set(range(len(layers))):
        raise Wrong(f"{where}: choose returns {described(chosen)}, not a set of layer numbers.")
    if (needs := peak_of(layers, own)) > budget:
        end = "\nIt fits when the forward pass ends; the peak is where a layer is recomputed."
        raise Wrong(
            f"{where}: recomputing {sorted(own)} has its peak at {needs:,} bytes, above the budget."
            + end * (sum(held(layers, own)) <= budget)
        )
    work, (right, cheapest) = work_of(layers, own), best(layers, budget)
    if work > right:
        spare = [i for i in sorted(own) if peak_of(layers, own - {i}) <= budget]
        raise Wrong(
            f"{where}: recomputing {sorted(own)} costs {work:,} FLOPs; {sorted(cheapest)} fits too "
            f"and costs {right:,}." + (f"\nWhy is layer {spare[0]} among them?" if spare else "")
        )
    return own


def choices(answer, seed: int) -> list[float]:
    """The work for each of BUDGETS, as a share of the forward pass."""

    def fits(example: tuple[list[Layer], int]) -> None:
        layers, number = example
        peaks = sorted({peak for _, peak, _ in all_sets(layers)})
        budget = peaks[number % len(peaks)]
        chosen_by(answer, f"a budget of {budget:,} for {shown(layers)}", layers, budget)

    def refuses(layers: list[Layer]) -> None:
        budget = peak_of(layers, range(len(layers))) - 1
        chosen_by(answer, f"a budget of {budget:,} for {shown(layers)}", layers, budget)

    some = st.lists(any_layer(), min_size=1, max_size=MOST)
    for_all(seed, st.tuples(some, st.integers(0, 2**MOST)), fits)
    for_all(seed, some, refuses, examples=10)
    layers, x, shares = network(), batch(), []
    costs, whole = measure_layers(layers, x), real_peak(layers, x, set())
    for share in BUDGETS:
        where, budget = f"with {share:.0%} of the memory", int(share * whole)
        chosen = chosen_by(answer, where, costs, budget)
        if (real := real_peak(layers, x, chosen)) > budget + SLACK:
            raise Wrong(f"{where}: {sorted(chosen)} needs {real:,} bytes in a real pass.")
        shares.append(work_of(costs, chosen) / work_of(costs, range(len(costs))))
    return shares


def choice(trial: Trial) -> str:
    """Judges `choose`."""
    shares = trial.alone("choose", choices, trial.new_seed(), seconds=60)
    report = ", ".join(f"{share:.0%}: {work:.0%}" for share, work in zip(BUDGETS, shares))
    return (
        "fits the budget in real passes, with the least work; budget: forward passes again\n"
        f"{report};\nas good as the best of all sets in {EXAMPLES} drawn networks of 1 to {MOST} "
        "layers;\na budget that is too small is refused each time, with the smallest one."
    )
