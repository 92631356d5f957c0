"""Drawings shared by lessons: the map of the workshop, the model, a matrix split in two.

Each draws with `figures.Sketch`, with real sizes where it has any, and shows the result.
"""

from itertools import pairwise

from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from utils.drawing.figures import GOLD, Sketch, shade
from utils.models.config import GPTConfig


def workshop_map() -> None:
    """One training step on one device, with the lessons' splits of it in gold."""
    sketch = Sketch(9.2, 3.9)
    sketch.text(1.2, 3.65, "data", weight="bold")
    sketch.text(4.4, 3.65, "the model", weight="bold")
    sketch.text(7.8, 3.65, "what memory holds", weight="bold")
    for row, y in enumerate((2.75, 2.15, 1.35, 0.75)):
        sketch.box(f"batch {row}", "sequences", x=0.4, y=y, width=1.6, color="data")
        sketch.box(f"layer {row}", x=2.9, y=y, width=3.0, color="rank0")
    for y, text, color in (
        (2.75, "parameters", "parameters"),
        (2.15, "gradients", "gradients"),
        (1.35, "optimizer state", "optimizer"),
        (0.75, "activations", "activations"),
    ):
        sketch.box(text, x=6.8, y=y, width=2.0, color=color)
    for x0, y0, x1, y1 in (
        (0.2, 2.0, 2.2, 2.0),
        (1.75, 0.6, 1.75, 3.4),
        (2.7, 2.0, 6.1, 2.0),
        (5.3, 0.6, 5.3, 3.4),
        (8.55, 0.6, 8.55, 3.4),
    ):
        seam(sketch, x0, y0, x1, y1)
    sketch.text(
        1.2,
        0.3,
        "↔ 01 data   02 accumulation\n↕ 07 context parallel",
        color="gold",
        size=9.5,
    )
    sketch.text(
        4.4,
        0.3,
        "↕ 06 tensor parallel     ↔ 08 pipeline parallel\n09 experts     10 all combined",
        color="gold",
        size=9.5,
    )
    sketch.text(
        7.8, 0.3, "05 sharded   03 fewer bits\n04 recomputed or offloaded", color="gold", size=9.5
    )
    sketch.arrow("batch 1", "layer 1", "")
    sketch.arrow("layer 1", "gradients", "")
    sketch.show()


def model(config: GPTConfig) -> None:
    """The decoder of a GPTConfig from left to right, with the parameter count of every part."""
    hidden, queries = config.hidden_size, config.heads * config.head_size
    keys = config.key_value_heads * config.head_size
    table, norm = config.vocab_size * hidden, hidden
    attention, mlp = 2 * hidden * (queries + keys), 3 * hidden * config.mlp_size
    sketch = Sketch(9.2, 3.0)
    sketch.box("block", " ", x=2.25, y=0.45, width=4.45, height=2.1, color="muted", fill=False)
    sketch.text(4.47, 2.75, f"{config.layers} blocks in sequence", weight="bold")
    parts = (  # name, text, x, y, width, height, colour
        ("tokens", "tokens", 0.1, 1.25, 0.75, 0.5, "data"),
        ("embedding", f"embedding\n{table:,}", 1.1, 1.1, 1.05, 0.8, "optimizer"),
        ("norm a", f"norm\n{norm:,}", 2.4, 1.1, 0.75, 0.8, "pale"),
        ("attention", f"attention\n{attention:,}", 3.3, 1.1, 1.1, 0.8, "rank0"),
        ("norm b", f"norm\n{norm:,}", 4.6, 1.1, 0.75, 0.8, "pale"),
        ("mlp", f"MLP\n{mlp:,}", 5.5, 1.1, 1.05, 0.8, "rank1"),
        ("norm", f"norm\n{norm:,}", 6.85, 1.1, 0.75, 0.8, "pale"),
        (
            "head",
            f"lm_head\n{0 if config.tie_embeddings else table:,}",
            7.8,
            1.1,
            1.05,
            0.8,
            "optimizer",
        ),
    )
    for name, text, x, y, width, height, color in parts:
        sketch.box(name, text, x=x, y=y, width=width, height=height, color=color, size=9.5)
    for (start, *_), (end, *_) in pairwise(parts):
        sketch.arrow(start, end)
    for x0, x1 in ((2.32, 4.48), (4.52, 6.64)):  # the residual stream runs past each part
        sketch.axes.annotate(
            "",
            (x1, 1.55),
            (x0, 1.55),
            arrowprops={
                "arrowstyle": "-|>",
                "color": GOLD,
                "linewidth": 1.8,
                "connectionstyle": "bar,angle=180,fraction=-0.3",
            },
        )
    sketch.text(4.47, 0.68, "gold: the residual stream; each part adds to it", color="gold", size=9)
    sketch.text(0.5, 0.95, "(B, s)", size=9)
    sketch.text(1.65, 0.95, f"(B, s, {hidden})", size=9)
    sketch.text(8.3, 0.95, f"(B, s, {config.vocab_size})", size=9)
    sketch.show()


def matrix_in_two() -> None:
    """Y = X·W with W split by columns, one half per rank."""
    sketch = Sketch(8.6, 1.9)
    sketch.box("X", "X", x=0.2, y=0.3, width=1.2, height=1.1, color="pale")
    sketch.text(1.6, 0.85, "·", size=16)
    for rank, x in enumerate((1.8, 2.7)):
        sketch.box(f"W{rank}", f"W{rank}", x=x, y=0.3, width=0.9, height=1.1, color=f"rank{rank}")
    sketch.text(3.85, 0.85, "=", size=14)
    for rank, x in enumerate((4.1, 6.4)):
        sketch.box(
            f"Y{rank}",
            f"X·W{rank}\non rank {rank}",
            x=x,
            y=0.3,
            width=1.3,
            height=1.1,
            color=f"rank{rank}",
        )
    sketch.text(5.9, 0.85, "joined with", size=9.5)
    sketch.text(5.9, 0.6, "all-gather", size=9.5, color="gold", weight="bold")
    seam(sketch, 2.7, 0.15, 2.7, 1.55)
    sketch.text(2.7, 1.7, "the split", size=9.5, color="gold")
    sketch.show()


def seam(sketch: Sketch, x0: float, y0: float, x1: float, y1: float) -> None:
    """A gold line where the halves are joined."""
    sketch.axes.add_line(Line2D((x0, x1), (y0, y1), color=GOLD, linewidth=3.5, zorder=5))


def cpu_and_gpu() -> None:
    """The two processors of a DGX H100: area is on-chip memory, a link's width its bandwidth.

    Sizes: Intel's data sheet of the Xeon Platinum 8480 (56 cores of 2 MB, 105 MB, eight channels of
    DDR5-4800); NVIDIA's white paper on the H100 (132 SMs of 256 KB registers and 256 KB shared
    memory, 50 MB, HBM3).
    """
    sketch = Sketch(8.6, 5.0)
    chips = (  # name, unit, units per row, MB of one, MB shared, GB/s, memory
        ("CPU: 56 cores", "2 MB per core", 8, 56, 2.0, "L3: 105 MB", 105.0, 307, "DDR5"),
        ("GPU: 132 SMs", "0.5 MB per SM", 12, 132, 0.5, "L2: 50 MB", 50.0, 3350, "HBM3"),
    )
    side = 0.2  # inches per square root of a megabyte
    for left, (name, each, across, count, size, shared, shared_size, speed, memory) in zip(
        (1.2, 5.2), chips, strict=True
    ):
        edge = side * size**0.5
        width, rows = across * edge, -(-count // across)
        bottom = 1.25
        height = side**2 * shared_size / width
        sketch.axes.add_patch(Rectangle((left, bottom), width, height, facecolor=shade("data")))
        sketch.text(left + width / 2, bottom + height / 2, shared)
        for unit in range(count):
            row, column = divmod(unit, across)
            corner = left + column * edge, bottom + height + row * edge
            sketch.axes.add_patch(
                Rectangle(corner, edge, edge, facecolor=shade("compute"), edgecolor="white"))
        top = bottom + height + rows * edge
        sketch.text(left + width / 2, top + 0.38, name, weight="bold")
        sketch.text(left + width / 2, top + 0.15, each, size=9.5)
        sketch.axes.add_patch(Rectangle(
            (left + width / 2 - speed / 6000, 0.55), speed / 3000, bottom - 0.55,
            facecolor=shade("communication")))
        sketch.axes.add_patch(Rectangle((left, 0.15), width, 0.4, facecolor=shade("muted")))
        sketch.text(left + width / 2, 0.35, f"{memory}: {speed:,} GB/s", color="white", size=9.5)
    sketch.show()
