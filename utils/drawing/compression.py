"""Drawings of lesson 15: values on a grid, channels, the cost of a variant, size against bits."""

from collections.abc import Sequence

import torch
from matplotlib.ticker import LogLocator

from utils.compression.evaluate import Cost
from utils.compression.quantize import Quantized
from utils.drawing import figures


def grids(
    numbers: torch.Tensor,
    ways: dict[str, Quantized],
    title: str = "",
    group: torch.Tensor | None = None,
) -> None:
    """Some values (on top), and the grid on which each way of rounding puts them.

    numbers (K,);   ways {name: the same values as a Quantized of one row}
    group   those of the values that the last way has, in its colour
    """
    _, axes = figures.figure()
    axes.plot(numbers, torch.zeros_like(numbers), "|", color=figures.INK, markersize=16)
    if group is not None:
        tint = figures.CYCLE[len(ways) - 1]
        axes.plot(group, torch.zeros_like(group), "|", color=tint, markersize=16, markeredgewidth=2)
    for row, q in enumerate(ways.values(), start=1):
        zero = 0.0 if q.zero_point is None else q.zero_point[0, 0]
        whole = torch.arange(q.scheme.lowest, q.scheme.highest + 1)
        places = (whole - zero) * q.scale[0, 0]
        tint = figures.CYCLE[row - 1]
        axes.plot(places, torch.full_like(places, row), "|", color=tint, markersize=9)
        used = q.dequantize()[0].unique()
        axes.plot(used, torch.full_like(used, row), "o", color=tint, markersize=5)
    figures.lanes(axes, ["the values", *ways])
    axes.set(xlabel="value", title=title)
    figures.show()


def channels(largest: dict[str, torch.Tensor], title: str = "") -> None:
    """The largest magnitude in each channel: {name: (K,)}, a panel per name, on one scale."""
    _, panels = figures.figure(columns=len(largest))
    top = max(values.max().item() for values in largest.values())
    for index, (axes, (name, values)) in enumerate(zip(panels, largest.items())):
        axes.vlines(range(len(values)), 0.1, values, color=figures.CYCLE[index], linewidth=1.2)
        axes.set(title=name, xlabel="channel", yscale="log", ylim=(0.1, 2 * top))
    panels[0].set_ylabel(title)
    figures.show()


def costs(found: dict[str, Cost], title: str = "", colors: Sequence[str] = ()) -> None:
    """Extra bits per byte over the original model, with intervals: {name: Cost}."""
    _, axes = figures.figure("tall" if len(found) > 6 else "normal")
    for row, one in enumerate(found.values()):
        tint = colors[row] if colors else figures.BLUE
        axes.plot([one.low, one.high], [row, row], color=tint)
        axes.plot(one.mean, row, "o", color=tint)
        text = f"{one.mean:+.2f}" if abs(one.mean) >= 0.01 else f"{round(one.mean, 4) + 0.0:+.4f}"
        beside = {**figures.RIGHT, "xytext": (8, 0)}
        axes.annotate(text, (max(one.high, one.mean), row), **beside, fontsize=10)
    figures.lanes(axes, found)
    axes.axvline(0, color=figures.GREY, linewidth=1)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set(xlabel="extra bits per byte (linear to 0.01, then logarithmic)", title=title)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.15)
    figures.show()


def frontier(
    points: dict[str, dict[str, tuple[float, float]]], title: str = "", x: str = "MB"
) -> None:
    """Bits per byte over size: {model: {variant: (size, bits per byte)}}, a line per model."""
    _, axes = figures.figure("tall")
    for index, (model, variants) in enumerate(points.items()):
        xs, ys = zip(*sorted(variants.values()))
        axes.plot(xs, ys, "o-", color=figures.CYCLE[index], label=model)
        for name, (size, bits) in variants.items():
            axes.annotate(name, (size, bits), fontsize=9, xytext=(5, 5),
                          textcoords="offset points")
    axes.set(xscale="log", xlabel=x, ylabel="bits per byte", title=title)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: figures.number(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    axes.margins(x=0.12, y=0.1)
    axes.legend()
    figures.show()
