"""Drawings of lesson 06: a pair of split matrices, heads on ranks, messages, a split sequence."""

from collections.abc import Sequence

from utils.drawing import figures
from utils.shares import shares


def column_and_row(ranks: int = 2) -> None:
    """x, the first matrix split by outputs, the second by inputs, and the sum; colour is a rank."""
    _, axes = figures.plt.subplots(figsize=figures.SIZES["normal"])
    width, gap = 0.9, 0.12
    _matrix(axes, 0.0, 1.2, 0.9, 1.6, "x", "on all ranks")
    for rank in range(ranks):
        tint = figures.shade(f"rank{rank}")
        shift = rank * (width + gap)
        _block(axes, 2.3 + shift, 1.55, width, 0.9, tint, f"A{_low(rank)}")
        _block(axes, 2.3 + ranks * (width + gap) + 0.75 + shift, 1.2, width, 1.6, tint,
               f"h{_low(rank)}")
    top = 1.2 + 0.8 + ranks * width / 2
    left = 2.3 + 2 * ranks * (width + gap) + 1.4
    for rank in range(ranks):
        tint = figures.shade(f"rank{rank}")
        _block(axes, left, top - (rank + 1) * (width + gap), 0.9, width, tint, f"B{_low(rank)}")
    end = left + 1.6
    for rank in range(ranks):
        tint = figures.shade(f"rank{rank}")
        _block(axes, end + 0.95 * rank, 1.2, 0.55, 1.6, tint, "")
        if rank:
            axes.text(end + 0.95 * rank - 0.2, 2.0, "+", ha="center", va="center", fontsize=13)
    _matrix(axes, end + 0.95 * ranks + 0.35, 1.2, 0.9, 1.6, "y", "on all ranks")
    for x, text in ((1.55, "f"), (end + 0.95 * ranks - 0.03, "g")):
        axes.text(x, 3.35, text, ha="center", fontsize=15, style="italic", color=figures.GOLD)
        axes.plot([x, x], [0.9, 3.2], color=figures.GOLD, linestyle="--", linewidth=1.4)
    middle = 2.3 + ranks * (width + gap) / 2
    axes.text(middle, 0.55, "column: split by outputs", ha="center", fontsize=10)
    axes.text(left + 0.45, 0.05, "row: split by inputs", ha="center", fontsize=10)
    axes.text(left - 1.5, 3.35, "no messages", ha="center", fontsize=10, color=figures.GREY)
    axes.set(xlim=(-0.2, end + 0.95 * ranks + 1.5), ylim=(-0.2, 3.8), aspect="equal")
    axes.axis("off")
    figures.show()


def _low(index):
    return "₀₁₂₃₄₅₆₇"[index]


def _block(axes, x, y, width, height, tint, text):
    figures.block(axes, x, y, width, height, tint, text, edge="white")


def _matrix(axes, x, y, width, height, text, note):
    figures.block(axes, x, y, width, height, "pale", text, ink=figures.INK, edge=figures.GREY)
    axes.text(x + width / 2, y - 0.3, note, ha="center", fontsize=9, color=figures.GREY)


def heads(cases: Sequence[tuple[int, int]], ranks: int = 2) -> None:
    """Query heads above, key-value heads below, in the colour of the rank that computes them.

    cases: [(query heads, key-value heads)]; a key-value head that several ranks need is grey.
    """
    _, panels = figures.plt.subplots(1, len(cases), figsize=figures.SIZES["strip"])
    for axes, (queries, keys) in zip(panels, cases, strict=True):
        owner = query_owners(queries, keys, ranks)
        group = queries // keys
        for head, rank in enumerate(owner):
            _block(axes, head, 1.1, 0.9, 0.9, figures.shade(f"rank{rank}"), "q")
        for head in range(keys):
            using = sorted(set(owner[head * group : (head + 1) * group]))
            tint = figures.shade(f"rank{using[0]}") if len(using) == 1 else figures.GREY
            _block(axes, head * group, 0, group - 0.1, 0.9, tint, "kv")
        for rank in sorted(set(owner)):
            middle, tint = owner.index(rank) + owner.count(rank) / 2, figures.shade(f"rank{rank}")
            axes.text(middle, -0.35, f"rank {rank}", color=tint, ha="center", va="center", size=10)
        axes.set(xlim=(-0.2, max(queries, 8)), ylim=(-0.6, 2.2))
        axes.set_title(f"{queries} query, {keys} key-value heads", fontsize=10)
        axes.axis("off")
    figures.show()


def query_owners(queries: int, keys: int, ranks: int) -> list[int]:
    """The rank of each query head: its key-value head's, if there is one for every rank."""
    group = queries // keys
    held = [group * n for n in shares(keys, ranks)] if keys >= ranks else shares(queries, ranks)
    return [rank for rank, count in enumerate(held) for _ in range(count)]


Seconds = dict[str, dict[str, float]]  # {way: {where: seconds}}


def messages(measured: Seconds, formula: Seconds) -> None:
    """Measurements as dots and the formula as bars, on one logarithmic scale."""
    _, axes = figures.figure("normal")
    names = []
    for index, way in enumerate(measured):
        tint = figures.shade(f"rank{index}")
        for where in {**measured[way], **formula[way]}:
            if where in formula[way]:
                axes.plot(1e3 * formula[way][where], len(names), "|k", markersize=22)
            if where in measured[way]:
                point = 1e3 * measured[way][where], len(names)
                axes.plot(*point, "o", color=tint, markersize=9)
                axes.annotate(f"{figures.number(point[0])} ms", point, (10, 8), color=tint,
                              textcoords="offset points")
            names.append(f"{way} parallel, {where}")
    axes.set(xscale="log", xlabel="ms; dot: measured, bar: formula")
    axes.set_title("messages of one step, two ranks")
    axes.xaxis.set_major_formatter(lambda value, _: figures.number(value))
    axes.margins(x=0.16)
    figures.lanes(axes, names)
    figures.show()


def layer_regions() -> None:
    """One layer from left to right: what each rank holds, and what happens at the borders."""
    rows = (("tensor parallel", False), ("with sequence parallel", True))
    _, panels = figures.plt.subplots(2, 1, figsize=figures.SIZES["normal"])
    parts = (("norm", 1.0, False), ("attention", 1.7, True), ("add, norm", 1.2, False),
             ("MLP", 1.7, True), ("add", 0.9, False))
    for axes, (title, split) in zip(panels, rows, strict=True):
        left = 0.0
        for name, width, shared in parts:
            _region(axes, left, width, name, shared, split)
            left += width + 0.75
        borders = ("all-gather", "reduce-scatter") if split else ("f", "g: all-reduce")
        left = 0.0
        for index, (_, width, _) in enumerate(parts[:-1]):
            left += width
            text = borders[index % 2]
            axes.text(left + 0.375, 2.25, text, ha="center", fontsize=9, color=figures.GOLD)
            axes.annotate("", (left + 0.68, 1.0), (left + 0.07, 1.0),
                          arrowprops={"arrowstyle": "-|>", "color": figures.GOLD})
            left += 0.75
        axes.set(xlim=(-0.1, left + 1.0), ylim=(-0.6, 2.7))
        axes.set_title(title, fontsize=11)
        axes.axis("off")
    figures.show()


def _region(axes, left, width, name, shared, split):
    for rank in range(2):
        tint = figures.shade(f"rank{rank}")
        if shared:  # each rank has some of the heads or columns
            figures.block(axes, left + rank * width / 2, 0, width / 2 - 0.04, 2, tint, edge=tint)
        elif split:  # each rank has some of the positions
            figures.block(axes, left, 1.02 - rank * 1.02, width, 0.98, tint, edge=tint)
    if not shared and not split:
        figures.block(axes, left, 0, width, 2, "pale", edge=figures.GREY)
    axes.text(left + width / 2, -0.32, name, ha="center", va="center", fontsize=10)
