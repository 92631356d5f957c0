"""Drawings of lesson 12: the roofline, and how programs divide the elements of a tensor."""

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from utils.drawing import figures


def roofline(
    peak: float,
    bandwidth: float,
    points: dict[str, tuple[float, float]],
    *,
    other: tuple[str, float, float] | None = None,
    title: str = "",
    ax: Axes | None = None,
) -> None:
    """The FLOP/s that a machine can reach, over FLOPs per byte, and some work below this roof.

    peak        FLOP/s
    bandwidth   bytes/s
    points      {name: (FLOPs per byte, FLOP/s)}
    other       name, peak and bandwidth of a machine whose roof is drawn above, dashed

    Williams, Waterman, Patterson 2009, "Roofline", Communications of the ACM 52 (4).
    """
    axes = figures.figure("tall")[1] if ax is None else ax
    ridge = peak / bandwidth  # FLOPs per byte above which the peak is the limit
    xs = [x for x, _ in points.values()]
    left, right = min(*xs, ridge) / 3, max(*xs, ridge) * 12
    highest = peak
    if other:
        name, highest, rate = other
        right = max(right, 12 * highest / rate)
        axes.plot([left, highest / rate, right], [left * rate, highest, highest], "--",
                  color=figures.GREY)
        axes.text(highest / rate, highest * 1.35, name, color=figures.GREY, ha="center")
    axes.plot([left, ridge], [left * bandwidth, peak], color=figures.ORANGE)
    axes.plot([ridge, right], [peak, peak], color=figures.BLUE)
    above: list[tuple[float, float]] = []
    for name, (x, y) in points.items():
        axes.plot(x, y, "o", color=figures.INK)
        near = any(max(x / p, p / x) < 1.5 and max(y / q, q / y) < 1.5 for p, q in above)
        above.append((x, y))
        # not on the line, nor on a neighbour's name
        beside = figures.RIGHT | {"xytext": (7, -10 if near or y > peak / 2 else 0)}
        axes.annotate(name, (x, y), **beside, fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs per byte", ylabel="FLOP/s", title=title)
    lowest = min(left * bandwidth, *(y for _, y in points.values()))
    axes.set(xlim=(left, right), ylim=(lowest / 2, highest * 4))
    flops, rate = (
        EngFormatter(unit)(float(f"{value:.3g}"))
        for unit, value in (("FLOP/s", peak), ("B/s", bandwidth))
    )
    axes.text(ridge, peak * 1.35, f"the peak: {flops}", color=figures.BLUE)
    middle = (left * ridge) ** 0.5
    axes.text(middle, middle * bandwidth * 1.8, f"the memory:\n{rate}",
              color=figures.ORANGE, ha="right")
    axes.xaxis.set_major_formatter(lambda value, _: figures.number(value))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))  # 100G, 1T, 1P
    if ax is None:
        figures.show()


def blocks(n: int, block: int) -> None:
    """n elements divided among programs of `block` places each; places with a false mask are grey.

    Raises ValueError for fewer than one element or place.
    """
    if n < 1 or block < 1:
        raise ValueError(f"{n} elements in blocks of {block}: both must be at least 1")
    _, axes = figures.figure("strip")
    for place in range(-(-n // block) * block):
        program, inside = divmod(place, block)
        x = place + 0.5 * program  # a gap between programs
        color = f"rank {program}" if place < n else "pale"
        figures.block(axes, x, 0, 0.92, 1, color, place, ink="white" if place < n else "#23272E")
        axes.text(x + 0.46, -0.35, "true" if place < n else "false", ha="center", fontsize=9)
        if inside == 0:
            axes.text(x, 1.25, f"program {program}", color=figures.shade(f"rank {program}"))
    axes.text(-0.3, 0.5, "place", ha="right", va="center")
    axes.text(-0.3, -0.28, "mask", ha="right", va="center")
    axes.set(xlim=(-1.6, x + 1.2), ylim=(-0.7, 1.8))
    axes.axis("off")
    figures.show()
