"""Drawings of lesson 14: where virtual tokens enter, one row, accuracies, prompts in a batch.

Gold is trained, grey is frozen.
"""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from utils.drawing import figures
from utils.drawing.figures import GOLD, GREY, PALE, Sketch

if TYPE_CHECKING:
    import torch

    from utils.prompts.in_context import Accuracy

KINDS = ("prompt tuning", "P-tuning", "prefix tuning", "LoRA")


def where_they_enter(layers: int = 3, virtual: int = 2, words: int = 3) -> None:
    """Four ways to teach a frozen model: what is trained (gold), and where it enters."""
    sketch = Sketch(9.6, 3.75)
    for panel, kind in enumerate(KINDS):
        left = 0.15 + 2.4 * panel
        sketch.text(left + 1.05, 3.55, kind, weight="bold", size=11.5)
        for layer in range(layers):
            _layer(sketch, left, 1.35 + 0.68 * layer, kind, layer, virtual, words)
        _bottom(sketch, left, kind, virtual, words)
    sketch.text(4.8, 0.14, "gold: trained      grey: frozen      blue: the tokens of the text")
    sketch.show()


def _layer(sketch, left, y, kind, layer, virtual, words):
    """A layer of one panel, with what is trained inside it."""
    name = f"{kind} {layer}"
    wide = 0.42 * (virtual + words)
    if kind == "prefix tuning":  # keys and values before those of the text, in every layer
        for index in range(virtual):
            sketch.box(f"{name} {index}", "k v", x=left + 0.42 * index, y=y, width=0.42,
                       height=0.48, color="gold", size=8)
        shift = 0.42 * virtual
        sketch.box(name, f"layer {layer}", x=left + shift, y=y, width=wide - shift, height=0.48)
    elif kind == "LoRA":  # a pair of thin matrices beside the frozen ones
        sketch.box(name, f"layer {layer}", x=left, y=y, width=wide - 0.62, height=0.48)
        for index, text in enumerate("AB"):
            sketch.box(f"{name} {text}", text, x=left + wide - 0.6 + 0.3 * index, y=y,
                       width=0.3, height=0.48, color="gold", size=8.5)
    else:
        sketch.box(name, f"layer {layer}", x=left, y=y, width=wide, height=0.48)


def _bottom(sketch, left, kind, virtual, words):
    """The input of the first layer of one panel."""
    own = virtual if kind in ("prompt tuning", "P-tuning") else 0
    first = virtual if kind == "prefix tuning" else own
    count = words if first else virtual + words
    for index in range(own):
        sketch.box(f"{kind} p{index}", " ", x=left + 0.42 * index, y=0.78, width=0.42,
                   height=0.42, color="gold")
    for index in range(count):
        sketch.box(f"{kind} x{index}", " ", x=left + 0.42 * (first + index), y=0.78, width=0.42,
                   height=0.42, color="data")
    if kind == "P-tuning":  # a small network makes the virtual tokens, and is dropped later
        sketch.box("network", "MLP, LSTM", x=left, y=0.36, width=0.42 * virtual, height=0.36,
                   color="gold", fill=False, size=7.5)


def one_row(virtual: int, question: list[str], answer: list[str], end: str = "end") -> None:
    """One example as the model sees it: rows of inputs, positions and targets.

    virtual: the number of virtual tokens; question, answer: the text of their tokens. The end is
    only predicted, never read.
    """
    names = [f"v{index}" for index in range(virtual)] + question + answer
    kinds = ["gold"] * virtual + ["data"] * len(question) + ["rank0"] * len(answer)
    targets = ["–"] * (virtual + len(question) - 1) + answer + [end]
    cell = min(0.75, 7.6 / len(names))
    sketch = Sketch(9.2, 2.5)
    left = 1.3
    for y, text in ((1.75, "input"), (1.3, "position"), (0.75, "target")):
        sketch.text(1.15, y, text, align="right", weight="bold")
    for index, (name, kind, target) in enumerate(zip(names, kinds, targets, strict=True)):
        x = left + cell * index
        small = 9 if cell > 0.6 else 7.5
        sketch.box(f"input {index}", _short(name), x=x, y=1.52, width=cell, height=0.46,
                   color=kind, size=small)
        sketch.text(x + cell / 2, 1.3, str(index), color="muted", size=9)
        sketch.box(f"target {index}", _short(target), x=x, y=0.52, width=cell, height=0.46,
                   color="pale" if target == "–" else "rank1", size=small)
    cut = left + cell * virtual
    figures.plt.plot([cut, cut], [0.35, 2.15], color=GOLD, linestyle="--", linewidth=1.4)
    sketch.text(left + cell * virtual / 2, 2.25, "virtual tokens", color="gold")
    sketch.text(cut + cell * len(question) / 2, 2.25, "question")
    sketch.text(cut + cell * (len(question) + len(answer) / 2), 2.25, "answer")
    sketch.text(left + cell * virtual / 2, 0.25, "logits dropped", color="gold", size=9)
    sketch.text(cut + 0.1, 0.25, "the loss counts only the orange targets", align="left", size=9)
    sketch.show()


def _short(text: str, most: int = 9) -> str:
    """A token's text made visible: line ends as a sign, and spaces where they are easily missed,
    at the start and several in a row."""
    seen = text.replace("\n", "↵").replace("$", r"\$")
    seen = re.sub(r"   *", lambda blanks: f"␣×{len(blanks[0])} ", seen).rstrip()
    seen = "␣" + seen[1:] if seen.startswith(" ") else seen
    return seen if len(seen) <= most else seen[: most - 1] + "…"


def growth(
    series: "dict[str, dict[int, Accuracy]]",
    chance: float | None = None,
    title: str = "",
    unit: str = "examples in the prompt",
) -> None:
    """Accuracy over the number of shots, with its interval as a band.

    series: {name: {shots: Accuracy}} of `utils.prompts.in_context`; chance: a share or None.
    """
    _, axes = figures.figure()
    ends = []
    for index, (name, points) in enumerate(series.items()):
        tint, shots = figures.CYCLE[index % len(figures.CYCLE)], sorted(points)
        means = [points[n].mean for n in shots]
        lows, highs = [points[n].low for n in shots], [points[n].high for n in shots]
        places = range(len(shots))
        axes.fill_between(places, lows, highs, color=tint, alpha=0.15, linewidth=0)
        axes.plot(places, means, "o-", color=tint)
        ends.append((name, len(shots) - 1, means[-1], tint))
    axes.set_xticks(range(len(shots)), [str(n) for n in shots])
    axes.set(xlabel=unit, ylabel="accuracy", ylim=(-0.02, 1.02), title=title)
    _chance(axes, chance, axes.axhline)
    figures._label_ends(axes, ends)
    figures.show()


def accuracies(rows: "dict[str, Accuracy]", chance: float | None = None, title: str = "") -> None:
    """Horizontal bars with 95 % intervals; rows: {name: Accuracy} of `utils.prompts.in_context`."""
    _, axes = figures.figure("normal")
    for row, (name, one) in enumerate(rows.items()):
        tint = GOLD if "prompt tuning" in name else figures.BLUE
        axes.barh(row, one.mean, 0.6, color=tint)
        axes.plot([one.low, one.high], [row, row], color=figures.INK, linewidth=1.6)
        axes.annotate(f"{100 * one.mean:.0f} %", (one.high, row), **figures.RIGHT)
    figures._name_rows(axes, list(rows), title)
    axes.set(xlim=(0, 1.08), xlabel="accuracy; the thin line is the 95 % interval")
    _chance(axes, chance, axes.axvline)
    figures.show()


def sizes(values: dict[str, float], title: str = "") -> None:
    """{name: value}: dots on a logarithmic axis, on which a bar's length would mean nothing."""
    _, axes = figures.figure("strip")
    for row, (name, value) in enumerate(values.items()):
        tint = GOLD if "prompt tuning" in name else figures.BLUE
        axes.plot(value, row, "o", color=tint, markersize=9)
        axes.annotate(figures.number(value), (value, row), **figures.RIGHT | {"xytext": (9, 0)})
    axes.set_xscale("log")
    figures._name_rows(axes, list(values), title)
    axes.margins(y=0.3)
    figures.show()


def _chance(axes, chance, line):
    """A dashed line at the accuracy of guessing."""
    if chance is not None:
        line(chance, color=GREY, linestyle="--", linewidth=1.4)
        if line == axes.axhline:
            axes.text(0.01, chance, "guessing", color=GREY, fontsize=9, va="bottom",
                      transform=axes.get_yaxis_transform())
        else:
            axes.text(chance + 0.01, -0.42, "guessing", color=GREY, fontsize=9)


def sweeps(
    panels: dict[str, dict[object, float]],
    title: str = "",
    y: str = "accuracy",
    best: Callable = max,
) -> None:
    """One small panel per knob: {knob: {setting: value}}; the best setting is gold.

    best: max or min, whichever is better.
    """
    _, axes = figures.figure(columns=len(panels))
    most = max(value for values in panels.values() for value in values.values())
    for place, (knob, values) in zip(axes, panels.items(), strict=True):
        names = [str(name) for name in values]
        wanted = best(values.values())
        tints = [GOLD if value == wanted else figures.BLUE for value in values.values()]
        place.bar(names, list(values.values()), 0.62, color=tints)
        for index, value in enumerate(values.values()):
            place.annotate(f"{value:.2f}", (index, value), ha="center", va="bottom", fontsize=9)
        place.grid(axis="x", visible=False)
        place.set(xlabel=knob, ylim=(0, 1.1 * most))
    axes[0].set(ylabel=y, title=title)
    figures.show()


def among_words(
    words: "torch.Tensor", virtual: "torch.Tensor", before: "torch.Tensor | None" = None
) -> None:
    """Lengths of embeddings (left), and cosines of each virtual token with its nearest word.

    words (V, C), virtual (P, C), before (P, C) or None: tensors; before: where tuning began.
    """
    _, (left, right) = figures.figure(columns=2)
    lengths = words.norm(dim=1)
    sets = {"words": (lengths, PALE), "virtual tokens": (virtual.norm(dim=1), GOLD)}
    most = 1.05 * max(float(values.max()) for values, _ in sets.values())
    for name, (values, tint) in sets.items():
        share, edge = [100 / len(values)] * len(values), GREY if tint == PALE else tint
        left.hist(values.tolist(), bins=30, range=(0, most), weights=share, label=name, color=tint,
                  edgecolor=edge)
    left.set(xlabel="length of the embedding", ylabel="% of each kind", title="how long")
    left.legend(fontsize=9)
    rows = {"before": before, "after tuning": virtual}
    rows = {name: tensor for name, tensor in rows.items() if tensor is not None}
    for index, (name, tensor) in enumerate(rows.items()):
        nearest = cosines(tensor, words).amax(dim=1).tolist()
        tint = GREY if name == "before" else GOLD
        right.scatter(nearest, [index] * len(nearest), color=tint, alpha=0.7, s=60)
    right.set_yticks(range(len(rows)), list(rows))
    right.set(xlim=(-0.05, 1.05), ylim=(-0.6, len(rows) - 0.4), title="how similar to a word",
              xlabel="cosine with the nearest word")
    figures.show()


def cosines(some: "torch.Tensor", others: "torch.Tensor") -> "torch.Tensor":
    """Cosine of each row of (P, C) with each row of (V, C): (P, V)."""
    return (some / some.norm(dim=1, keepdim=True)) @ (others / others.norm(dim=1, keepdim=True)).T


def batch_of_tasks(rows: Sequence[tuple[str, str, str]], virtual: int = 4) -> None:
    """Rows of one batch, each with the prompt of its own task before its text.

    rows: [(task, text, answer)], drawn from top to bottom.
    """
    sketch = Sketch(9.2, 0.62 + 0.5 * len(rows))
    tasks = list(dict.fromkeys(task for task, _, _ in rows))
    top = 0.5 * len(rows) + 0.1
    sketch.box("model", "one frozen\nmodel", x=6.15, y=0.15, width=1.3, height=top - 0.15)
    sketch.text(1.9, top + 0.2, "a prompt for each task", color="ink", size=9.5)
    for index, (task, text, answer) in enumerate(rows):
        y = top - 0.5 * (index + 1) + 0.05
        tint = (GOLD, figures.PINK, figures.GREEN, figures.ORANGE)[tasks.index(task) % 4]
        sketch.text(1.25, y + 0.2, task, align="right", size=9.5)
        for place in range(virtual):
            sketch.box(f"v{index} {place}", " ", x=1.35 + 0.28 * place, y=y, width=0.28,
                       height=0.4, color=tint)
        start = 1.35 + 0.28 * virtual
        sketch.box(f"text {index}", _short(text, 34), x=start, y=y, width=5.75 - start, height=0.4,
                   color="data", size=9)
        _level(sketch, 5.75, 6.15, y)
        _level(sketch, 7.45, 7.75, y)
        sketch.text(7.8, y + 0.2, _short(answer, 16), align="left", size=9.5)
    sketch.show()


def _level(sketch, begin, end, y):
    sketch.axes.annotate("", (end, y + 0.2), (begin, y + 0.2),
                         arrowprops={"arrowstyle": "-|>", "color": GREY})


def prompt_on_ranks(stages: int = 2, tp: int = 2) -> None:
    """Which ranks hold the prompt of a split model, and the path of its gradient."""
    sketch = Sketch(9.2, 0.75 + 0.75 * tp)
    for rank in range(tp):
        y = 0.45 + 0.75 * (tp - 1 - rank)
        sketch.box(f"prompt {rank}", "prompt", x=0.2, y=y, width=1.1, color="gold")
        for stage in range(stages):
            name = f"{stage} {rank}"
            text = f"rank {stage * tp + rank}: its slice of stage {stage}"
            width = 6.6 / stages
            x = 1.9 + stage * (width + 0.5 / max(stages - 1, 1))
            sketch.box(name, text, x=x, y=y, width=width, color="pale", size=9.5)
            if stage:
                sketch.arrow(name, f"{stage - 1} {rank}", color="rank1")
        sketch.arrow(f"0 {rank}", f"prompt {rank}", color="rank1")
    sketch.text(0.75, 0.7 + 0.75 * tp - 0.12, "trained", color="gold")
    sketch.text(5.3, 0.7 + 0.75 * tp - 0.12, "frozen: no gradient, no optimizer state")
    sketch.text(4.6, 0.2, "orange: the path of the gradient", color="rank1", size=9.5)
    sketch.show()
