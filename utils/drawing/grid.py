"""Drawings of lesson 10: which ranks communicate, and what part of the model each rank holds."""

import itertools

from matplotlib.patches import FancyBboxPatch

from utils.drawing import figures
from utils.parallel.mesh import grid, lines

WORDS = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}  # nearest partners first
TINTS = ("rank0", "rank1", "rank2", "rank3", "rank4", "rank5", "rank6", "rank7")


def who_talks(dp: int = 2, pp: int = 2, tp: int = 2, cp: int = 1, per_node: int = 4) -> None:
    """One panel per axis: ranks of one colour form a group; frames are nodes. With cp 1, context
    parallelism has no panel."""
    ranks = grid(dp=dp, pp=pp, tp=tp, cp=cp)
    names = [name for name in WORDS if name != "cp" or cp > 1]
    size = "tall" if ranks.numel() > 8 else "normal"
    _, panels = figures.plt.subplots(1, len(names), figsize=figures.SIZES[size])
    for axes, name in zip(panels, names, strict=True):
        groups = lines(ranks, name)
        _nodes(axes, ranks.numel(), per_node)
        for index, group in enumerate(groups):
            tint = figures.shade(TINTS[index % len(TINTS)])
            places = [_place(rank, per_node) for rank in group]
            for here, there in itertools.pairwise(places):
                far = here[1] - there[1] > 1.3  # other ranks are between: go around them
                bend = 0.0 if not far else (0.35 if group[0] // 2 % 2 == 0 else -0.35)
                look = {"arrowstyle": "-", "color": tint, "linewidth": 3, "zorder": 1,
                        "connectionstyle": f"arc3,rad={bend}"}
                axes.annotate("", there, here, arrowprops=look)
            for rank, (x, y) in zip(group, places, strict=True):
                axes.plot(x, y, "o", color=tint, markersize=22, zorder=2)
                axes.text(x, y, str(rank), color="white", ha="center", va="center", zorder=3)
        size = len(groups[0])
        axes.set_title(f"{name} {size}: {WORDS[name]}", fontsize=12)
    figures.show()


def _nodes(axes, ranks, per_node):
    """Frames for the nodes, two ranks side by side in each."""
    height = -(-per_node // 2)
    for node in range(-(-ranks // per_node)):
        y = -node * (height + 0.55)
        axes.add_patch(
            FancyBboxPatch(
                (-0.55, y - height + 0.45), 2.1, height + 0.1, facecolor=figures.PALE,
                edgecolor="none", boxstyle="round,pad=0,rounding_size=0.15", zorder=0)
        )
        axes.text(1.68, y - height / 2 + 0.5, f"node {node}", rotation=90, va="center", fontsize=9)
    axes.set(xlim=(-0.8, 2.0), ylim=(y - height + 0.2, 0.8))
    axes.axis("off")


def _place(rank, per_node):
    """The position of a rank."""
    node, local = divmod(rank, per_node)
    height = -(-per_node // 2)
    return local % 2, -node * (height + 0.55) - local // 2


def pieces(dp: int = 2, pp: int = 2, tp: int = 2, layers: int = 4, cp: int = 1) -> None:
    """Each replica as a stack of layers, split into stages from top to bottom and into slices from
    left to right; with context parallelism it is drawn cp times, each for some positions."""
    ranks = grid(dp=dp, pp=pp, tp=tp, cp=cp).flatten(1, 3)  # (pp, dp · cp, tp)
    axes = figures.figure()[1]
    for copy in range(dp * cp):
        replica, share = divmod(copy, cp)
        left = copy * (tp + 0.5)
        for stage in range(pp):
            first, stop = layers * stage // pp, layers * (stage + 1) // pp
            for slice_ in range(tp):
                rank = int(ranks[stage, copy, slice_])
                part = f"slice {slice_} of" + (" each matrix" if cp == 1 else "\nmatrices")
                text = f"rank {rank}\nlayers {first} to {stop - 1}\n{part}"
                ink = figures.ink_on(figures.shade(f"rank{rank}"), 0.5)
                figures.block(axes, left + slice_, stage * 1.1, 0.96, 1, f"rank{rank}", text,
                              ink=ink, size=9 if cp == 1 else 7.5, alpha=0.9)
        words = f"replica {replica}: its own rows"
        if cp > 1:
            words = f"rows of replica {replica},\nslice {share} of the positions"
        axes.text(left + tp / 2, pp * 1.1 + 0.08, words, ha="center", va="top", fontsize=10)
    lines_below = 0.25 if cp == 1 else 0.4
    axes.set(xlim=(-0.1, dp * cp * (tp + 0.5) - 0.4), ylim=(pp * 1.1 + lines_below, -0.1))
    axes.axis("off")
    figures.show()


def network(times: dict, *, title: str = "") -> None:
    """{mix: {Gbit/s: milliseconds}}: one line per mix, slower networks to the right."""
    series = {mix: (list(row), list(row.values())) for mix, row in times.items()}
    axes = figures.figure()[1]
    figures.curves(series, x="Gbit/s between the nodes", y="ms per step", log="xy", markers=True,
                   title=title, ax=axes)
    axes.invert_xaxis()
    speeds = sorted({speed for row in times.values() for speed in row})
    axes.set_xticks(speeds, [figures.number(speed) for speed in speeds])
    low, high = axes.get_ylim()
    round_ones = [base * 10**power for power in range(-1, 5) for base in (1, 2, 5)]
    shown = [tick for tick in round_ones if low <= tick <= high]
    axes.set_yticks(shown, [figures.number(tick) for tick in shown])
    axes.minorticks_off()
    figures.show()


def cluster(nodes: int = 3, gpus: int = 4, spines: int = 2) -> None:
    """Nodes of GPUs, each with its own switch; a network card per GPU, whose rail joins the cards
    in the same position of all nodes; spine switches above the rails."""
    axes = figures.figure("tall")[1]
    width = nodes * (gpus + 1) - 1

    def box(middle, y, text, color, *, wide=0.8, ink="white", size=9):
        figures.block(axes, middle - wide / 2, y, wide, 0.5, color, text, ink=ink, size=size)

    def cable(lower, upper, color, thick=1.5):
        axes.plot(*zip(lower, upper, strict=True), color=figures.shade(color), linewidth=thick,
                  zorder=0)

    rails = [width * (rail + 0.5) / gpus for rail in range(gpus)]
    for spine in range(spines):
        middle = width * (spine + 0.5) / spines
        box(middle, 4.6, f"spine switch {spine}", "muted", wide=2.6)
        for rail in rails:
            cable((rail, 3.5), (middle, 4.6), "muted")
    for rail, middle in enumerate(rails):
        box(middle, 3.0, f"leaf switch, rail {rail}", f"rank{rail}", wide=2.9)
    for node in range(nodes):
        left = node * (gpus + 1)
        axes.add_patch(FancyBboxPatch(
            (left - 0.05, -0.1), gpus + 0.1, 1.75, facecolor=figures.PALE, edgecolor="none",
            boxstyle="round,pad=0,rounding_size=0.12", zorder=-1))
        box(left + gpus / 2, 0.0, f"node {node}: NVSwitch", "gold", wide=gpus - 0.2,
            ink=figures.ink_on(figures.shade("gold")))
        for gpu in range(gpus):
            middle = left + gpu + 0.5
            box(middle, 1.0, f"GPU {gpu}", f"rank{gpu}")
            cable((middle, 0.5), (middle, 1.0), "gold", 6)
            cable((middle, 1.5), (rails[gpu], 3.0), f"rank{gpu}")
    axes.set(xlim=(-0.2, width + 0.2), ylim=(-0.3, 5.3))
    axes.axis("off")
    figures.show()
