"""Drawings of lesson 05: what each rank holds, when a unit is whole, which technique to choose."""

from matplotlib.patches import Rectangle

from utils.drawing import figures
from utils.planner.strategy import OPTIMIZERS, PRECISIONS

KINDS = ("parameters", "gradients", "optimizer")
TITLES = ("plain data parallel", "stage 1", "stage 2", "stage 3")


def who_holds_what(ranks: int = 4, precision: str = "bf16") -> None:
    """Each rank's state at each stage: filled is held, outlined is left to the other ranks.

    The widths are bytes: with AdamW in mixed precision 2 + 2 + 12 per parameter.
    """
    weight, gradient, master = PRECISIONS[precision]
    widths = (weight, gradient, master + OPTIMIZERS["adamw"])
    _, panels = figures.plt.subplots(2, 2, figsize=figures.SIZES["normal"])
    for stage, axes in enumerate(panels.flat):
        for rank in range(ranks):
            left = 0.0
            for index, (kind, width) in enumerate(zip(KINDS, widths, strict=True)):
                shared = stage > 2 - index  # stage 1 shards the optimizer, 2 also gradients, …
                _piece(axes, left, rank, width, figures.shade(kind), shared, ranks)
                left += width + 0.25
            axes.text(-0.3, rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=9)
        share = sum(w / ranks if stage > 2 - i else w for i, w in enumerate(widths))
        axes.set(xlim=(-2.6, left), ylim=(ranks, -0.2))
        axes.set_title(f"{TITLES[stage]}: {share:.4g} bytes per parameter", fontsize=11)
        axes.axis("off")
    handles = [Rectangle((0, 0), 1, 1, color=figures.shade(kind)) for kind in KINDS]
    panels.flat[0].figure.legend(handles, KINDS, loc="outside lower center", ncols=3)
    figures.show()


def _piece(axes, left, rank, width, tint, shared, ranks):
    """The bytes of one kind on one rank; `shared`: only shard `rank` is filled."""
    figures.block(axes, left, rank, width, 0.8, "none", edge=figures.GREY)
    part = width / ranks if shared else width
    start = left + rank * part if shared else left
    figures.block(axes, start, rank, part, 0.8, tint)


# ---- when a unit is whole


def unit_schedule(units: int, stage: int = 3, ahead: int = 0) -> list[tuple[int, int, str]]:
    """The moments of one step at which a unit is whole: [(moment, unit, what it does)].

    A moment is one unit's forward or backward pass; there are 2 · units. A unit does "forward",
    "backward" or "waits". ahead: how many units are gathered in advance (prefetch).
    """
    order = [*range(units), *reversed(range(units))]
    rows = []
    for moment, unit in enumerate(order):
        rows.append((moment, unit, "forward" if moment < units else "backward"))
    if stage < 3:
        busy = {(moment, unit) for moment, unit, _ in rows}
        moments = range(2 * units)
        rows += [(m, u, "waits") for m in moments for u in range(units) if (m, u) not in busy]
    else:
        for moment, unit in enumerate(order):
            for early in range(max(0, moment - ahead), moment):
                if order[early] != unit and unit not in order[early:moment]:
                    rows.append((early, unit, "waits"))
    return sorted(rows)


def units_in_time(units: int = 4) -> None:
    """Which units are whole at which moment: stages 0 to 2, stage 3, and stage 3 with prefetch."""
    names = ["embedding", *(f"block {i}" for i in range(units - 2)), "norm, head"]
    tints = {
        "forward": figures.BLUE,
        "backward": figures.ORANGE,
        "waits": figures.shade("pale"),
    }
    _, panels = figures.plt.subplots(1, 3, figsize=figures.SIZES["normal"], sharey=True)
    cases = (("stages 0, 1, 2", 2, 0), ("stage 3", 3, 0), ("stage 3 with prefetch", 3, 1))
    for axes, (title, stage, ahead) in zip(panels, cases, strict=True):
        for moment, unit, what in unit_schedule(units, stage, ahead):
            edge = figures.GREY if what == "waits" else tints[what]
            figures.block(axes, moment, unit, 0.92, 0.86, tints[what], edge=edge)
        axes.axvline(units - 0.04, color=figures.INK, linewidth=0.8, linestyle=":")
        figures.lanes(axes, names, middle=0.43)
        axes.set(xlim=(-0.2, 2 * units + 0.1), ylim=(units + 0.1, -0.2), xticks=[], title=title)
        axes.set_xlabel("forward, then backward →")
        axes.grid(visible=False)
    handles = [Rectangle((0, 0), 1, 1, color=tint) for tint in tints.values()]
    words = ("whole: computes forward", "whole: computes backward", "whole: waits")
    panels[0].figure.legend(handles, words, loc="outside lower center", ncols=3)
    figures.show()


# ---- matrices


def matrix(values: dict, *, unit: str = "", title: str = "", limit: float | None = None) -> None:
    """A table as a picture: {row: {column: value or None}}; values above `limit` are grey.

    Without a limit, a cell's colour follows its value.
    """
    rows, columns = list(values), list(next(iter(values.values())))
    top = max(value or 0 for row in values.values() for value in row.values()) or 1
    axes = figures.figure("tall" if len(rows) > 7 else "normal")[1]
    cells = {}
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            value = values[row][column]
            over = value is None or (limit is not None and value > limit)
            strength = None if over else (0.35 if limit else 0.08 + 0.6 * (value / top))
            cells[i, j] = ("–" if value is None else figures.number(value), strength)
    figures.heat_map(axes, rows, columns, cells)
    axes.set_title(f"{title} ({unit})" if unit else title)
    figures.show()


# ---- what to choose

DECISIONS = (
    # (what is scarce, its colour, [what to try, in this order, and the lesson about it])
    ("optimizer and\ngradients", "optimizer", ["ZeRO-1, ZeRO-2:\nfree", "offload [04]"]),
    ("parameters", "parameters", ["ZeRO-3: 1.5 ×\nthe traffic", "offload, then\n[06] [08]"]),
    ("activations", "activations", ["smaller micro-\nbatches [02]", "recompute,\noffload [04]"]),
    ("time on\nthe wire", "communication", ["accumulate [02]", "less sharding:\nZeRO-2, hybrid"]),
    ("time to\ncompute", "ink", ["bf16 [03]", "recompute less,\noffload less"]),
)


def decision() -> None:
    """Choosing a technique by the bottleneck: measure, find what is scarce, take the cheapest."""
    sketch = figures.Sketch(8, 4.6)
    sketch.box("ask", "measure one step: what is scarce?", x=2.6, y=4.0, width=2.8, color="gold")
    width = 1.56
    for index, (text, color, steps) in enumerate(DECISIONS):
        x = 0.05 + index * (width + 0.025)
        sketch.box(text, text, x=x, y=2.7, width=width, height=0.62, color=color)
        sketch.arrow("ask", text)
        for row, step in enumerate(steps):
            name, y = f"{text} {row}", 1.55 - 0.95 * row
            sketch.box(name, step, x=x, y=y, width=width, height=0.7, size=9)
            sketch.arrow(f"{text} {row - 1}" if row else text, name)
    sketch.text(0.1, 0.2, "Each column begins with the cheapest; numbers in brackets are lessons.",
                align="left", size=9, color="muted")
    sketch.show()
