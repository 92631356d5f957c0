"""Drawings of the planner: its errors, where memory and time go, the map of all strategies."""

from collections.abc import Sequence
from typing import Any

from utils.drawing import figures
from utils.planner import plan, search
from utils.planner.machine import Machine
from utils.planner.memory import KINDS as MEMORY_KINDS
from utils.planner.model import Model
from utils.planner.plan import USABLE, Plan
from utils.planner.step import KINDS as STEP_KINDS
from utils.planner.strategy import Strategy

TINTS = {
    "weights": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "buffers": "data",
    "compute": "compute",
    "recompute": "data",
    "tp": "communication",
    "cp": "rank5",
    "pp": "gold",
    "ep": "rank3",
    "dp": "optimizer",
    "bubble": "pale",
    "offload": "muted",
}


# ---- against published measurements


def errors(groups: dict, title: str = "", unit: str = "TFLOP/s per GPU") -> None:
    """Published and predicted speed of every row, and the error: {source: rows of `published`}."""
    rows = [(name, row) for name, group in groups.items() for row in group]
    axes = figures.plt.subplots(figsize=(8.0, 1.1 + 0.27 * len(rows)))[1]
    for y, (_, row) in enumerate(rows):
        found = row.plan()
        counted = row.quantity in ("hardware_tflops", "seconds")  # with recomputation
        predicted = found.hardware_tflops_per_gpu if counted else found.tflops_per_gpu
        published = predicted / (1 + row.error())
        axes.plot([published, predicted], [y, y], color=figures.GREY, linewidth=1.5, zorder=1)
        axes.plot(published, y, "o", color=figures.BLUE, label="published" if y == 0 else None)
        axes.plot(predicted, y, "D", color=figures.GOLD, markersize=5,
                  label="predicted" if y == 0 else None)
        axes.annotate(signed(row.error()), (max(published, predicted), y),
                      **(figures.RIGHT | {"xytext": (8, 0)}), fontsize=9)
    axes.set_yticks(range(len(rows)), [row.name for _, row in rows], fontsize=9)
    axes.set(title=title, xlabel=unit, ylim=(len(rows) - 0.5, -1.6))
    axes.margins(x=0.14)
    end = -0.5
    for name, group in groups.items():
        begin, end = end, end + len(group)
        axes.axhline(end, color=figures.GREY, linewidth=0.8, linestyle=":")
        axes.text(1.05, (begin + end) / 2, name, transform=axes.get_yaxis_transform(), fontsize=9,
                  va="center")
    axes.legend(loc="upper right", ncols=2)
    figures.show()


def signed(share: float) -> str:
    """+9%, −4%, 0%."""
    text = f"{share:+.0%}".replace("-", "−")
    return "0%" if text in ("+0%", "−0%") else text


# ---- one plan, several plans


def memory_of(plans: dict, title: str = "memory per rank") -> None:
    """{name: plan}: bytes by kind, in GB, and the device's limit."""
    parts = {
        name: {kind: one.memory[kind] / 1e9 for kind in MEMORY_KINDS if one.memory[kind] > 0}
        for name, one in plans.items()
    }
    axes = figures.figure("strip" if len(parts) <= 2 else "normal")[1]
    figures.stack(parts, unit="GB", title=title, colors=TINTS, ax=axes)
    limit = USABLE * next(iter(plans.values())).machine.memory / 1e9
    if max(sum(kinds.values()) for kinds in parts.values()) > limit / 4:
        axes.axvline(limit, color=figures.INK, linewidth=1, linestyle="--", label="device's limit")
        for text in axes.texts:  # the totals, readable where the line crosses them
            text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
        axes.legend(loc="upper center", bbox_to_anchor=(0.4, -0.16), ncols=6, fontsize=9,
                    handlelength=1.3, columnspacing=1.2)
    figures.show()


def time_of(plans: dict, title: str = "a step", share: bool = True) -> None:
    """{name: plan}: seconds by kind; `share`: in percent of each plan's own step."""
    colors = TINTS | {"optimizer": "ink"}
    kinds = [kind for kind in STEP_KINDS if any(one.seconds[kind] > 0 for one in plans.values())]
    parts = {}
    for name, one in plans.items():
        total = one.seconds["total"] / 100 if share else 1
        parts[name] = {kind: one.seconds[kind] / total for kind in kinds}
    size = "strip" if len(parts) <= 2 else "tall" if len(parts) > 8 else "normal"
    axes = figures.figure(size)[1]
    unit = "%" if share else "s"
    figures.stack(parts, unit=unit, title=title, colors=colors, ax=axes)
    if share:
        for text in [*axes.texts]:
            text.remove()
        axes.set(xlim=(0, 100), xlabel="% of the step")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=5, fontsize=10)
    figures.show()


# ---- all strategies


def best_of_each(
    model: Model, machine: Machine, gpus: int, across: str = "pp", **fixed: Any
) -> dict:
    """{(tp, pp): the fastest plan that fits, or None where none does}; across: "pp" or "cp"."""
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if gpus % n == 0]
    found = {}
    for tp in sizes:
        for other in sizes:
            if tp * other <= gpus:
                best = search(model, machine, gpus, top=1, **{"tp": tp, across: other} | fixed)
                found[tp, other] = best[0] if best else None
    return found


def strategy_map(
    model: Model,
    machine: Machine,
    gpus: int,
    title: str = "",
    across: str = "pp",
    **fixed: Any,
) -> None:
    """The best MFU of every tp × pp, or of every tp × cp; a dash: no plan is possible or fits."""
    found = best_of_each(model, machine, gpus, across, **fixed)
    rows, columns = sorted({tp for tp, _ in found}), sorted({other for _, other in found})
    rates = {key: one.mfu for key, one in found.items() if one}
    top = max(rates.values(), default=1.0)
    axes = figures.figure("normal")[1]
    cells = {}
    for (tp, other), one in found.items():
        strength = None if one is None else 0.08 + 0.72 * (one.mfu / top) ** 3
        text = "–" if one is None else f"{one.mfu:.0%}"
        cells[rows.index(tp), columns.index(other)] = (text, strength)
    names = [f"tp {tp}" for tp in rows], [f"{across} {other}" for other in columns]
    figures.heat_map(axes, *names, cells)
    for words, one in zip(axes.texts, found.values(), strict=True):
        words.set_weight("bold" if one is not None and one.mfu == top else "normal")
    node = sum(1 for tp in rows if tp <= machine.node)
    axes.axhline(node - 0.04, color=figures.ORANGE, linewidth=1.2, linestyle="--")
    axes.annotate("tp leaves the node", (len(columns), node), color=figures.ORANGE, fontsize=9,
                  xytext=(6, -4), textcoords="offset points", va="top")
    axes.set(xlim=(-0.02, len(columns) + 1.4), title=title)
    axes.set_xlabel(f"–: no plan is possible or fits   blank: more than {gpus:,} GPUs", loc="left")
    figures.show()


def micro_batch_curves(
    model: Model,
    machine: Machine,
    splits: Sequence[tuple[int, int, int]],
    batches: Sequence[int],
    title: str = "",
    **options: Any,
) -> dict:
    """Fraction of the peak over micro-batches per pipeline, one curve for each (tp, pp, dp);
    returns {name: [fractions]}. Recomputation counts as work, as in the paper."""
    series = {}
    for tp, pp, dp in splits:
        plans = [
            plan(model, Strategy(dp, pp, tp, global_batch=m * dp, **options), machine)
            for m in batches
        ]
        series[f"tp {tp}, pp {pp}"] = [one.hfu for one in plans]
    axes = figures.figure()[1]
    figures.curves(
        {name: (batches, [100 * share for share in shares]) for name, shares in series.items()},
        x="micro-batches per pipeline", y="% of the peak", title=title, log="x", markers=True,
        ax=axes,
    )
    axes.set_xticks(batches, [str(m) for m in batches])
    axes.minorticks_off()
    figures.show()
    return series


def card(one: Plan, ax: Any = None) -> None:
    """One plan in a figure: its memory against the device's, its step by kind."""
    pair = figures.plt.subplots(2, 1, figsize=(8.0, 2.6))[1] if ax is None else ax
    limit = USABLE * one.machine.memory / 1e9
    memory = {kind: one.memory[kind] / 1e9 for kind in MEMORY_KINDS if one.memory[kind] > 0}
    step = {kind: one.seconds[kind] for kind in STEP_KINDS if one.seconds[kind] > 0}
    rows = ((memory, "GB", TINTS), (step, "s", TINTS | {"optimizer": "ink"}))
    for axes, (parts, unit, colors) in zip(pair, rows, strict=True):
        figures.stack({"": parts}, unit=unit, colors=colors, ax=axes)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.28), ncols=8, fontsize=9,
                    handlelength=1, columnspacing=1)
    pair[0].axvline(limit, color=figures.INK, linewidth=1, linestyle="--")
    fits = "fits" if one.fits else "does not fit"
    pair[0].set_title(f"{fits}: {one.memory['total'] / 1e9:.1f} of {limit:.0f} GB", fontsize=11)
    pair[1].set_title(f"a step: MFU {one.mfu:.1%}", fontsize=11)
    if ax is None:
        figures.show()
