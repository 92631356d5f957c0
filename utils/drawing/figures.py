"""The workshop's plots in one style: fixed sizes, colours by role, direct labels.

    from utils.drawing import figures

    figures.curves({"1 rank": (steps, loss), "4 ranks": (steps, loss4)}, x="step", y="loss")
    figures.bars({"compute": 3.1, "communication": 0.4}, unit="ms", title="one step")
    figures.prediction([("prediction", 10, "MB"), ("theory", 8, "MB"), ("measurement", 8.1, "MB")])

Every function draws and shows its own figure; given `ax=`, it draws there without showing, and
the caller ends with `figures.show()`. `Sketch` draws boxes and arrows; `block`, `lanes` and
`heat_map` are the building blocks of the lessons' drawings.
Sizes never depend on the data: the notebook test compares `<Figure size … >`.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

# The palette of Okabe and Ito (2008), which colour-blind readers can tell apart; its yellow is
# darkened to kintsugi gold to be visible on white.
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, AMBER, GOLD, INK = "#56B4E9", "#E69F00", "#A87900", "#23272E"
GREY, PALE = "#8A8F98", "#E9EBEE"

COLORS = {
    "rank0": BLUE, "rank1": ORANGE, "rank2": GREEN, "rank3": PINK,
    "rank4": SKY, "rank5": AMBER, "rank6": INK, "rank7": GREY,
    "prediction": GOLD, "theory": GREY, "measurement": BLUE,
    "compute": BLUE, "communication": ORANGE, "idle": PALE,
    "parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "activations": PINK, "data": SKY,
    "gold": GOLD, "ink": INK, "muted": GREY, "pale": PALE,
}
CYCLE = [BLUE, ORANGE, GREEN, PINK, SKY, AMBER, INK, GREY]
RIGHT = {"xytext": (5, 0), "textcoords": "offset points", "va": "center"}  # right of a point
SIZES = {"strip": (8.0, 1.9), "normal": (8.0, 3.6), "tall": (8.0, 5.0)}  # inches


def use() -> None:
    """Set the style of every matplotlib figure of this process. Importing this module calls it."""
    plt.rcParams.update({
        "figure.figsize": SIZES["normal"], "figure.dpi": 110, "figure.constrained_layout.use": True,
        "figure.facecolor": "white", "savefig.facecolor": "white", "font.size": 11,
        "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "axes.titlepad": 10, "axes.labelcolor": INK, "axes.edgecolor": GREY, "text.color": INK,
        "xtick.color": INK, "ytick.color": INK, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.color": PALE, "grid.linewidth": 0.8, "legend.frameon": False,
        "lines.linewidth": 2.0, "lines.markersize": 6,
        "axes.prop_cycle": matplotlib.cycler(color=CYCLE),
    })


def shade(name: str, index: int = 0) -> str:
    """The colour of a role, a rank (`rank 3`) or a colour name; otherwise `index` picks one."""
    key = str(name).replace(" ", "").lower()
    if key.startswith("rank") and key[4:].isdigit():
        return CYCLE[int(key[4:]) % len(CYCLE)]
    if key in COLORS:
        return COLORS[key]
    return name if matplotlib.colors.is_color_like(name) else CYCLE[index % len(CYCLE)]


def ink_on(color: str, bright: float = 0.6) -> str:
    """The text colour on `color`: white, or ink if the brightness of `color` is at least `bright`.

    bright: 0 (black) to 1 (white).
    """
    red, green, blue = matplotlib.colors.to_rgb(color)
    return "white" if 0.3 * red + 0.6 * green + 0.1 * blue < bright else INK


def figure(size: str = "normal", columns: int = 1) -> tuple[Figure, Any]:
    """A figure of a fixed size (`strip`, `normal`, `tall`) and its Axes (an array if several)."""
    if size not in SIZES:
        raise ValueError(f"figure size {size!r} is not one of {', '.join(SIZES)}")
    return plt.subplots(1, columns, figsize=SIZES[size])


def show() -> None:
    """Show the drawing; do nothing without a display (tests, scripts)."""
    if matplotlib.get_backend().lower() != "agg":
        plt.show()


def number(value: float) -> str:
    """A short label: 0.25, 1234, 12.3k, 874k, 3.2G; 1.2e-07 for tiny values."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / (1e3 if letter == 'k' else size):.3g}{letter}"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def curves(
    series: dict,
    *,
    x: str = "",
    y: str = "",
    title: str = "",
    colors: dict[str, str] | None = None,
    dashed: Collection[str] = (),
    markers: bool = False,
    log: str = "",
    ax: Axes | None = None,
) -> None:
    """Lines labelled at their right end.

    series: {name: (xs, ys)} or {name: ys}; colors: {name: role or colour};
    dashed: names drawn dashed; log: "", "x", "y" or "xy".
    """
    axes = figure()[1] if ax is None else ax
    axes.set_xscale("log" if "x" in log else "linear")
    axes.set_yscale("log" if "y" in log else "linear")
    ends, whole = [], True
    for index, (name, points) in enumerate(series.items()):
        xs, ys = points if isinstance(points, tuple) else (range(len(points)), points)
        whole = whole and all(float(value).is_integer() for value in xs)
        tint = shade((colors or {}).get(name, name), index)
        style = ("o" if markers else "") + ("--" if name in dashed else "-")
        axes.plot(list(xs), list(ys), style, color=tint)
        ends.append((name, list(xs)[-1], list(ys)[-1], tint))
    axes.set(xlabel=x, ylabel=y, title=title)
    if whole and "x" not in log:
        axes.xaxis.get_major_locator().set_params(integer=True)  # no step 2.5
    _plain_ticks(axes)
    if len(ends) > 1:
        _label_ends(axes, ends)
    if ax is None:
        show()


def _plain_ticks(axes) -> None:
    """Write 0.3, 2, 10k on logarithmic axes instead of powers of ten; call it after drawing."""
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_formatter(lambda value, _: number(value))
            if high < 20 * low:  # a short axis has too few powers of ten
                axis.set_minor_formatter(lambda value, _: number(value))


def _label_ends(axes, ends) -> None:
    """Write each curve's name to the right of its last point, moved apart where two would touch."""
    axes.margins(x=0.02)
    axes.figure.canvas.draw()  # the scale of the axes is known only after a layout
    height = axes.get_window_extent().height
    gap = 15 * axes.figure.dpi / 72 / height  # one line of text, as a fraction of the height
    place = {
        name: (axes.transData.transform((x, y))[1] - axes.get_window_extent().y0) / height
        for name, x, y, _ in ends
    }
    ordered = sorted(ends, key=lambda end: place[end[0]])
    below = -math.inf
    for rest, (name, _, _, tint) in zip(range(len(ends))[::-1], ordered, strict=True):
        below = max(min(place[name], 1 - rest * gap), below + gap)  # leave room for the rest above
        axes.text(1.01, below, name, color=tint, transform=axes.transAxes, va="center", fontsize=11)


def bars(
    values: dict[str, float | None],
    *,
    unit: str = "",
    title: str = "",
    colors: dict[str, str] | None = None,
    log: bool = False,
    ax: Axes | None = None,
) -> None:
    """Horizontal bars, the first on top, each with its value at the end.

    values: {name: value or None}; None leaves an empty row with a dash.
    """
    axes = figure("strip" if len(values) <= 3 else "normal")[1] if ax is None else ax
    names = list(values)
    heights = [values[name] or 0 for name in names]
    tints = [shade((colors or {}).get(name, name), index) for index, name in enumerate(names)]
    axes.barh(range(len(names)), heights, color=tints, height=0.62)
    if log:
        axes.set_xscale("log")
    for row, name in enumerate(names):
        text = "–" if values[name] is None else f"{number(values[name])} {unit}".rstrip()
        axes.annotate(text, (heights[row], row), **RIGHT)
    _name_rows(axes, names, title)
    if ax is None:
        show()


def _name_rows(axes, names, title) -> None:
    """Label rows of horizontal bars: names on the left, the first on top, room for values."""
    axes.set_yticks(range(len(names)), [str(name) for name in names])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.16)
    axes.set_title(title)


def prediction(
    rows: Sequence[tuple[str, float | None, str]], title: str = "", ax: Axes | None = None
) -> None:
    """Prediction · theory · measurement as three bars on one scale; None leaves a dash.

    rows: [(kind, value or None, unit)], kind one of prediction, theory, measurement.
    """
    values = {kind: value for kind, value, _ in rows}
    units = {unit for _, value, unit in rows if value is not None}
    if len(units) > 1:
        raise ValueError(f"one figure, one unit: got {', '.join(sorted(map(str, units)))}")
    axes = figure("strip")[1] if ax is None else ax
    bars(values, unit=units.pop() if units else "", title=title, ax=axes)
    if ax is None:
        show()


def stack(
    groups: dict[str, dict[str, float]],
    *,
    unit: str = "",
    title: str = "",
    colors: dict[str, str] | None = None,
    ax: Axes | None = None,
) -> None:
    """Stacked horizontal bars: {bar: {part: value}}; the legend below names each part once."""
    axes = figure("strip" if len(groups) <= 2 else "normal")[1] if ax is None else ax
    parts = list(dict.fromkeys(part for group in groups.values() for part in group))
    for row, group in enumerate(groups.values()):
        left = 0.0
        for part, value in group.items():
            tint = shade((colors or {}).get(part, part), parts.index(part))
            named = part in axes.get_legend_handles_labels()[1]
            axes.barh(row, value, 0.62, left, color=tint, edgecolor="white",
                      label=None if named else part)
            left += value
        axes.annotate(f"{number(left)} {unit}".rstrip(), (left, row), **RIGHT)
    _name_rows(axes, groups, title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, fontsize=10)
    if ax is None:
        show()


def power_law(
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    x: str = "",
    y: str = "",
    title: str = "",
    ax: Axes | None = None,
) -> tuple[float, float]:
    """Points on log–log axes and the straight line through them: y ≈ scale · x^(−exponent).

    Returns (scale, exponent), by least squares on the logarithms.
    """
    if len(xs) < 2 or min(xs) <= 0 or min(ys) <= 0:
        raise ValueError(
            f"a power law needs two or more positive points, got x = {list(xs)}, y = {list(ys)}"
        )
    slope, offset = (float(value) for value in np.polyfit(np.log(xs), np.log(ys), deg=1))
    scale = math.exp(offset)
    axes = figure()[1] if ax is None else ax
    ends = [min(xs) / 1.5, max(xs) * 1.5]
    axes.plot(ends, [scale * end**slope for end in ends], color=GOLD, linestyle="--", zorder=1)
    axes.plot(list(xs), list(ys), "o", color=BLUE, markersize=9)
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y, title=title)
    text = f"slope {slope:.2f}".replace("-", "−")
    axes.annotate(text, (ends[1], scale * ends[1] ** slope), color=GOLD, **RIGHT)
    axes.margins(x=0.12, y=0.2)
    _plain_ticks(axes)
    if ax is None:
        show()
    return scale, -slope


def block(
    axes: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    color: str,
    text: object = "",
    *,
    ink: str = "white",
    size: float | None = None,
    edge: str = "none",
    **look: Any,
) -> None:
    """A rectangle from (x, y) in the units of the axes, its text in the middle.

    color: a role, a rank or a colour, "none" for an outline; ink and size: of the text;
    look: further arguments of matplotlib's Rectangle.
    """
    face = color if color == "none" else shade(color)
    axes.add_patch(Rectangle((x, y), width, height, facecolor=face, edgecolor=edge, **look))
    if text != "":
        axes.text(
            x + width / 2, y + height / 2, text, color=ink, fontsize=size, ha="center", va="center"
        )


def lanes(axes: Axes, names: Collection, middle: float = 0.0) -> None:
    """One lane per name, the first on top, its name `middle` below its index; no grid lines."""
    axes.set_yticks([lane + middle for lane in range(len(names))], [str(name) for name in names])
    axes.set_ylim(len(names) + 2 * middle - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def heat_map(
    axes: Axes,
    rows: Sequence,
    columns: Sequence,
    cells: dict[tuple[int, int], tuple[str, float | None]],
) -> None:
    """A table as a picture, the names of its columns on top.

    cells: {(row index, column index): (text, strength)}; strength: how green the cell is, 0 to 1;
    None: grey text.
    """
    for (row, column), (text, strength) in cells.items():
        ink = GREY if strength is None else INK
        block(axes, column, row, 0.96, 0.92, GREEN, text, ink=ink, alpha=strength or 0.0)
    axes.set(xlim=(-0.02, len(columns)), ylim=(len(rows), -0.02))
    axes.set_xticks([column + 0.48 for column in range(len(columns))], columns)
    axes.set_yticks([row + 0.46 for row in range(len(rows))], rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


class Sketch:
    """Boxes and arrows on a page of `width` × `height` inches, the origin at the lower left.

    sketch = Sketch(8, 2)
    sketch.box("A", "rank 0", x=0.5, y=0.5, width=2, color="rank0")
    sketch.box("B", "rank 1", x=5.0, y=0.5, width=2, color="rank1")
    sketch.arrow("A", "B", "gradients")
    sketch.show()
    """

    def __init__(self, width: float, height: float, title: str = ""):
        self.figure = plt.figure(figsize=(width, height))
        self.axes = self.figure.add_axes((0, 0, 1, 1))  # one unit of the axes is one inch
        self.axes.set(xlim=(0, width), ylim=(0, height))
        self.axes.axis("off")
        self.figure.set_layout_engine("none")
        self.places = {}
        if title:
            self.text(0.05, height - 0.2, title, weight="bold", size=12, align="left")

    def box(
        self,
        name: str,
        text: str = "",
        *,
        x: float,
        y: float,
        width: float,
        height: float = 0.5,
        color: str = "pale",
        fill: bool = True,
        size: float = 10.5,
    ) -> None:
        """A rounded box with its lower left corner at (x, y); `fill=False`: outline only."""
        tint = shade(color)
        self.places[name] = (x, y, width, height)
        outline = FancyBboxPatch(
            (x + 0.04, y + 0.04), width - 0.08, height - 0.08, linewidth=1.5, edgecolor=tint,
            facecolor=tint if fill else "none",
            boxstyle="round,pad=0,rounding_size=0.06")
        self.axes.add_patch(outline)
        ink = ink_on(tint) if fill else INK
        self.text(x + width / 2, y + height / 2, text or name, color=ink, size=size)

    def arrow(
        self,
        start: str,
        end: str,
        text: str = "",
        *,
        color: str = "ink",
        both: bool = False,
        bend: float = 0.0,
    ) -> None:
        """An arrow from one box's edge to another's (both by name), the text beside its middle."""
        (x0, y0), (x1, y1) = self._edge(start, end), self._edge(end, start)
        look = {"arrowstyle": "<|-|>" if both else "-|>", "color": shade(color), "linewidth": 1.5,
                "shrinkA": 1, "shrinkB": 1, "connectionstyle": f"arc3,rad={bend}"}
        self.axes.annotate("", (x1, y1), (x0, y0), arrowprops=look)
        level = abs(y1 - y0) < abs(x1 - x0)
        middle = ((x0 + x1) / 2 + (0 if level else 0.08), (y0 + y1) / 2 + (0.13 if level else 0))
        self.text(*middle, text, color=color, align="center" if level else "left")

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        color: str = "ink",
        size: float = 10,
        align: str = "center",
        weight: str = "normal",
    ) -> None:
        """Free text at (x, y)."""
        self.axes.text(
            x, y, text, color=shade(color), fontsize=size, ha=align, va="center", weight=weight
        )

    def show(self) -> None:
        """Show the page."""
        show()

    def _edge(self, name, other):
        """Where the straight line from the centre of `name` to that of `other` leaves the box."""
        x, y, width, height = self.places[name]
        to_x, to_y, to_width, to_height = self.places[other]
        centre = (x + width / 2, y + height / 2)
        step = (to_x + to_width / 2 - centre[0], to_y + to_height / 2 - centre[1])
        reach = min(
            width / 2 / abs(step[0]) if step[0] else math.inf,
            height / 2 / abs(step[1]) if step[1] else math.inf,
        )
        return centre[0] + step[0] * min(reach, 1), centre[1] + step[1] * min(reach, 1)


use()
