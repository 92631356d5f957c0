"""Drawings of number formats: their bits, ranges and losses, and a loss scale.

They share the style of `utils.drawing.figures`; sizes never depend on the data.
"""

import math

import numpy as np
import torch
from matplotlib.axes import Axes

from utils.drawing import figures
from utils.memory.number_formats import FORMATS, Format, round_to, split_bits

SIGN, EXPONENT, MANTISSA = "ink", "rank1", "rank0"  # colours of the three fields
LOST, POOR = figures.ORANGE, figures.AMBER  # becomes zero or infinite; keeps only some digits


def bits(value: float | None = None, forms: dict[str, Format] = FORMATS) -> None:
    """One row of boxes per format; with a value, its bits and what it becomes."""
    _, axes = figures.plt.subplots(figsize=(8.6, 0.42 * len(forms) + 1.0))
    for row, form in enumerate(forms.values()):
        y = len(forms) - row
        fields = split_bits(value, form) if value is not None else None
        parts = ((SIGN, 1), (EXPONENT, form.exponent), (MANTISSA, form.mantissa))
        x = 0
        for field, (color, width) in enumerate(parts):
            for place in range(width):
                bit = fields[field][place] if fields else ""
                figures.block(axes, x, y, 0.88, 0.74, color, bit, size=8.5)
                x += 1
        axes.text(-0.6, y + 0.36, form.name, ha="right", va="center", fontsize=10.5)
        note = f"{form.exponent} + {form.mantissa}"
        if value is not None:
            kept = round_to(value, form).item()
            note = f"{kept:.9g}   ({abs(kept - value) / abs(value):.1g})"
        axes.text(32.6, y + 0.36, note, va="center", fontsize=10)
    head = len(forms) + 1.15
    axes.text(0, head, "sign", color=figures.shade(SIGN), fontsize=10.5)
    axes.text(2.4, head, "exponent: how large", color=figures.shade(EXPONENT), fontsize=10.5)
    axes.text(12.4, head, "mantissa: which digits", color=figures.shade(MANTISSA), fontsize=10.5)
    right = "bits of each" if value is None else "becomes (relative error)"
    axes.text(32.6, head, right, fontsize=10.5)
    axes.set(xlim=(-5, 44), ylim=(0.9, head + 0.6))
    axes.axis("off")
    figures.show()


def ranges(forms: dict[str, Format] = FORMATS) -> None:
    """From the smallest to the largest number of each format, on one scale of powers of two."""
    _, axes = figures.figure()
    for row, form in enumerate(forms.values()):
        low, normal = math.log2(form.smallest), math.log2(form.smallest_normal)
        high = math.log2(form.largest)
        axes.barh(row, normal - low, left=low, height=0.55, color=POOR,
                  label="subnormal: fewer and fewer digits" if row == 0 else None)
        axes.barh(row, high - normal, left=normal, height=0.55, color=figures.BLUE,
                  label="all digits" if row == 0 else None)
        digits = f"{(form.mantissa + 1) * math.log10(2):.1f} digits"
        axes.annotate(digits, (high, row), **figures.RIGHT, fontsize=10)
    axes.set_yticks(range(len(forms)), list(forms))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(-155, 165), xlabel="magnitude, as a power of 2",
             title="range comes from the exponent, digits from the mantissa")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=10)
    figures.show()


def histogram(
    groups: dict[str, torch.Tensor], form: Format, *, title: str = "", ax: Axes | None = None
) -> None:
    """The magnitudes of each group's elements, with the limits of `form`.

    groups: {name: tensor}; elements that are already 0 are left out. Orange: lost, to zero or
    infinity; amber: subnormal.
    """
    axes = figures.figure()[1] if ax is None else ax
    edges, middles = np.arange(-60.0, 24.1, 1.0), []
    for index, (name, tensor) in enumerate(groups.items()):
        size = tensor.detach().abs().flatten().double().cpu()
        powers = size[size > 0].log2().clamp(edges[0], edges[-1]).numpy()
        heights, _ = np.histogram(powers, edges)
        middles.append(np.median(powers) if len(powers) else 0.0)
        axes.stairs(100 * heights / max(1, len(powers)), edges, lw=2, label=name,
                    color=figures.shade(name, index))
    low, normal = math.log2(form.smallest) - 1, math.log2(form.smallest_normal)
    high = math.log2(form.largest)
    for left, right, tint in ((-62, low, LOST), (low, normal, POOR), (high, 30, LOST)):
        axes.axvspan(left, right, color=tint, alpha=0.22, lw=0)
    top = axes.get_ylim()[1] * 1.18
    for left, right, word in (
        (-60, low, "becomes 0"),
        (low, normal, "sub-\nnormal"),
        (normal, high, "all digits"),
        (high, 24, "∞"),
    ):
        axes.text((left + right) / 2, top * 0.98, word, ha="center", va="top", fontsize=9)
    axes.set(xlim=(-60, 24), ylim=(0, top), xlabel="magnitude, as a power of 2",
             ylabel="% of the elements", title=title)
    axes.legend(loc="center right" if min(middles) < low else "center left", fontsize=10)
    if ax is None:
        figures.show()


def staircase(
    scales: list[float], skipped: list[bool], *, title: str = "", ax: Axes | None = None
) -> None:
    """A dynamic loss scale, step by step, with the skipped steps marked."""
    axes = figures.figure()[1] if ax is None else ax
    steps = range(len(scales))
    powers = [math.log2(scale) for scale in scales]
    axes.step(steps, powers, where="mid", color=figures.BLUE)
    lost = [step for step in steps if skipped[step]]
    axes.plot(lost, [powers[step] for step in lost], "x", color=LOST, markersize=10, mew=2.5,
              label="overflow: the step is skipped")
    axes.set(xlabel="step", ylabel="loss scale, as a power of 2", title=title)
    axes.set_ylim(min(powers) - 0.5, max(powers) + 1.2)  # room for the legend
    axes.legend(loc="upper right", fontsize=10)
    if ax is None:
        figures.show()
