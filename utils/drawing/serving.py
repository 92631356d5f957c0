"""Drawings of lessons 16 and 17: a request's path, slots over time, load, metrics, predictions.

    slots({"static": static(lengths, 4), "continuous": continuous(lengths, 4)})
    throughput_latency({"tp 1": sweep(...), "tp 2": sweep(...)})      # of utils.serving.load
    decode_step({"H100": over(model, machine, batches=(16,))})        # of utils.planner.decode

Each draws its input and shows it. Those that compute something return it, for a cell to print
below the figure.
"""

from collections.abc import Collection, Sequence
from itertools import groupby

import numpy as np
import pandas as pd

from utils.drawing import figures
from utils.drawing.figures import BLUE, GOLD, GREY, INK, PALE, Sketch
from utils.planner.decode import KINDS
from utils.serving.engine.blocks import blocks_for
from utils.serving.engine.request import SamplingParams
from utils.serving.engine.scheduler import Request, Scheduler

PARTS = {  # kinds of a decode step: (name in the legend, colour)
    "weights": ("read weights", "parameters"),
    "cache": ("read KV cache", "data"),
    "launch": ("launch kernels", "muted"),
    "latency": ("messages: latency", "communication"),
    "bytes": ("messages: bytes", "gold"),
}


def engine(tp: int = 2) -> None:
    """An inference engine by itself: the queue, the leader with slots and blocks, its ranks."""
    sketch = Sketch(9.6, 2.5)
    for place in range(4):
        sketch.box(f"request {place}", " ", x=0.15 + 0.32 * place, y=0.95, width=0.26, height=0.6,
                   color="ink")
    sketch.text(0.75, 1.75, "queue of requests", size=9.5)
    sketch.box("leader", "leader\nbatch, slots,\nblock tables", x=2.45, y=0.6, width=1.9,
               height=1.3, color="gold", size=10)
    sketch.arrow("request 3", "leader", both=True)
    sketch.text(1.95, 0.7, "tokens,\nstep by step", size=9.5)
    room = 2.3 / tp
    for rank in range(tp):
        y = 2.4 - (rank + 0.5) * room
        sketch.box(f"rank {rank}", f"rank {rank}\n1/{tp} of each matrix and block" if tp > 1
                   else "rank 0\nall matrices, all blocks", x=6.1, y=y - min(0.8, room - 0.2) / 2,
                   width=2.7, height=min(0.8, room - 0.2), color=f"rank{rank}", size=9.5)
        sketch.arrow("leader", f"rank {rank}", both=True)
    if tp > 1:
        look = {"arrowstyle": "<|-|>", "color": GOLD, "linewidth": 2.5}
        sketch.axes.annotate("", (8.98, 0.3), (8.98, 2.2), arrowprops=look)
        sketch.axes.text(9.2, 1.25, "all-reduce", rotation=90, color=GOLD, va="center",
                         ha="center", fontsize=9.5)
    sketch.text(5.25, 1.25, "one command\nper step", size=9.5)
    sketch.show()


def front_doors(tp: int = 2) -> None:
    """Where a request goes: client, gateway, Triton's front ends, its models, ranks, and back."""
    sketch = Sketch(9.6, 3.7)
    sketch.box("server", " ", x=1.75, y=0.3, width=5.15, height=3.0, color="muted", fill=False)
    sketch.text(4.3, 3.48, "tritonserver", weight="bold")
    sketch.text(8.3, 3.48, "processes of the engine", weight="bold")
    sketch.box("client", "client", x=0.1, y=1.4, width=1.05, height=0.8, color="ink")
    sketch.box("gateway", "gateway", x=0.1, y=2.75, width=1.05, height=0.55, color="ink",
               fill=False, size=9.5)
    sketch.box("http", "HTTP\ngenerate", x=1.95, y=2.2, width=1.1, height=0.7, size=9.5)
    sketch.box("grpc", "gRPC\nstream", x=1.95, y=0.7, width=1.1, height=0.7, size=9.5)
    sketch.box("gpt", "gpt\ntext → text", x=3.55, y=2.15, width=1.2, height=0.8, color="rank2",
               size=9.5)
    for name, y in (("gpt_detokenize", 2.75), ("gpt_tokenize", 2.2)):
        sketch.box(name, x=5.25, y=y, width=1.45, height=0.45, color="data", size=9.5)
    sketch.box("engine", "gpt_engine\nleader:\nqueue, slots", x=5.25, y=0.6, width=1.45,
               height=0.9, color="gold", size=9.5)
    room = 2.7 / tp
    height = min(0.65, room - 0.12)
    for rank in range(tp):
        y = 3.15 - (rank + 0.5) * room
        text = f"rank {rank}" + (f"\n1/{tp} of each matrix" if 1 < tp <= 4 else "")
        sketch.box(f"rank {rank}", text, x=7.5, y=y - height / 2, width=1.6, height=height,
                   color=f"rank{rank}", size=9)
        look = {"arrowstyle": "<|-|>", "color": INK, "linewidth": 1.5}
        sketch.axes.annotate("", (7.5, y), (6.68, 1.05), arrowprops=look)
    if tp > 1:
        look = {"arrowstyle": "<|-|>", "color": GOLD, "linewidth": 2.5}
        sketch.axes.annotate("", (9.23, 0.45), (9.23, 3.15), arrowprops=look)
        sketch.axes.text(9.42, 1.8, "all-reduce", rotation=90, color=GOLD, va="center",
                         ha="center", fontsize=9.5)
    for door in ("http", "grpc", "gateway"):
        sketch.arrow("client", door, both=True)
    for door in ("http", "grpc"):
        sketch.arrow("gateway", door, both=True)
    sketch.arrow("http", "gpt", both=True)
    sketch.arrow("grpc", "gpt", both=True)
    sketch.arrow("gpt", "gpt_tokenize", both=True)
    sketch.text(5.0, 2.64, "BLS", size=9)
    sketch.arrow("gpt", "engine", both=True)
    sketch.text(5.4, 1.87, "Unix socket:\nclosing it cancels", size=9, align="left")
    sketch.arrow("grpc", "engine", both=True)
    sketch.text(4.15, 0.88, "token ids in and out", size=9)
    sketch.text(4.3, 0.13, "one instance of gpt_engine is one process group", size=9)
    sketch.show()


def who_serves() -> None:
    """Triton, Dynamo and the engines: which server sits in front of which."""
    sketch = Sketch(9.6, 3.7)
    sketch.box("clients", "clients", x=0.1, y=1.4, width=1.1, height=0.8, color="ink")
    sketch.box("gateway", "gateway", x=1.9, y=2.75, width=1.6, height=0.6, color="ink", fill=False)
    sketch.box("own", "the engine's own\nOpenAI server", x=1.9, y=1.5, width=1.6, height=0.65,
               color="ink", fill=False, size=9.5)
    sketch.box("dynamo", "Dynamo\nfront end, router", x=1.9, y=0.25, width=1.6, height=0.7,
               color="rank2", size=9.5)
    sketch.box("triton", "Triton\nmodels, versions,\nmetrics", x=4.4, y=2.55, width=1.5,
               height=0.95, color="gold", size=9.5)
    sketch.box("ours", "this workshop's engine", x=7.3, y=2.95, width=2.1, height=0.5,
               color="data", size=9.5)
    sketch.box("engines", " ", x=6.9, y=0.2, width=2.6, height=2.5, color="muted", fill=False)
    sketch.box("backends", " ", x=7.2, y=1.05, width=2.2, height=1.55, color="gold", fill=False)
    for row, name in enumerate(("vLLM", "TensorRT-LLM", "SGLang")):
        sketch.box(name, name, x=7.3, y=1.95 - 0.75 * row, width=2.0, height=0.55, color="data")
    for front in ("gateway", "own", "dynamo"):
        sketch.arrow("clients", front)
    sketch.arrow("gateway", "triton")
    sketch.arrow("triton", "ours", "Python backend")
    sketch.arrow("triton", "backends")
    sketch.arrow("own", "engines")
    sketch.arrow("dynamo", "engines")
    sketch.text(5.8, 0.75, "by cached prefix")
    sketch.arrow("dynamo", "triton")
    sketch.text(4.62, 2.2, "round-robin", align="left")
    sketch.show()


# ---- which request is in which slot


def continuous(lengths: Sequence[int], slots: int) -> list[list]:
    """How the engine's own scheduler runs requests of `lengths` tokens that arrive together: for
    each slot, a list over steps with the number of the request in it, or None."""
    blocks = slots * blocks_for(1 + max(lengths, default=0))
    scheduler = Scheduler(slots, blocks, queue=len(lengths), prefill_chunk=10**9)
    for number, length in enumerate(lengths):
        scheduler.add(Request(str(number), [0], SamplingParams(max_tokens=length)))
    steps = []
    while (step := scheduler.plan()) is not None:
        running = {one.slot: int(one.id) for one in scheduler.running}
        steps.append([running.get(slot) for slot in range(slots)])
        scheduler.advance(step, [1] * len(step.expected()))
    return [list(slot) for slot in zip(*steps)]


def static(lengths: Sequence[int], slots: int) -> list[list]:
    """The table of `continuous` for static batches, each as long as its longest request."""
    table = [[] for _ in range(slots)]
    for first in range(0, len(lengths), slots):
        batch = lengths[first : first + slots]
        for slot in range(slots):
            own = batch[slot] if slot < len(batch) else 0
            table[slot] += [first + slot] * own + [None] * (max(batch) - own)
    return table


def slots(panels: dict[str, list[list]], title: str = "") -> dict:
    """Slots by steps, one panel for each {name: table}; a colour and a number for each request.

    Returns {name: (steps, the fraction of their rows that a request uses)}.
    """
    rows = sum(len(table) for table in panels.values())
    height = 0.9 + 0.5 * len(panels) + 0.26 * rows
    _, places = figures.plt.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(8.0, height)
    )
    found, most = {}, max(len(table[0]) for table in panels.values())
    for axes, (name, table) in zip(places[:, 0], panels.items(), strict=True):
        for row, cells in enumerate(table):
            _slot(axes, row, cells, most)
        steps = len(table[0])
        used = sum(cell is not None for cells in table for cell in cells)
        found[name] = (steps, used / (len(table) * steps))
        axes.axvline(steps, color=INK, linewidth=1.2, linestyle="--")
        figures.lanes(axes, range(len(table)))
        axes.set(xlim=(0, most * 1.02), ylim=(len(table) - 0.4, -0.6), ylabel="slot")
        axes.set_title(f"{name}: {steps} steps, {found[name][1]:.0%} of the rows are used",
                       fontsize=11)
        axes.grid(visible=False)
    places[-1, 0].set_xlabel("step")
    if title:
        places[0, 0].figure.suptitle(title, fontsize=12, weight="bold", x=0.01, ha="left")
    figures.show()
    return found


def _slot(axes, row, cells, most):
    """The requests of one slot as bars."""
    start = 0
    for number, run in groupby(cells):
        length = len(list(run))
        tint = PALE if number is None else figures.CYCLE[number % len(figures.CYCLE)]
        axes.barh(row, length, 0.86, start, color=tint, edgecolor="white", linewidth=1.2)
        if number is not None and length >= most / 60:
            axes.text(start + length / 2, row, str(number), color="white", ha="center",
                      va="center", fontsize=9, weight="bold")
        start += length


def block_tables(tables: dict[str, Sequence[int]], title: str = "") -> None:
    """The blocks of each {name: table} in order, by number; blue if several tables share it."""
    _, axes = figures.plt.subplots(figsize=(8.0, 0.7 + 0.45 * len(tables)))
    every = [block for table in tables.values() for block in table]
    for row, table in enumerate(tables.values()):
        for place, block in enumerate(table):
            color = BLUE if every.count(block) > 1 else figures.ORANGE
            figures.block(axes, place, row - 0.4, 0.94, 0.8, color, f"block {block}")
    figures.lanes(axes, tables)
    axes.set(xlim=(-0.05, max(map(len, tables.values())) + 2), xticks=[], title=title)
    figures.show()


def step_work(panels: dict[str, list[tuple[int, int]]], title: str = "") -> None:
    """The positions that each step computes: {name: [(of prompts, decoded)]}, a panel per name."""
    _, places = figures.plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=(8.0, 2.8))
    for axes, (name, steps) in zip(places[0], panels.items(), strict=True):
        prompts, decoded = zip(*steps, strict=True)
        axes.bar(range(len(steps)), decoded, color=BLUE, label="decoded")
        axes.bar(range(len(steps)), prompts, bottom=decoded, color=figures.ORANGE,
                 label="prompt")
        axes.set(xlabel="step", title=name)
        axes.xaxis.get_major_locator().set_params(integer=True)
    places[0, 0].set_ylabel("positions")
    places[0, 0].legend(loc="upper right", fontsize=9)
    if title:
        places[0, 0].figure.suptitle(title, fontsize=12, weight="bold", x=0.01, ha="left")
    figures.show()


# ---- load


def throughput_latency(curves: dict[str, dict], title: str = "", tokens: bool = True) -> None:
    """Latency over throughput, a point per number of clients: the median, labelled with the
    number, and the 95th percentile above it as a thin line.

    curves: {name: {clients: Load or its summary}}; tokens: tokens/s, else requests/s.
    """
    rate = "tokens_per_second" if tokens else "requests_per_second"
    _, axes = figures.figure()
    ends = []
    for index, (name, loads) in enumerate(curves.items()):
        tint = figures.CYCLE[index % len(figures.CYCLE)]
        points = [(many, getattr(load, "summary", load)) for many, load in sorted(loads.items())]
        xs = [summary[rate] for _, summary in points]
        middle, high = ([summary[f"latency_p{p}"] for _, summary in points] for p in (50, 95))
        axes.plot(xs, high, "--", color=tint, linewidth=1, alpha=0.7)
        axes.plot(xs, middle, "o-", color=tint)
        for (many, _), x, y in zip(points, xs, middle):
            axes.annotate(str(many), (x, y), xytext=(0, -13), textcoords="offset points",
                          ha="center", fontsize=9, color=tint)
        ends.append((name, xs[-1], middle[-1], tint))
    axes.set(xlabel="tokens/s" if tokens else "requests/s", ylabel="latency in s", title=title)
    axes.margins(x=0.06)
    axes.set(xlim=(0, None), ylim=(0, None))
    if len(ends) > 1:
        figures._label_ends(axes, ends)
    axes.text(0.01, 0.97, "dashed: 95th percentile; numbers: clients", fontsize=9, color=GREY,
              transform=axes.transAxes, va="top")
    figures.show()


def arrivals(
    streams: dict[str, Sequence[float]],
    title: str = "",
    unit: str = "s",
    since: str = "the request",
) -> dict:
    """One row per stream, a tick per arrival, the first in gold. streams: {name: moments}.

    Returns {name: moment of the first arrival}.
    """
    height = 1.2 + 0.3 * len(streams)
    _, axes = figures.plt.subplots(figsize=(8.0, height))
    for row, moments in enumerate(streams.values()):
        axes.plot([0, max(moments)], [row, row], color=PALE, linewidth=6, zorder=0)
        axes.plot(
            moments, [row] * len(moments), "|", color=BLUE, markersize=13, markeredgewidth=1.3
        )
        axes.plot(min(moments), row, "|", color=GOLD, markersize=17, markeredgewidth=3)
    figures.lanes(axes, list(streams))
    axes.set(xlabel=f"{unit} since {since}; gold: the first of each row", title=title)
    axes.set(ylim=(len(streams) - 0.4, -0.6), xlim=(0, None))
    figures.show()
    return {name: min(moments) for name, moments in streams.items()}


def over_time(
    frame: pd.DataFrame,
    columns: Collection[str],
    marks: dict[str, float] | None = None,
    title: str = "",
) -> None:
    """Small panels on one time axis, one for each column of a frame of scraped metrics.

    frame     seconds in a column "seconds" or in the index
    columns   names, or {name: label}; a counter ("…_total") is drawn as its rise per second
    marks     {text: second}: events to mark
    """
    labels = columns if isinstance(columns, dict) else {name: _plain(name) for name in columns}
    seconds = np.asarray(frame.get("seconds", frame.index), dtype=float)
    _, places = figures.plt.subplots(len(labels), 1, sharex=True, squeeze=False,
                                     figsize=(8.0, 0.9 + 1.05 * len(labels)))
    for index, (axes, (name, label)) in enumerate(zip(places[:, 0], labels.items())):
        values, tint = np.asarray(frame[name], dtype=float), figures.CYCLE[index % 4]
        if name.endswith("_total"):
            values = rate(seconds, values)
        axes.fill_between(seconds, 0, values, color=tint, alpha=0.15, linewidth=0, step="post")
        axes.step(seconds, values, where="post", color=tint, linewidth=1.6)
        axes.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=10)
        axes.set_ylim(bottom=0)
        axes.margins(x=0)
        for when in (marks or {}).values():
            axes.axvline(when, color=GOLD, linewidth=1.6, linestyle="--")
    top = places[0, 0]
    top.set_title(title, pad=10 if not marks else 22)
    for text, when in (marks or {}).items():
        top.annotate(text, (when, 1.0), xycoords=("data", "axes fraction"), xytext=(2, 3),
                     textcoords="offset points", color=GOLD, fontsize=9)
    places[-1, 0].set_xlabel("s")
    top.figure.align_ylabels()
    figures.show()


def rate(seconds: Sequence[float], totals: Sequence[float]) -> np.ndarray:
    """How much a counter rises per second between two samples. It restarts from 0 with its
    process: then its new value is the rise."""
    rises = np.diff(totals)
    rises = np.where(rises < 0, totals[1:], rises)
    steps = np.maximum(np.diff(seconds), 1e-9)
    return np.concatenate([rises / steps, [np.nan]])


def _plain(name):
    """kintsugi_tokens_total -> tokens/s; kintsugi_queue_waiting -> queue waiting."""
    words = name.removeprefix("kintsugi_").removeprefix("nv_")
    if words.endswith("_total"):
        words = words.removesuffix("_total") + "/s"
    return words.replace("_", " ").replace("kv ", "KV ")


def who_answered(
    times: Sequence[float],
    names: Sequence[str],
    marks: dict[str, float] | None = None,
    title: str = "",
    clients: Sequence[int] | None = None,
) -> dict:
    """A dot per answer over time, in the row and the colour of its source (a version or a status),
    with the number of answers at the right. clients: the client of each answer; each has its own
    height within the row. Returns {name: answers}."""
    rows = list(dict.fromkeys(names))
    most = max(clients, default=0) if clients else 0
    _, axes = figures.plt.subplots(figsize=(8.0, 1.3 + (0.7 if most else 0.35) * len(rows)))
    for row, name in enumerate(rows):
        own = [number for number, other in enumerate(names) if other == name]
        heights = [row + (0.7 * clients[n] / most - 0.35 if most else 0) for n in own]
        tint = figures.CYCLE[row % len(figures.CYCLE)]
        look = {"color": tint, "alpha": 0.6, "markersize": 5 if most else 7}
        axes.plot([times[number] for number in own], heights, "o", **look)
        axes.annotate(f"{len(own)} answers", (1.01, row), xycoords=("axes fraction", "data"),
                      va="center", color=tint)
    for text, when in (marks or {}).items():
        axes.axvline(when, color=GOLD, linewidth=1.6, linestyle="--")
        axes.annotate(text, (when, -0.62), xytext=(3, 0), textcoords="offset points", color=GOLD,
                      fontsize=9, va="top")
    figures.lanes(axes, rows)
    axes.set(xlabel="s", ylim=(len(rows) - 0.4, -0.7), title=title)
    figures.show()
    return {name: sum(other == name for other in names) for name in rows}


# ---- predictions


def decode_step(
    tables: dict[str, pd.DataFrame] | pd.DataFrame, batch: int | None = None, title: str = ""
) -> None:
    """A decode step by what it waits for, a bar per tp: {machine: frame of
    `utils.planner.decode.over`}, each in its own panel with its own scale.

    batch: which rows of the frames to draw; None: those of the first batch.
    """
    tables = tables if isinstance(tables, dict) else {"": tables}
    _, places = figures.plt.subplots(1, len(tables), squeeze=False, figsize=(8.0, 3.0))
    for axes, (name, frame) in zip(places[0], tables.items(), strict=True):
        wanted = frame["batch"].iloc[0] if batch is None else batch
        rows = frame[frame["batch"] == wanted]
        if rows.empty:
            raise ValueError(f"batch {wanted} is not in the frame: {sorted(set(frame['batch']))}")
        parts = {
            f"tp {row['tp']:.0f}": {PARTS[kind][0]: 1e3 * row[kind] for kind in KINDS}
            for _, row in rows.iterrows()
        }
        figures.stack(parts, unit="ms", title=name, colors=dict(PARTS.values()), ax=axes)
        axes.set_xlabel(f"ms per step, batch {wanted}")
        handles, texts = axes.get_legend_handles_labels()
        axes.get_legend().remove()
    axes.figure.legend(handles, texts, loc="outside lower center", ncols=5, fontsize=9,
                       handlelength=1, columnspacing=1.2)
    if title:
        axes.figure.suptitle(title, fontsize=12, weight="bold", x=0.01, ha="left")
    figures.show()
