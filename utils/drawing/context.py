"""Drawings of lesson 07: queries and their keys, a ring's turns and clocks, splits of a sequence.

    who_looks({"neighbours": positions(16, 4, False), "early and late": positions(16, 4)})
    turns(positions(16, 4))
    clocks({"neighbours": logs, "early and late": others})      # logs: one per rank
    layer()
    ways({"title": {"ring": (ranks, bytes), …}}, counted)

In all of them, colour is the rank.
"""

from collections.abc import Sequence

from matplotlib.patches import Patch

from utils.drawing import figures
from utils.parallel.context.positions import Ranges, products

Log = Sequence[tuple[str, float, float]]  # of utils.measure.timing.watched, turn by turn


def who_looks(cuts: dict[str, tuple[Ranges, ...]]) -> None:
    """Queries from top to bottom, the keys they attend to from left to right; colour is the rank.

    cuts: {title: positions of each rank}. The labels have each rank's percentage of all products.
    """
    _, panels = figures.figure("normal", columns=len(cuts))
    for axes, (title, places) in zip(panels, cuts.items(), strict=True):
        work = [len(looks(places, rank)) for rank in range(len(places))]
        for rank in range(len(places)):
            _cells(axes, looks(places, rank), f"rank{rank}")
        _square(axes, places, title)
        _name_ranks(axes, places, [f": {count / sum(work):.0%}" for count in work], size=10)
    figures.show()


def looks(places: tuple[Ranges, ...], rank: int, other: int | None = None) -> list[tuple[int, int]]:
    """(query, key) of every product that `rank` computes; other: with that rank's keys only."""
    own = _flat(places[rank])
    return [
        (own[row], keys[column])
        for there, place in enumerate(places)
        if other in (None, there)
        for keys in [_flat(place)]
        for rows, columns, causal in products(places[rank], place)
        for row in range(rows.start, rows.stop)
        for column in range(columns.start, columns.stop)
        if not causal or own[row] >= keys[column]
    ]


def turns(places: tuple[Ranges, ...]) -> None:
    """What each rank computes in each turn of the ring; pale: other turns."""
    count = len(places)
    _, panels = figures.plt.subplots(1, count, figsize=figures.SIZES["strip"])
    for turn, axes in enumerate(panels):
        for rank in range(count):
            _cells(axes, looks(places, rank), "pale")
        for rank in range(count):
            _cells(axes, looks(places, rank, (rank - turn) % count), f"rank{rank}")
        _square(axes, places, f"turn {turn}")
    _name_ranks(panels[0], places, [""] * count, size=8)
    figures.show()


def clocks(panels: dict[str, Sequence[Log]], *, unit: str = "s") -> None:
    """Real logs of rings: when each rank computes, and in grey when it waits.

    panels: {title: the log of each rank}, all on one clock. The number in a bar is the rank whose
    keys it computes with: in turn t those of rank r − t.
    """
    _, axes = figures.plt.subplots(len(panels), 1, figsize=figures.SIZES["normal"], sharex=True)
    end = max(span(logs) for logs in panels.values())
    for place, (title, logs) in zip(axes, panels.items(), strict=True):
        start = min(begin for log in logs for _, begin, _ in log)
        for rank, log in enumerate(logs):
            figures.block(place, 0, rank, span(logs), 0.86, "pale")
            turns = [(begin, stop) for what, begin, stop in log if what == "work"]
            for turn, (begin, stop) in enumerate(turns):
                if stop - begin > end / 100:
                    figures.block(place, begin - start, rank, stop - begin, 0.86, f"rank{rank}",
                                  (rank - turn) % len(logs), size=8, edge="white",
                                  linewidth=0.6)
        figures.lanes(place, [f"rank {rank}" for rank in range(len(logs))], middle=0.43)
        place.set(xlim=(0, end * 1.02), ylim=(len(logs), -0.15))
        place.grid(visible=False)
        place.set_title(title)
    axes[-1].set_xlabel(unit)
    figures.show()


def span(logs: Sequence[Log]) -> float:
    """Seconds from the first rank's start to the last one's end."""
    ends = [end for log in logs for _, _, end in log]
    return max(ends) - min(begin for log in logs for _, begin, _ in log)


def layer() -> None:
    """One layer, left to right: what each rank has under three splits; numbers are ranks."""
    cuts = (("sequence parallel: 2 ranks of tensor parallelism", 1, 2),
            ("context parallel: 2 ranks", 2, 1),
            ("both: 2 × 2 ranks", 2, 2))
    parts = (("norm", 1.0), ("attention", 1.9), ("add, norm", 1.2), ("MLP", 1.9), ("add", 0.9))
    _, panels = figures.plt.subplots(len(cuts), 1, figsize=figures.SIZES["tall"])
    for axes, (title, cp, tp) in zip(panels, cuts, strict=True):
        left = 0.0
        for number, (name, width) in enumerate(parts):
            _part(axes, left, width, cp, tp, inside=name in ("attention", "MLP"))
            axes.text(left + width / 2, -0.36, name, ha="center", va="center", fontsize=10)
            if name == "attention" and cp > 1:
                for t in range(tp):
                    middle = left + width * (t + 0.5) / tp
                    axes.annotate("", (middle, 0.5), (middle, 1.5), arrowprops={
                        "arrowstyle": "<|-|>", "color": "white", "linewidth": 2})
                axes.text(left + width / 2, 2.16, "keys, values", ha="center", fontsize=9,
                          color=figures.GOLD)
            left += width
            if number < len(parts) - 1:
                if tp > 1:
                    _border(axes, left, ("all-gather", "reduce-scatter")[number % 2])
                left += 0.75
        axes.set(xlim=(-0.1, left + 0.4), ylim=(-0.65, 2.5))
        axes.set_title(title, fontsize=11)
        axes.axis("off")
    figures.show()


def _part(axes, left, width, cp, tp, inside):
    """A box: positions from top to bottom, heads or columns from left to right."""
    for c in range(cp):
        for t in range(tp):
            tint = figures.shade(f"rank{c * tp + t}")
            if inside:  # all of the positions of c, some of the heads or columns
                place = (left + t * width / tp, 2 - 2 * (c + 1) / cp, width / tp, 2 / cp)
            else:
                place = (left, 2 - 2 * (c * tp + t + 1) / (cp * tp), width, 2 / (cp * tp))
            figures.block(axes, *place, tint, edge="white", linewidth=1.2)
            axes.text(place[0] + 0.1, place[1] + place[3] / 2, c * tp + t, color="white",
                      fontsize=8, va="center")


def _border(axes, left, text):
    axes.text(left + 0.375, 2.16, text, ha="center", fontsize=9, color=figures.GOLD)
    axes.annotate("", (left + 0.68, 1.0), (left + 0.07, 1.0),
                  arrowprops={"arrowstyle": "-|>", "color": figures.GOLD})


def ways(
    formulas: dict[str, dict[str, tuple[Sequence[int], Sequence[float]]]],
    counted: dict[str, dict[str, tuple[Sequence[int], Sequence[float]]]],
    *,
    y: str,
) -> None:
    """Traffic by number of ranks: lines are formulas, dots are counts.

    formulas, counted: {title of a panel: {way: (ranks, amounts)}}
    """
    _, panels = figures.plt.subplots(
        1, len(formulas), figsize=figures.SIZES["normal"], sharey=True)
    tints = dict(zip(next(iter(formulas.values())), ("rank0", "rank1", "rank2")))
    for axes, (title, lines) in zip(panels, formulas.items(), strict=True):
        for way, (ranks, amounts) in lines.items():
            axes.plot(ranks, amounts, color=figures.shade(tints[way]), label=way)
        for way, (ranks, amounts) in counted.get(title, {}).items():
            axes.plot(ranks, amounts, "o", color=figures.shade(tints[way]), markersize=7)
        axes.set(xscale="log", xlabel="ranks", title=title)
        ticks = sorted({n for ranks, _ in lines.values() for n in ranks})
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel(y)
    panels[-1].legend(handles=[Patch(color=figures.shade(tint), label=way.capitalize())
                               for way, tint in tints.items()], fontsize=10)
    figures.show()


def _cells(axes, cells, color):
    for query, key in cells:
        figures.block(axes, key + 0.04, query + 0.04, 0.92, 0.92, color)


def _name_ranks(axes, places, words, size):
    """Each rank's name in its colour, followed by `words`, where no query attends to a key."""
    for rank, word in enumerate(words):
        axes.text(_length(places), _length(places) * (0.04 + 0.09 * rank) * size / 8,
                  f"rank {rank}{word}", color=figures.shade(f"rank{rank}"), ha="right",
                  va="center", size=size, weight="bold")


def _square(axes, places, title):
    """Axes with queries from top to bottom and keys from left to right, without ticks."""
    length = _length(places)
    axes.set(xlim=(-0.2, length + 0.2), ylim=(length + 0.2, -0.2), aspect="equal", title=title)
    axes.set(xlabel="keys", ylabel="queries", xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


def _flat(ranges):
    return [position for one in ranges for position in one]


def _length(places):
    return max(one.stop for ranges in places for one in ranges)
