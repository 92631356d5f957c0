"""Drawings of runs that fail: where their time goes, and how often they should save."""

import math
from collections.abc import Iterable, Sequence

from matplotlib.ticker import LogLocator, NullLocator

from utils.drawing import figures
from utils.planner.failures import KINDS, daly, stretch, young

TINTS = dict(zip(KINDS, ("compute", "gold", "communication", "muted")))


def lives(runs: dict[str, Iterable[tuple[str, float]]], *, unit: str, title: str = "") -> None:
    """A lane per run with its `spans` (kind, time) in order; a cross where a failure strikes."""
    _, axes = figures.figure("normal")
    for lane, spans in enumerate(runs.values()):
        now = 0.0
        for kind, length in spans:
            named = kind in axes.get_legend_handles_labels()[1]
            label = None if named else kind
            tint, edge = figures.shade(TINTS[kind]), 0.4 * (kind == "saving")  # less than a pixel
            axes.barh(lane, length, 0.5, now, color=tint, label=label, snap=False, ec=tint, lw=edge)
            now += length
            if kind == "lost":
                axes.plot(now, lane - 0.37, "x", color=figures.INK, markersize=7, mew=2)
    figures.lanes(axes, runs)
    axes.set(xlabel=unit, title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=4, fontsize=10)
    figures.show()


def intervals(
    save: float,
    restart: float,
    between: float,
    points: dict[str, Sequence[tuple[float, float]]],
    *,
    unit: tuple[str, float] = ("s", 1.0),
    title: str = "",
    band: Sequence[tuple[float, float, float]] = (),
) -> None:
    """How much longer a run takes, in %, by the time between two checkpoints.

    points: {label: [(interval in seconds, stretch)]}, drawn over the formula's curve;
    unit: of the axis, and its seconds; band: (interval, lowest, highest stretch) of nine in ten
    simulated runs. With a band, the formula assumes what they do: failures only while computing.
    """
    _, axes = figures.figure("normal")
    name, seconds = unit
    best = daly(save, between)
    xs = [best * 2 ** (power / 8) for power in range(-32, 33)]
    if band:
        xs = [x for x, _, _ in band]
        ys = [100 * ((save + (between + restart) * math.expm1(x / between)) / x - 1) for x in xs]
    else:
        ys = [100 * (stretch(x, save, restart, between) - 1) for x in xs]
    least = min(ys)
    shown = [(x / seconds, y) for x, y in zip(xs, ys) if math.isfinite(y) and y < 12 * least]
    axes.plot(*zip(*shown), color=figures.shade("theory"), label="formula", zorder=1)
    if band:
        at = [[x / seconds, 100 * (low - 1), 100 * (high - 1)] for x, low, high in band]
        tint = figures.shade("theory")
        axes.fill_between(*zip(*at), color=tint, alpha=0.2, lw=0, label="nine of ten simulated")
    for index, (label, pairs) in enumerate(points.items()):
        at = [(x / seconds, 100 * (y - 1)) for x, y in pairs]
        axes.plot(*zip(*at), "os"[index % 2], color=figures.CYCLE[index], label=label)
    for label, value, side in (
        ("Young", young(save, between), "left"),
        ("Daly", best, "right"),
    ):
        axes.axvline(value / seconds, color=figures.GOLD, linestyle="--", linewidth=1, zorder=0)
        place = (value / seconds, 0.96)
        high = axes.get_xaxis_transform()  # x of the data, y of the axes
        axes.text(*place, f" {label} ", color=figures.GOLD, ha=side, transform=high, fontsize=10)
    axes.set(xscale="log", xlabel=f"{name} of computing between two checkpoints", title=title)
    axes.set_ylabel("% longer than without faults")
    axes.xaxis.set_major_locator(LogLocator(2))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: figures.number(value))
    axes.legend(loc="upper left", bbox_to_anchor=(0.08, 1), fontsize=10)
    figures.show()
