"""Given: plots of your answers. An answer that does not run yet does not stop the notebook."""

import functools
from pathlib import Path

import torch

from labs.support.activation_checkpointing.contracts import BUDGETS, all_sets, peak_of, percent
from labs.support.activation_checkpointing.network import forward_backward, measured
from utils.course.runner import load_answer
from utils.data import corpus
from utils.drawing import figures
from utils.drawing import memory as pictures_memory
from utils.measure import timing
from utils.measure.memory import Memory
from utils.models.gpt import GPT, GPTConfig, cross_entropy

MB = 1e6


def _patient(function):
    """Make a function print one line instead of a traceback if an answer does not run yet."""

    @functools.wraps(function)
    def patient(file, *args):
        try:
            return function(load_answer(Path(file).resolve()), *args)
        except NotImplementedError:
            print(f"{file} is not finished yet.")
        except Exception as error:
            print(f"{file} does not run yet ({type(error).__name__}); the check says more.")

    return patient


@_patient
def your_checkpoint(answer) -> None:
    """Plot a step of a small GPT with your checkpoint around each layer, and print a summary."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(hidden_size=64, layers=6, heads=4))
    x, y = corpus.batch(corpus.load(), 0, 4, 64)
    most, gradients = [], []
    for _ in range(2):  # without, then with checkpoints
        with Memory(model=model) as memory:
            with memory.phase("forward"):
                loss = cross_entropy(model(x), y)
            with memory.phase("backward"):
                loss.backward()
        most.append(max(held["activations"] for _, held in memory.timeline))
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
        for layer in model.model.layers:
            layer.forward = functools.partial(answer.checkpoint, layer.forward)
    pictures_memory.timeline(memory, title="with your checkpoint")
    equal = all(a.equal(b) for a, b in zip(*gradients, strict=True))
    print(
        f"activations: {most[0] / MB:.1f} MB without, {most[1] / MB:.1f} MB with your checkpoint"
    )
    print("equal gradients:", equal)


@_patient
def your_plans(answer) -> None:
    """Plot all sets of layers as points and highlight your choices for some budgets."""
    _, _, costs, whole = measured()

    def point(chosen):
        return 100 * peak_of(costs, chosen) / whole, percent(costs, chosen)

    cloud = [point(chosen) for *_, chosen in all_sets(costs)]
    plans = {share: answer.choose(costs, int(share * whole)) for share in BUDGETS}
    axes = figures.figure()[1]
    axes.plot(*zip(*cloud, strict=True), "o", color=figures.GREY, markersize=4, alpha=0.5)
    axes.plot(*zip(*map(point, plans.values())), "o", color=figures.GOLD, markersize=10)
    axes.set(xlabel="% of the memory without recomputation", ylabel="% of the forward pass rerun")
    axes.set_title("each point is a set of layers; gold: yours")
    figures.show()
    for share, chosen in plans.items():
        memory, again = point(chosen)
        print(
            f"budget {share:.0%}: layers {sorted(chosen)}, {memory:.0f} % of the memory, "
            f"{again:.0f} % of the forward pass recomputed"
        )


@_patient
def share_of_work(answer, budget: float) -> float | None:
    """The percentage of the forward pass that your plan recomputes; None if it does not run yet."""
    _, _, costs, whole = measured()
    return percent(costs, answer.choose(costs, int(budget * whole)))


@_patient
def clock(answer, budget: float, rows: int = 8192) -> None:
    """Time a real pass with many rows that recomputes nothing, your plan, or everything."""
    layers, x, costs, whole = measured()
    x = torch.randn(rows, x.shape[1])
    plan, everything = set(answer.choose(costs, int(budget * whole))), set(range(len(costs)))
    plans = {"nothing": set(), f"your plan, {budget:.0%}": plan, "everything": everything}
    passes = {k: functools.partial(forward_backward, layers, x, p) for k, p in plans.items()}
    times = {name: 1e3 * seconds for name, seconds in timing.in_turn(passes).items()}
    figures.bars(times, unit="ms", title="one pass", colors=dict.fromkeys(times, "rank0"))
    print({name: f"{ms / times['nothing']:.2f} times" for name, ms in times.items()})
