"""The workshop's standard memory figure: what a step holds, by kind, change by change."""

import numpy as np
from matplotlib.axes import Axes

from utils.drawing import figures
from utils.measure.memory import KINDS, Memory

COLORS = {"temporary": "data", "communication": "gold"}  # the other kinds have colours of their own
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def timeline(
    memory: Memory, title: str = "", ax: Axes | None = None, top: float | None = None
) -> None:
    """Stacked areas of the recorded memory, with the phases marked.

    The x axis counts changes (a tensor is allocated or freed), not seconds. `top` fixes the height
    in bytes, for two figures to be comparable.
    """
    rows = [row for row in memory.timeline if row[0]]  # rows before the first phase have none
    if not rows:
        raise ValueError("memory.timeline has no phase: use `with memory.phase(…)` inside `with`")
    axes = figures.figure()[1] if ax is None else ax
    highest = max(sum(held.values()) for _, held in rows)
    unit, letter = next(pair for pair in UNITS if (top or highest) >= pair[0] or pair[0] == 1)
    kinds = [kind for kind in KINDS if any(held[kind] for _, held in rows)]
    levels = np.array([[held[kind] / unit for _, held in rows] for kind in kinds])
    axes.stackplot(
        range(len(rows)),
        levels,
        step="post",
        labels=kinds,
        colors=[figures.shade(COLORS.get(kind, kind)) for kind in kinds],
    )
    height = 1.18 * (top or highest) / unit
    _mark_phases(axes, [phase for phase, _ in rows], height)
    peak = int(levels.sum(axis=0).argmax())
    axes.plot(peak, levels[:, peak].sum(), "v", color=figures.INK, markersize=7)
    axes.set(xlim=(0, len(rows) - 1), ylim=(0, height), ylabel=letter, title=title)
    axes.set_xlabel("memory changes, in order")
    axes.legend(*map(reversed, axes.get_legend_handles_labels()),
                loc="center left", bbox_to_anchor=(1.0, 0.5))
    if ax is None:
        figures.show()
        print(
            f"Peak {highest / unit:.1f} {letter} in the phase {rows[peak][0]}: "
            + ", ".join(f"{kind} {levels[i, peak]:.1f}" for i, kind in enumerate(kinds))
        )


def _mark_phases(axes, phases, height) -> None:
    """A line where a phase begins, its name above it."""
    starts = [i for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    for start, end in zip(starts, [*starts[1:], len(phases)], strict=True):
        if start:
            axes.axvline(start, color=figures.INK, linewidth=0.8, linestyle=":")
        if (end - start) * 9 > len(phases):  # else the name would not fit
            axes.text((start + end) / 2, height * 0.985, phases[start], ha="center", va="top")


def recomputation(layers: int = 6) -> None:
    """What is kept when the forward pass ends: all, each layer's input, or each segment's."""
    sketch = figures.Sketch(8.4, 3.1)
    rows = (("keep all", 1, False), ("every layer\nrecomputed", 1, True),
            (f"segments of\n{layers // 2} layers", layers // 2, True))
    left, step = 1.35, 1.0
    for number, (text, size, recomputed) in enumerate(rows):
        y = 2.15 - number * 0.92
        sketch.text(0.05, y + 0.3, text, align="left", color="muted")
        for layer in range(layers):
            x = left + layer * step
            starts = layer % size == 0
            sketch.box(
                f"{number} in {layer}", " ", x=x, y=y, width=0.26, height=0.6,
                color="activations" if starts or not recomputed else "muted",
                fill=starts or not recomputed,
            )
            sketch.box(
                f"{number} {layer}", f"layer {layer}", x=x + 0.26, y=y, width=0.72, height=0.6,
                color="gold" if recomputed else "activations", fill=not recomputed, size=9.5,
            )
    x = left + layers * step + 0.02
    sketch.text(left + 0.13, 2.9, "input", align="center", size=9)
    sketch.text(left + 0.62, 2.9, "inside", align="center", size=9)
    for number, text in enumerate(("", "one layer\nat a time", "one segment\nat a time")):
        sketch.text(x, 2.45 - number * 0.92, text, color="gold", align="left", size=9)
    sketch.show()
