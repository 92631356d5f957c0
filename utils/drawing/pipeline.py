"""Drawings of lesson 08: the stages, and what each rank does when, simulated or from event logs.

    rows = of_simulation(simulate(schedule("1f1b", 4, 8)))   # what should happen
    rows = of_events(ranks.run(…))                           # what did happen, in seconds
    timeline(rows, title="1F1B")
    ideal_and_real("1F1B", ideal, real)                      # both, and the memory below

A row is a rank's list of (kind, micro-batch, chunk, begin, end).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from utils.drawing import figures

if TYPE_CHECKING:
    from utils.parallel.schedules import Simulation

TINTS = {"F": figures.BLUE, "B": figures.ORANGE, "W": figures.GREEN}
WORDS = {"F": "forward", "B": "backward", "W": "weight gradients"}
RANKS = (figures.PINK, figures.SKY, figures.GOLD, figures.INK)  # not the colour of an action


# ---- rows


def of_simulation(simulation: "Simulation") -> list[list[tuple]]:
    """Rows of a `schedules.Simulation`, in its unit of time."""
    return [[(*action, begin, end) for action, begin, end in order] for order in simulation.times]


def of_events(logs: Sequence[Sequence[tuple]], unit: float = 1.0) -> list[list[tuple]]:
    """Rows of every rank's `Pipeline.events`, from the first one's start, without the waiting.

    unit  seconds per unit of the drawing
    """
    start = min(begin for events in logs for *_, begin, _ in events)
    return [
        [
            (kind, number, chunk, (begin - start) / unit, (end - start) / unit)
            for kind, number, chunk, begin, end in events
            if kind != "wait"
        ]
        for events in logs
    ]


def bubble(rows: Sequence[Sequence[tuple]]) -> float:
    """The fraction of the time from first to last action that the average rank is idle, 0 to 1."""
    busy = sum(end - begin for row in rows for *_, begin, end in row)
    first = min(begin for row in rows for *_, begin, _ in row)
    last = max(end for row in rows for *_, end in row)
    return 1 - busy / (len(rows) * (last - first))


def kept(row: Sequence[tuple]) -> tuple[list[float], list[float]]:
    """(moments, micro-batches whose activations a rank keeps from then on), chunks as fractions.

    They are kept from the start of F to the end of B, or of W if there is one.
    """
    chunks = 1 + max(chunk for _, _, chunk, _, _ in row)
    last = "W" if any(kind == "W" for kind, *_ in row) else "B"
    changes = [(begin, 1 / chunks) for kind, _, _, begin, _ in row if kind == "F"]
    changes += [(end, -1 / chunks) for kind, *_, end in row if kind == last]
    moments, amounts = [0.0], [0.0]
    for moment, change in sorted(changes):
        if moment == moments[-1]:
            amounts[-1] += change
        else:
            moments.append(moment)
            amounts.append(amounts[-1] + change)
    return moments, amounts


# ---- pictures


def stages(layers: Sequence[Sequence[int]], ranks: int | None = None) -> None:
    """A model's layers split into stages: which rank holds which, and what passes between them.

    layers  the layer numbers of each global stage
    ranks   fewer than stages if a rank holds several (stage s is on rank s mod ranks)
    """
    ranks = ranks or len(layers)
    sketch = figures.Sketch(8, 2.5)
    width, gap, size = 7.9 / len(layers), 0.45, 10.5
    if len(layers) > 4:
        gap, size = 0.22, 8
    for number, part in enumerate(layers):
        x, last = 0.05 + number * width, number == len(layers) - 1
        names = [f"layers {part[0]}–{part[-1]}" if len(part) > 1 else f"layer {part[0]}"]
        names = ["embedding"] * (number == 0) + names + ["norm, head"] * last
        color = RANKS[number % ranks % len(RANKS)]
        sketch.box(
            f"stage {number}", "\n".join(names), x=x, y=0.95, width=width - gap, height=0.9,
            color=color, size=size,
        )
        middle = x + (width - gap) / 2
        sketch.text(middle, 2.05, f"stage {number}", weight="bold")
        sketch.text(middle, 0.72, f"rank {number % ranks}", color=color)
        if number:
            before, here = sketch.places[f"stage {number - 1}"], sketch.places[f"stage {number}"]
            way = (before[0] + before[2], here[0])
            for y, ends, tint in ((1.58, way, figures.BLUE), (1.22, way[::-1], figures.ORANGE)):
                look = {"arrowstyle": "-|>", "color": tint, "linewidth": 1.6}
                sketch.axes.annotate("", (ends[1], y), (ends[0], y), arrowprops=look)
    sketch.text(0.1, 0.35, "→ hidden states (B, T, C) in the forward pass", color=figures.BLUE,
                align="left")
    sketch.text(0.1, 0.12, "← their gradients, equally large, in the backward pass",
                color=figures.ORANGE, align="left")
    sketch.show()


def timeline(
    rows: Sequence[Sequence[tuple]],
    *,
    title: str = "",
    unit: str = "",
    ax: Axes | None = None,
    end: float | None = None,
) -> None:
    """What each rank does when: a row per rank, a box per action with its micro-batch.

    Paler boxes are a rank's later chunks. end: where the axis ends (None: with the last action).
    """
    axes = figures.figure("strip")[1] if ax is None else ax
    last = max(stop for row in rows for *_, stop in row)
    end = end or last
    kinds = [kind for kind in WORDS if any(kind == action[0] for row in rows for action in row)]
    chunks = 1 + max(action[2] for row in rows for action in row)
    wide = axes.figure.get_size_inches()[0] / end  # inches per unit of time
    for rank, row in enumerate(rows):
        figures.block(axes, 0, rank, last, 0.86, "pale")
        for kind, number, chunk, begin, stop in row:
            fits = (stop - begin) * wide > 0.11 * len(str(number))
            figures.block(
                axes, begin, rank, stop - begin, 0.86, TINTS[kind], number if fits else "",
                size=7.5, edge="white", linewidth=0.6,
                alpha=1 - 0.5 * chunk / max(1, chunks - 1),
            )
    figures.lanes(axes, [f"rank {rank}" for rank in range(len(rows))], middle=0.43)
    axes.set(xlim=(0, end * 1.01), ylim=(len(rows), -0.15), xlabel=unit)
    axes.grid(visible=False)
    axes.set_title(title)
    if ax is None:
        _legend(axes, kinds)
        figures.show()


def timelines(panels: dict, *, unit: str = "", title: str = "") -> None:
    """Several timelines below each other on one scale of time: {title: rows}."""
    height = 0.75 + 1.15 * len(panels)
    page, places = figures.plt.subplots(len(panels), 1, figsize=(8.0, height), squeeze=False)
    end = max(stop for rows in panels.values() for row in rows for *_, stop in row)
    for axes, (name, rows) in zip(places[:, 0], panels.items(), strict=True):
        timeline(rows, title=f"{name}: bubble {bubble(rows):.0%}", ax=axes, end=end)
        axes.tick_params(axis="x", labelbottom=axes is places[-1, 0])
    places[-1, 0].set_xlabel(unit)
    everything = [action[0] for rows in panels.values() for row in rows for action in row]
    _legend(places[0, 0], [kind for kind in WORDS if kind in everything])
    if title:
        page.suptitle(title)
    figures.show()


def ideal_and_real(
    name: str, ideal: Sequence[Sequence[tuple]], real: Sequence[Sequence[tuple]], unit: str = ""
) -> None:
    """A schedule as simulated and as it ran, and the micro-batches kept on every rank."""
    _, places = figures.plt.subplots(
        3, 1, figsize=figures.SIZES["tall"], sharex=True, height_ratios=(1, 1, 1)
    )
    end = max(stop for rows in (ideal, real) for row in rows for *_, stop in row)
    for axes, rows, word in zip(places, (ideal, real), ("simulated", "real clocks"), strict=False):
        timeline(rows, title=f"{name}, {word}: bubble {bubble(rows):.0%}", ax=axes, end=end)
    for rank, row in enumerate(real):
        moments, amounts = kept(row)
        places[2].step([*moments, end], [*amounts, amounts[-1]], where="post", lw=1.4,
                       color=RANKS[rank % len(RANKS)], label=f"rank {rank}")
    top = 1.5 * max(max(kept(row)[1]) for row in real)  # room for the names
    places[2].set(xlabel=unit, ylabel="micro-batches", ylim=(0, top))
    places[2].set_title("activations kept, in micro-batches (real clocks)")
    places[2].legend(loc="upper right", ncols=len(real), fontsize=9)
    _legend(places[0], [kind for kind in WORDS if any(kind == a[0] for row in real for a in row)])
    figures.show()


def _legend(axes, kinds) -> None:
    handles = [Patch(color=TINTS[kind], label=WORDS[kind]) for kind in kinds]
    handles.append(Patch(color=figures.PALE, label="bubble"))
    axes.figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)
