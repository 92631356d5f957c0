"""Drawings of ranks: what each one holds, and what moves where."""

from utils.drawing import figures

# What each rank holds before and after, chunk by chunk: the number of the source rank,
# "sum" for the sum over all ranks, None for nothing.
RANKS = range(4)
OWN = [[rank] * 4 for rank in RANKS]
SUMS = [["sum"] * 4 for _ in RANKS]
ONE_SUM = [["sum" if chunk == rank else None for chunk in RANKS] for rank in RANKS]
PARTS = [[rank if chunk == rank else None for chunk in RANKS] for rank in RANKS]
COLLECTIVES = {
    "broadcast": ([[0] * 4] + [[None] * 4] * 3, [[0] * 4] * 4),
    "all-reduce": (OWN, SUMS),
    "reduce-scatter": (OWN, ONE_SUM),
    "all-gather": (PARTS, [list(RANKS)] * 4),
}


def data_parallel(ranks: int = 4) -> None:
    """One training step on `ranks` ranks: own rows, the same model, summed gradients."""
    sketch = figures.Sketch(8, 3.3)
    width, left = 1.6, 1.2
    for y, text in (
        (2.72, "the global\nbatch"),
        (1.88, "the model"),
        (1.04, "gradient\nof own rows"),
    ):
        sketch.text(0.1, y + 0.2, text, align="left", color="muted")
    for rank in range(ranks):
        x = left + rank * (width + 0.08)
        sketch.box(
            f"data {rank}", f"rows of rank {rank}", x=x, y=2.72, width=width, color=f"rank{rank}"
        )
        sketch.box(f"model {rank}", "same copy", x=x, y=1.88, width=width)
        sketch.box(f"gradient {rank}", "partial", x=x, y=1.04, width=width, color=f"rank{rank}")
        sketch.arrow(f"data {rank}", f"model {rank}")
        sketch.arrow(f"model {rank}", f"gradient {rank}")
    total = ranks * (width + 0.08) - 0.08
    text = "all-reduce: every rank gets the sum and takes the same step"
    sketch.box("sum", text, x=left, y=0.12, width=total, color="gold")
    for rank in range(ranks):
        x = left + rank * (width + 0.08)
        sketch.places[f"sum {rank}"] = (x, 0.12, width, 0.5)
        sketch.arrow(f"gradient {rank}", f"sum {rank}", both=True)
    sketch.show()


def collectives() -> None:
    """Four ranks with four chunks each: what they hold before and after each collective."""
    _, panels = figures.plt.subplots(2, 2, figsize=(8, 4.2))
    for axes, (name, (before, after)) in zip(panels.flat, COLLECTIVES.items(), strict=True):
        _chunks(axes, before, left=0)
        _chunks(axes, after, left=6)
        axes.annotate("", (5.7, 1.9), (4.3, 1.9), arrowprops={"arrowstyle": "-|>", "lw": 1.5})
        axes.set(xlim=(-1.9, 10.1), ylim=(4.1, -0.8), title=name, aspect="equal")
        axes.axis("off")
    figures.show()


def _chunks(axes, rows, left: float) -> None:
    """One row of chunks per rank, coloured by the rank that a chunk comes from."""
    for rank, row in enumerate(rows):
        if left == 0:
            axes.text(-0.2, rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=10)
        for chunk, origin in enumerate(row):
            tint = figures.shade("gold" if origin == "sum" else f"rank{origin}")
            face, edge = (tint, tint) if origin is not None else ("none", figures.GREY)
            text = {"sum": "Σ", None: ""}.get(origin, origin)
            figures.block(axes, left + chunk, rank, 0.86, 0.8, face, text, edge=edge)


def ring(ranks: int = 4) -> None:
    """An all-reduce on a ring, round by round: how many ranks' values each chunk sums."""
    _, panels = figures.plt.subplots(2, ranks, figsize=(8, 3.6))
    held = [[1] * ranks for _ in range(ranks)]
    _round(panels[0][0], held, "own values", arrived=[])
    panels[1][0].axis("off")
    for number in range(1, 2 * ranks - 1):
        gathering, before = number >= ranks, [list(row) for row in held]
        arrived = []
        for rank in range(ranks):
            chunk, neighbour = (rank - number + 1) % ranks, (rank + 1) % ranks
            held[neighbour][chunk] = before[rank][chunk] + (not gathering)
            arrived.append((neighbour, chunk))
        half = "all-gather" if gathering else "reduce-scatter"
        panel = panels[int(gathering)][number - gathering * (ranks - 1)]
        _round(panel, held, f"{half}, {number - gathering * (ranks - 1)}", arrived)
    figures.show()


def _round(axes, held, title: str, arrived) -> None:
    """What each rank (a row) holds of each chunk (a column) after a round."""
    whole = len(held)
    for rank, row in enumerate(held):
        axes.text(-0.2, rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=9)
        for chunk, summands in enumerate(row):
            tint, strength = ("gold", 1.0) if summands == whole else ("muted", summands / whole / 2)
            ink = "white" if summands == whole else figures.INK
            place = axes, chunk, rank, 0.84, 0.78
            figures.block(*place, tint, summands, ink=ink, alpha=strength)
            if (rank, chunk) in arrived:
                figures.block(*place, "none", edge=figures.INK, linewidth=2)
    axes.set(xlim=(-1.6, whole), ylim=(whole, -0.3), aspect="equal")
    axes.set_title(title, fontsize=10)
    axes.axis("off")
