"""Drawings of lesson 09: a token's path through a mixture, an all-to-all, the loads of experts."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from utils.drawing import figures

EXPERTS = 4
WAYS = {0: (0.7, "0.7"), 2: (0.3, "0.3")}  # expert -> its weight for the token in the picture


def mixture() -> None:
    """One token in a layer of four experts: the router chooses two and their results are summed."""
    sketch = figures.Sketch(8, 3.4)
    sketch.box("token", "one token's\nvector x", x=0.1, y=1.4, width=1.3, height=0.7, color="data")
    sketch.box("router", "router\nsoftmax(W x)", x=2.0, y=1.4, width=1.4, height=0.7, color="gold")
    sketch.box("sum", "0.7 · E₀(x)\n+ 0.3 · E₂(x)", x=6.4, y=1.4, width=1.5, height=0.7)
    for expert in range(EXPERTS):
        y = 2.65 - 0.82 * expert
        used = expert in WAYS
        color = f"rank{expert}" if used else "muted"
        name = f"expert {expert}"
        sketch.box(name, f"expert {expert}: an MLP", x=4.2, y=y, width=1.7, color=color, fill=used)
        if used:
            sketch.arrow("router", name, color=color)
            sketch.arrow(name, "sum", color=color)
    sketch.arrow("token", "router")
    sketch.text(2.7, 2.75, "chosen: the k = 2 most\nlikely of E = 4", color="muted")
    sketch.text(2.7, 0.5, "the others compute\nnothing for this token", color="muted")
    sketch.show()


def sent(table: Sequence[Sequence[int]]) -> tuple[list, list]:
    """What an all-to-all moves, row by row: (before, after), each a list by rank of
    [(from, to), …] in the order of the rows on that rank.

    table   table[r][d]: rows that rank r has for rank d
    """
    ranks = range(len(table))
    before = [[(r, d) for d in ranks for _ in range(table[r][d])] for r in ranks]
    after = [[(r, d) for r in ranks for _ in range(table[r][d])] for d in ranks]
    return before, after


def exchange(table: Sequence[Sequence[int]]) -> None:
    """An uneven all-to-all: each rank's rows before and after, coloured by where they come from."""
    before, after = sent(table)
    _, panels = figures.figure(columns=2)
    widest = max(len(row) for row in before + after)
    titles = ("before: the number is where a row goes", "after: the colour is where it came from")
    for axes, rows, title in zip(panels, (before, after), titles, strict=True):
        for rank, row in enumerate(rows):
            axes.text(-0.2, rank + 0.4, f"rank {rank}", ha="right", va="center", fontsize=10)
            for place, (origin, goal) in enumerate(row):
                figures.block(axes, place, rank, 0.88, 0.8, f"rank{origin}", goal)
        axes.set(xlim=(-0.25 * widest, widest), ylim=(len(table), -0.2))
        axes.set_title(title, fontsize=11)
        axes.axis("off")
    figures.show()


def loads(
    counts: Sequence[int], capacity: float | None = None, title: str = "", ax: Axes | None = None
) -> None:
    """How often each expert was chosen; the line is the mean, choices above capacity are pale.

    counts: by expert; capacity: the most that an expert takes, or None
    """
    axes = figures.figure()[1] if ax is None else ax
    mean = sum(counts) / len(counts)
    kept = [count if capacity is None else min(count, capacity) for count in counts]
    places = range(len(counts))
    axes.bar(places, kept, 0.7, color=figures.BLUE)
    over = [place for place in places if counts[place] > kept[place]]
    axes.bar(over, [counts[place] - kept[place] for place in over], 0.7,
             [kept[place] for place in over],
             color=figures.PALE, edgecolor=figures.ORANGE, hatch="///")
    _level(axes, mean, "mean", figures.GREY, "--")
    if capacity is not None and abs(capacity - mean) > 0.05 * max(counts):
        _level(axes, capacity, "capacity", figures.ORANGE, "-")
    axes.set(xlabel="expert", ylabel="choices", title=title, xticks=list(places))
    axes.grid(axis="x", visible=False)
    if ax is None:
        figures.show()


def _level(axes, height, name, color, style) -> None:
    """A line across, with its name to the right of the axes."""
    axes.axhline(height, color=color, linestyle=style)
    axes.text(1.01, height, name, color=color, va="center", transform=axes.get_yaxis_transform())


def busiest(curves: dict[str, Sequence[float]], title: str = "") -> None:
    """The busiest expert's load over the mean load, step by step: {name: [ratio, …]}."""
    axes = figures.figure()[1]
    axes.axhline(1.0, color=figures.GREY, linestyle="--")
    axes.set_ylim(0.9, 1.05 * max(map(max, curves.values())))  # before names are put at the ends
    figures.curves(curves, x="step", y="busiest expert / mean", title=title, ax=axes)
    figures.show()
