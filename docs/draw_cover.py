"""Draw docs/pictures/cover.svg: a bowl broken into four ranks and joined with gold.

python docs/draw_cover.py
"""

from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Ellipse, PathPatch, Polygon
from matplotlib.path import Path as Outline

from utils.drawing.figures import COLORS

PATH = Path(__file__).parent / "pictures" / "cover.svg"
WORDS = "#7A828E"  # legible on a light and on a dark page
SEAMS = [  # zigzags from the rim down: x, y in units of the bowl's half width
    [(-0.52, 0.02), (-0.40, -0.14), (-0.50, -0.30), (-0.34, -0.46), (-0.42, -0.70), (-0.30, -1.0)],
    [(0.06, -0.12), (-0.06, -0.28), (0.10, -0.42), (-0.02, -0.60), (0.06, -0.78), (0.0, -1.1)],
    [(0.55, 0.02), (0.42, -0.18), (0.54, -0.34), (0.36, -0.52), (0.44, -0.72), (0.28, -1.0)],
]


def bowl():
    """The outline below the rim, counter-clockwise, as an array (points, 2)."""
    angle = np.linspace(np.pi, 2 * np.pi, 80)
    body = np.column_stack([np.cos(angle), 0.88 * np.sin(angle)])
    return body


def draw(axes):
    """Draw the whole bowl in an axes of equal scale."""
    body = bowl()
    clip = PathPatch(Outline(body), transform=axes.transData, facecolor="none", edgecolor="none")
    axes.add_patch(clip)
    left = [(-1.2, 0.3), (-1.2, -1.2)]
    edges = [left, *[list(seam) for seam in SEAMS], [(1.2, 0.3), (1.2, -1.2)]]
    centres = [(-0.66, -0.28), (-0.23, -0.42), (0.25, -0.42), (0.67, -0.28)]
    for rank in range(4):
        shard = Polygon(
            edges[rank] + edges[rank + 1][::-1], color=COLORS[f"rank{rank}"], alpha=0.92
        )
        axes.add_patch(shard)
        shard.set_clip_path(clip)
        axes.text(*centres[rank], f"rank\n{rank}", ha="center", va="center", color="white", size=12)
    axes.add_patch(Ellipse((0, 0), 2, 0.30, facecolor="#3B4250", edgecolor="none"))
    for seam in SEAMS:
        line = axes.plot(*zip(*seam, strict=True), color=COLORS["gold"], linewidth=4.5,
                         solid_joinstyle="round")[0]
        line.set_clip_path(clip)
        axes.plot(*zip(*seam[:-2], strict=True), color="#F2D98B", linewidth=1.2)
    axes.add_patch(Polygon([(-0.34, -0.86), (0.34, -0.86), (0.28, -0.97), (-0.28, -0.97)],
                           color="#3B4250"))
    axes.set(xlim=(-1.15, 4.2), ylim=(-1.05, 0.25))
    axes.set_aspect("equal")
    axes.axis("off")


def main():
    matplotlib.rcParams["svg.hashsalt"] = "kintsugi"  # the same file from the same drawing
    figure = plt.figure(figsize=(10, 2.6), layout="none")
    axes = figure.add_axes((0, 0, 1, 1))
    draw(axes)
    axes.text(1.35, -0.16, "Kintsugi", size=34, weight="bold", color=COLORS["gold"], va="center")
    lines = [
        "A model too large for one device is broken into pieces.",
        "Communication is the gold that joins them:",
        "N ranks train the same model as one rank.",
    ]
    for row, line in enumerate(lines):
        axes.text(1.36, -0.47 - 0.17 * row, line, size=12.5, color=WORDS, va="center")
    PATH.parent.mkdir(exist_ok=True)
    figure.savefig(PATH, metadata={"Date": None}, transparent=True)
    print(f"wrote {PATH.name}")


if __name__ == "__main__":
    main()
