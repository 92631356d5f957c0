"""A report of utils.measure.findings as figures: where the time of each rank's mean step goes.

made = report("traces")
time_split(made)        # a bar per rank, for a few ranks
rank_map(made)          # a heat map rank × kind, for many

And how busy one rank was from moment to moment of one step: busy(traces.busy(trace), ms).
"""

from collections.abc import Mapping, Sequence

import numpy as np

from utils.drawing import figures
from utils.measure.findings import Report
from utils.measure.traces import KINDS

TINTS = {"bubble": "gold", "host": "muted"}
FEW = 8  # up to this many ranks, the values fit into the cells of the map


def time_split(made: Report, *, title: str = "a step, rank by rank") -> None:
    """One bar per rank, in ms, stacked from the kinds that occur."""
    kinds = [kind for kind in KINDS if any(getattr(one, kind) for one in made.ranks)]
    bars = {f"rank {one.rank}": {k: getattr(one, k) for k in kinds} for one in made.ranks}
    figures.stack(bars, unit="ms", title=title, colors=TINTS)


def rank_map(made: Report, *, title: str = "") -> None:
    """A column per rank, a row per kind, and a row for how long the others wait for the rank; the
    greener a cell, the more of a mean step it takes."""
    ranks, rows = made.ranks, [*KINDS, "others wait"]
    few = len(ranks) <= FEW
    cells = {}
    for column, one in enumerate(ranks):
        numbers = [*(getattr(one, kind) for kind in KINDS), made.late[one.rank]]
        for row, ms in enumerate(numbers):
            text = f"{figures.number(ms)} ms" if few else ""
            cells[row, column] = text, min(1.0, ms / made.step_ms)
    every = 1 if few else max(1, len(ranks) // 8)
    names = [str(one.rank) if column % every == 0 else "" for column, one in enumerate(ranks)]
    _, axes = figures.figure("normal")
    figures.heat_map(axes, rows, names, cells)
    axes.set(title=title, xlabel=f"rank (empty: 0 ms; full green: {made.step_ms:.0f} ms, the step)")
    axes.xaxis.set_label_position("top")
    figures.show()


def busy(
    shares: Mapping[str, Sequence[float]],
    ms: float,
    *,
    notes: Sequence[tuple[float, str, str]] = (),
    title: str = "",
) -> None:
    """A step of `ms` on one rank: a lane per kind, its height the fraction of each moment.

    shares: {"compute" …: (bins,) shares, 0 to 1} of `utils.measure.traces.busy`. notes: (ms, kind,
    text), from left to right, each with an arrow to that moment of the kind's lane.
    """
    _, axes = figures.figure("normal")
    kinds = list(shares)
    figures.lanes(axes, kinds, 0.4)
    for row, (kind, share) in enumerate(shares.items()):
        top, edges = row + 0.8 - 0.8 * np.asarray(share), np.linspace(0, ms, len(share) + 1)
        axes.stairs(top, edges, baseline=row + 0.8, fill=True, color=figures.shade(kind))
    for number, (moment, kind, text) in enumerate(notes):
        side, corner = ("left", 0) if moment < 0.6 * ms else ("right", 1)
        arrow = {"arrowstyle": "->", "color": figures.INK, "relpos": (corner, 0)}
        place = moment, -0.4 * (len(notes) - number)
        axes.annotate(text, (moment, kinds.index(kind) + 0.4), place, fontsize=10, ha=side,
                      arrowprops=arrow)
    axes.set(xlim=(0, ms), ylim=(len(kinds) - 0.1, -0.4 * len(notes) - 0.3), title=title)
    axes.set_xlabel("ms since the step began; a lane's height: fraction of the time")
    figures.show()
