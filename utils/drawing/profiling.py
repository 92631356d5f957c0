"""A report of utils.measure.findings as figures: where the time of each rank's mean step goes.

made = report("traces")
time_split(made)        # a bar for each rank, for a few ranks
rank_map(made)          # a heat map rank × kind, for many
"""

from utils.drawing import figures
from utils.measure.findings import Report
from utils.measure.traces import KINDS

TINTS = {"bubble": "gold", "host": "muted"}
FEW = 8  # ranks whose numbers fit into the cells of the map


def time_split(made: Report, *, title: str = "a step, rank by rank") -> None:
    """One bar of ms for each rank, made of the kinds that occur."""
    kinds = [kind for kind in KINDS if any(getattr(one, kind) for one in made.ranks)]
    bars = {f"rank {one.rank}": {k: getattr(one, k) for k in kinds} for one in made.ranks}
    figures.stack(bars, unit="ms", title=title, colors=TINTS)


def rank_map(made: Report, *, title: str = "") -> None:
    """A column for each rank, a row for each kind, and one for how long the others wait for it; the
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
    axes.set(title=title, xlabel="rank")
    axes.xaxis.set_label_position("top")
    figures.show()
