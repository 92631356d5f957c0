"""PyTorch's trace files, one per rank: where did each step's time go, and which rank was late?

    traces = read("traces")             # files, or a folder, of .json and .json.gz
    split(traces[0])                    # one rank's mean step: compute, communication, data …
    late(traces)                        # {rank: ms per step that the others wait for it}

Any run recorded by `torch.profiler` will do, on CPU with gloo or on GPUs with NCCL. The results
depend on what was recorded: `record_shapes=True` gives bytes, `with_stack=True` places in the
program, `profiler.step()` steps. Without the last, a step ends with the optimizer's; without an
optimizer the whole trace is one step.

Each moment of a step belongs to one kind, the first that applies, so the kinds add up to the step:

    on a GPU                                    on a CPU, in the thread that takes the steps
    compute        a kernel or a copy runs      data           inside DataLoader's __next__
    bubble         only a send or receive       compute        inside an operator
    communication  only a collective            bubble         a send or receive is under way
    data           inside DataLoader.__next__   communication  a collective is under way
    host           the GPU is idle              host           in no operator: Python, or waiting

Communication therefore means *exposed* communication: whatever overlaps with computation costs
nothing here. On a CPU, a collective in the background of plain Python also counts as exposed: a
trace cannot tell waiting from running Python. There, a send or receive ends when the program calls
`wait()`, so only the time after the last operator within it counts. On a GPU, a kernel counts in
the step in which it runs.

A collective begins when its rank arrives and ends when all ranks have arrived: the rank that waits
least is the late one. Collectives of several ranks are matched by their step, name, group, size and
order; clocks are aligned by `baseTimeNanoseconds` on one machine and by the ends of collectives
across machines. gloo's traces name no group.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TextIO

import numpy as np

from utils.measure.profile import FACTS, Span, operation

KINDS = ("compute", "communication", "data", "bubble", "host")
ON_GPU = ("compute", "bubble", "communication", "data")  # the first that applies counts
ON_CPU = ("data", "compute", "bubble", "communication", "wrapper")  # wrapper: see _layer
POINT_TO_POINT = ("send", "recv")
TOGETHER = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)  # no rank can leave before all have arrived
BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "long int": 8,
    "short": 2, "char": 1, "signed char": 1, "byte": 1, "unsigned char": 1, "bool": 1,
}
LIBRARIES = {"torch", "transformers", "accelerate", "deepspeed", "lightning", "numpy", "functorch"}


class TraceError(ValueError):
    """A file that is not a readable trace, or traces that do not belong together."""


@dataclass(frozen=True)
class Split:
    """The time of a step on one rank: ms of each kind, which add up to the step."""

    rank: int
    step: int | None  # None: the mean of all steps
    compute: float
    communication: float
    data: float
    bubble: float
    host: float

    @property
    def total(self) -> float:
        return sum(getattr(self, kind) for kind in KINDS)

    @property
    def busy(self) -> float:
        """ms during which this rank did not wait for another."""
        return self.compute + self.data + self.host


@dataclass(frozen=True)
class Collective:
    """A collective, send or receive on one rank, including the wait for the others."""

    op: str  # all_reduce, all_gather, send …
    start: float  # ms, on the clock of its trace
    end: float
    bytes: int | None  # of this rank's input; None if the trace has no sizes
    group: str  # "" if the trace does not name it

    @property
    def ms(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Wait:
    """A wait of the program for a value that was not yet computed, as in `.item()`."""

    op: str
    start: float
    ms: float
    where: str  # "in step (train.py:40)", the function's first line; "" without stacks


@dataclass(frozen=True)
class Step:
    number: int
    start: float  # ms
    end: float


@dataclass
class Trace:
    """The data kept from a trace file; times in ms on a clock that ranks of a machine share."""

    path: Path
    rank: int
    world_size: int | None
    host: str
    gpu: bool
    marked: bool  # the steps are marked by the profiler
    steps: list[Step]
    layers: dict[str, np.ndarray]  # {kind: (n, 2) starts and ends}, which may overlap
    collectives: list[Collective]
    kernels: dict[str, tuple[int, float]]  # {kernel or operator: (calls, ms of its own)}
    waits: list[Wait]
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def clock(self) -> float:
        return self.steps[0].start


# ---- 1. reading


def read(paths: str | Path | Iterable[str | Path]) -> list[Trace]:
    """Read the traces of files and folders, sorted by rank.

    The rank comes from the trace, else from the file's name (rank3, rank-3), else from the order.
    Raises TraceError, which names the file. A file's text is read into memory as a whole, but its
    events are parsed one at a time.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    traces = []
    for path in map(Path, given):
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.name.endswith((".json", ".json.gz"))]
            found = [trace for trace in map(_read_if_trace, inside) if trace]
            if not found:
                raise TraceError(f"{path} holds no trace: export_chrome_trace writes .json(.gz)")
            traces += found
        else:
            traces.append(_read_file(path))
    if not traces:
        raise TraceError("no trace is given: name files or a folder")
    _number(traces)
    return sorted(traces, key=lambda trace: (trace.rank, trace.clock))


def _number(traces):
    """Assign ranks to traces that have none, and reject two traces of the same rank."""
    taken = {trace.rank for trace in traces}
    for trace in traces:
        if trace.rank < 0:
            trace.rank = next(n for n in range(len(traces)) if n not in taken)
            taken.add(trace.rank)
    seen = {}
    for trace in traces:
        for step in trace.steps:
            other = seen.setdefault((trace.rank, step.number if trace.marked else None), trace)
            if other is not trace:
                raise TraceError(
                    f"{other.path.name} and {trace.path.name} are both of rank {trace.rank}: give "
                    "one trace per rank, all of one run"
                )


def _read_if_trace(path):
    """The trace in a file of a folder; None for other JSON."""
    with _opened(path) as file:
        try:
            if '"traceEvents"' not in file.read(1 << 20) and path.stat().st_size > 1 << 16:
                return None
        except (OSError, EOFError, zlib.error):
            pass
    try:
        return _read_file(path)
    except _NoTraceError:
        return None


class _NoTraceError(TraceError):
    """JSON that is not a trace."""


def _opened(path) -> TextIO:
    try:  # function names in a trace are not always UTF-8
        if path.name.endswith(".gz"):
            return gzip.open(path, "rt", encoding="utf-8", errors="replace")
        return open(path, encoding="utf-8", errors="replace")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None


def _read_file(path):
    rows = _Rows()
    with _opened(path) as file:
        try:
            top = _parse(file, rows.add)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path} cannot be read: {error}") from None
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path} is not JSON from a profiler: {error}") from None
    if top is None:
        raise _NoTraceError(f"{path} has no traceEvents: it is not a profiler trace")
    trace = rows.trace(path, top)
    if trace is None:
        raise _NoTraceError(
            f"{path} holds no operators and no kernels: was the profiler on while steps ran?"
        )
    return trace


def _parse(file: TextIO, event: Callable[[dict], None]) -> dict | None:
    """Call `event` for each event of a trace, without keeping it; return the trace's other entries.

    None for a file without events. Raises ValueError for invalid JSON.
    """

    def taken(found: dict) -> dict | None:
        if "ph" not in found:  # part of an event, or another entry of the trace
            return found
        event(found)
        return None

    top = json.load(file, object_hook=taken, strict=False)
    if isinstance(top, list):  # Chrome's other form: the events alone
        return {}
    if not isinstance(top, dict):
        raise ValueError(f"it holds {top!s:.40}")
    return top if isinstance(top.pop("traceEvents", None), list) else None


class _Rows:
    """The relevant events, as columns: an event takes 30 bytes instead of a dict's kilobyte."""

    def __init__(self):
        self.names, self.threads = {}, {}
        self.rows = {kind: _Columns() for kind in ("cpu", "gpu", "frame")}
        self.collectives, self.steps, self.optimizer, self.annotated = [], [], [], Counter()

    def add(self, event: dict) -> None:
        if event.get("ph") != "X" or "dur" not in event:
            return
        name, kind = str(event.get("name", "")), str(event.get("cat", "")).lower()
        start, ms = float(event["ts"]) / 1e3, float(event["dur"]) / 1e3
        args = event.get("args") or {}
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            op = _of_kernel(name, args)
            if op:
                self._collective(op, start, ms, args)
            row = "gpu"
        elif kind == "python_function":
            if not _own_frame(name):
                return
            row = "frame"
        elif kind in ("cpu_op", "user_annotation", "operator", "cuda_runtime", "cuda_driver"):
            if name.startswith("ProfilerStep#"):
                number = name.partition("#")[2]
                if number.isdigit():
                    self.steps.append((Step(int(number), start, start + ms), self._thread(event)))
                return
            if name.startswith("Optimizer.step"):
                self.optimizer.append((name, start + ms, self._thread(event)))
            if name.startswith("gloo:"):
                self._collective(operation(name[5:]), start, ms, args)
            elif name.startswith("nccl:"):
                self.annotated[operation(name[5:])] += 1
            if kind == "user_annotation" and not name.startswith(("gloo:", "enumerate(DataLoader")):
                return
            if kind.startswith("cuda") and "Synchronize" not in name:
                return
            row = "cpu"
            if _waits(name) and args.get("Call stack"):
                frames = [f for f in args["Call stack"].split(";") if _own_frame(f)]
                for frame in frames[:1]:
                    self.rows["frame"].add(start, ms, self._thread(event), self._name(frame))
        else:
            return
        self.rows[row].add(start, ms, self._thread(event), self._name(name))

    def _thread(self, event):
        key = event.get("pid"), event.get("tid")
        return self.threads.setdefault(key, len(self.threads))

    def _name(self, name):
        return self.names.setdefault(name, len(self.names))

    def _collective(self, op, start, ms, args):
        ranks = args.get("Process Group Ranks")
        group = "" if ranks is None else f"{args.get('Process Group Name', '')} {ranks}"
        self.collectives.append(Collective(op, start, start + ms, _size(args), group))

    def trace(self, path: Path, top: dict) -> Trace | None:
        names = list(self.names)
        cpu, gpu, frames = (self.rows[kind].arrays() for kind in ("cpu", "gpu", "frame"))
        if not len(cpu) and not len(gpu):
            return None
        if self.annotated["all_to_all"] and not self.annotated["send"] + self.annotated["recv"]:
            self.collectives = [  # NCCL implements it with sends; older traces show only those
                replace(c, op="all_to_all") if c.op == "send" else c for c in self.collectives
            ]
        base = float(top.get("baseTimeNanoseconds") or 0) / 1e6  # ms
        info = top.get("distributedInfo") or {}
        main = self._main_thread(cpu, names)
        steps, marked = self._steps(main, cpu, gpu)
        mine = cpu[np.isin(cpu["thread"], [main, *self._backward_threads(cpu, names)])]

        layers = defaultdict(list)
        for row, name in enumerate(names):  # each name is classified once
            layers[_layer(name)].append(row)
        intervals = {
            layer: _intervals(mine[np.isin(mine["name"], rows)]) for layer, rows in layers.items()
        }
        talk = [(c.start, c.end) for c in self.collectives if c.op not in POINT_TO_POINT]
        p2p = [(c.start, c.end) for c in self.collectives if c.op in POINT_TO_POINT]
        if len(gpu):
            talking = [row for row, name in enumerate(names) if "nccl" in name.lower()]
            intervals["compute"] = _intervals(gpu[~np.isin(gpu["name"], talking)])
            intervals["communication"] = intervals["bubble"] = np.empty((0, 2))
            own = _by_name(gpu, names)
        else:
            own = _own_times(mine, names)
            p2p = _waited(p2p, mine)
        for layer, times in (("communication", talk), ("bubble", p2p)):
            known = intervals.get(layer, np.empty((0, 2)))
            intervals[layer] = np.concatenate([known, np.array(times).reshape(-1, 2)])
        number = info.get("rank")
        if number is None:
            named = re.search(r"rank[-_ ]?(\d+)", path.name)
            number = int(named[1]) if named else -1
        for one in intervals.values():
            one += base
        facts = top.get(FACTS) or {}
        return Trace(
            path=path,
            rank=int(number),
            world_size=info.get("world_size"),
            host=str(top.get("host_name", "")),
            gpu=bool(len(gpu)),
            marked=marked,
            steps=[Step(s.number, s.start + base, s.end + base) for s in steps],
            layers=intervals,
            collectives=[
                replace(c, start=c.start + base, end=c.end + base)
                for c in sorted(self.collectives, key=lambda c: c.start)
            ],
            kernels=own,
            waits=_asked_values(mine, frames, names, base),
            facts=json.loads(facts) if isinstance(facts, str) else facts,
        )

    def _main_thread(self, cpu, names):
        """The thread that marks the steps, or else runs the optimizer, or else most operators."""
        marks = Counter(thread for _, thread in self.steps)
        marks = marks or Counter(thread for *_, thread in self.optimizer)
        if not marks:
            ops = [row for row, name in enumerate(names) if not name.startswith("gloo:")]
            marks = Counter(cpu["thread"][np.isin(cpu["name"], ops)].tolist())
        return marks.most_common(1)[0][0] if marks else -1

    def _backward_threads(self, cpu, names):
        rows = [i for i, name in enumerate(names) if name.startswith("autograd::engine::evaluate")]
        return np.unique(cpu["thread"][np.isin(cpu["name"], rows)]).tolist()

    def _steps(self, main, cpu, gpu):
        """The marked steps; else from one optimizer end to the next; else the whole trace."""
        if self.steps:
            return sorted({step for step, _ in self.steps}, key=lambda step: step.start), True
        rows = cpu[cpu["thread"] == main] if len(cpu) else gpu
        first = min(rows["start"].min(), *(r["start"].min() for r in (gpu,) if len(r)), np.inf)
        last = max(rows["end"].max(), *(r["end"].max() for r in (gpu,) if len(r)), -np.inf)
        ends = []
        if self.optimizer:
            often = Counter(name for name, *_ in self.optimizer).most_common(1)[0][0]
            ends = sorted(end for name, end, _ in self.optimizer if name == often)
        edges = [float(first), *ends] if len(ends) > 1 else [float(first), float(last)]
        return [Step(n, a, b) for n, (a, b) in enumerate(pairwise(edges))], False


class _Columns:
    KIND = np.dtype([("start", "f8"), ("end", "f8"), ("thread", "i4"), ("name", "i4")])

    def __init__(self):
        self.columns = array("d"), array("d"), array("i"), array("i")

    def add(self, start: float, ms: float, thread: int, name: int) -> None:
        for column, entry in zip(self.columns, (start, start + ms, thread, name)):
            column.append(entry)

    def arrays(self) -> np.ndarray:
        rows = np.empty(len(self.columns[0]), self.KIND)
        for key, column in zip(self.KIND.names, self.columns):
            rows[key] = column
        return rows


def _layer(name: str) -> str:
    """The kind of an operator of the main thread.

    A wrapper only calls other operators, and may wait in doing so: a node of autograd, an autograd
    function in Python, `.item()`. It counts as compute while no collective is under way.
    """
    if name.startswith("enumerate(DataLoader"):
        return "data"
    if name.startswith(("gloo:", "nccl:")):
        return "none"  # listed among the collectives
    if name.startswith(("c10d::", "_c10d_functional::", "record_param_comms", "_dtensor::")):
        return "bubble" if re.search("send|recv", name) else "communication"
    wrapper = "::" not in name or _waits(name) or name.startswith(("autograd::", "torch::autograd"))
    return "wrapper" if wrapper else "compute"


def _waits(name: str) -> bool:
    """Whether an operator passes a value from the device to Python, or waits for the device."""
    return name in ("aten::item", "aten::_local_scalar_dense") or "Synchronize" in name


def _of_kernel(name: str, args: dict) -> str | None:
    """The collective that a kernel runs, or None."""
    if "nccl" not in name.lower():
        return None
    return operation(str(args.get("Collective name") or name))


def _size(args: dict) -> int | None:
    """Bytes that a rank passed to a collective, if its event says so."""
    kind = str(args.get("dtype") or "").lower().replace("c10::", "")
    if "In msg nelems" in args and kind in BYTES:
        return int(args["In msg nelems"]) * BYTES[kind]
    dims, kinds = args.get("Input Dims") or [], args.get("Input type") or []
    total = 0
    for shape, kind in zip(dims, kinds):
        size = BYTES.get(str(kind).lower().replace("c10::", ""))
        if size and all(isinstance(n, int) for n in shape):
            total += size * int(np.prod(shape, dtype=np.int64))
    return total or None


def _own_frame(name: str) -> bool:
    """Whether a frame such as `train.py(40): step` belongs to the user's own program."""
    file, bracket, _ = name.partition("(")
    if not bracket or not file.endswith((".py", ">")) or file.startswith(("<built-in", "<frozen")):
        return False
    if "site-packages/" in file or "/lib/python" in file or file == "<string>":
        return False
    top = file.split("/")[0].removesuffix(".py")
    return top not in LIBRARIES and top not in sys.stdlib_module_names


def _intervals(rows) -> np.ndarray:
    return np.stack([rows["start"], rows["end"]], axis=1)


def _waited(spans: list[tuple[float, float]], rows) -> list[tuple[float, float]]:
    """The part of each send and receive during which its thread may have waited for it.

    With gloo it lasts until the program calls `wait()`. Operators that began within it ran before
    that call, so only the time after the last of them can be waiting. An `isend` whose `wait()`
    comes later costs nothing.
    """
    rows = rows[rows["start"].argsort()]
    found = []
    for start, end in spans:
        first, last = np.searchsorted(rows["start"], [np.nextafter(start, np.inf), end])
        done = rows["end"][first:last].max(initial=start)
        if done < end:
            found.append((done, end))
    return found


def _by_name(rows, names) -> dict[str, tuple[int, float]]:
    calls = np.bincount(rows["name"], minlength=len(names))
    ms = np.bincount(rows["name"], rows["end"] - rows["start"], minlength=len(names))
    return {names[i]: (int(calls[i]), float(ms[i])) for i in np.flatnonzero(calls)}


def _own_times(rows, names) -> dict[str, tuple[int, float]]:
    """{operator: (calls, ms)}, without the time of the operators it calls."""
    rows = rows[np.lexsort((-rows["end"], rows["start"], rows["thread"]))]
    own = (rows["end"] - rows["start"]).tolist()
    lengths, stack, thread = list(own), [], None
    for i, row in enumerate(zip(rows["start"].tolist(), rows["end"].tolist(), rows["thread"])):
        start, end, of = row
        if of != thread:
            stack, thread = [], of
        while stack and stack[-1][0] <= start:
            stack.pop()
        if stack and end <= stack[-1][0] + 1e-6:
            own[stack[-1][1]] -= lengths[i]
        stack.append((end, i))
    calls = np.bincount(rows["name"], minlength=len(names))
    ms = np.bincount(rows["name"], np.array(own), minlength=len(names))
    found = {names[i]: (int(calls[i]), float(ms[i])) for i in np.flatnonzero(calls)}
    return {name: one for name, one in found.items() if _layer(name) in ("compute", "wrapper")}


def _asked_values(rows, frames, names, base) -> list[Wait]:
    """The `.item()` calls of the main threads, with the function that made each."""
    asked = [i for i, name in enumerate(names) if name == "aten::item" or "Synchronize" in name]
    bare = [i for i, name in enumerate(names) if name == "aten::_local_scalar_dense"]
    if not np.isin(rows["name"], asked).any():
        asked = bare
    waits = []
    for row in rows[np.isin(rows["name"], asked)]:
        around = frames[(frames["start"] <= row["start"]) & (frames["end"] >= row["end"])]
        around = around[around["thread"] == row["thread"]]
        where = _place(names[around[around["start"].argmax()]["name"]]) if len(around) else ""
        start, ms = float(row["start"]), float(row["end"] - row["start"])
        waits.append(Wait(names[row["name"]], start + base, ms, where))
    return waits


def _place(frame: str) -> str:
    """`train.py(40): step` -> "in step (train.py:40)"."""
    file, line, function = re.fullmatch(r"(.*)\((\d+)\): (.*)", frame, re.DOTALL).groups()
    return f"in {function} ({file}:{line})"


# ---- 2. the time of one rank


def splits(trace: Trace) -> list[Split]:
    """One rank's steps, each split into KINDS."""
    order = ON_GPU if trace.gpu else ON_CPU
    layers = [trace.layers.get(kind, np.empty((0, 2))) for kind in order]
    edges = np.array([[step.start, step.end] for step in trace.steps])
    points = np.unique(np.concatenate([edges.ravel(), *(layer.ravel() for layer in layers)]))
    kinds = np.full(len(points) - 1, len(order))  # nothing begins or ends between two points
    for number, layer in reversed(list(enumerate(layers))):
        active = np.zeros(len(points), dtype=np.int64)
        np.add.at(active, np.searchsorted(points, layer[:, 0]), 1)
        np.add.at(active, np.searchsorted(points, layer[:, 1]), -1)
        kinds[active.cumsum()[:-1] > 0] = number
    lengths, found = np.diff(points), []
    for step, (start, end) in zip(trace.steps, edges):
        inside = slice(*np.searchsorted(points, [start, end]))
        ms = np.bincount(kinds[inside], lengths[inside], minlength=len(order) + 1)
        time = dict(zip((*order, "host"), ms.tolist()))
        time["compute"] += time.pop("wrapper", 0.0)
        found.append(Split(trace.rank, step.number if trace.marked else None, **time))
    return found


def split(trace: Trace) -> Split:
    """One rank's mean step, split into KINDS."""
    return mean(splits(trace))


def mean(some: Sequence[Split]) -> Split:
    ms = {kind: fmean(getattr(one, kind) for one in some) for kind in KINDS}
    return Split(some[0].rank, None, **ms)


def spans(trace: Trace, step: int = 0, *, zero: float | None = None) -> list[Span]:
    """The `step`-th step of a trace as spans for `utils.drawing.timeline`: compute and collectives.

    Times are in ms since the step began, or since `zero`, which puts several ranks on one clock:
    traces[0].steps[step].start.
    """
    start, end = trace.steps[step].start, trace.steps[step].end
    zero = start if zero is None else zero
    rows = trace.layers.get("compute", np.empty((0, 2)))
    rows = rows[(rows[:, 1] > start) & (rows[:, 0] < end)]
    joined: list[list[float]] = []
    for a, b in rows[rows[:, 0].argsort()].tolist():
        if joined and a <= joined[-1][1] + 0.1:
            joined[-1][1] = max(joined[-1][1], b)
        else:
            joined.append([a, b])
    found = [Span("compute", a - zero, b - zero) for a, b in joined]
    found += [
        Span(c.op, c.start - zero, c.end - zero)
        for c in trace.collectives
        if start <= c.start < end
    ]
    return sorted(found, key=lambda span: span.start)


def busy(trace: Trace, step: int = 0, bins: int = 200) -> dict[str, np.ndarray]:
    """How busy the `step`-th step is over time: {"compute": (bins,), "communication": (bins,)}.

    Each value is the fraction of one of `bins` equal intervals, 0 to 1, during which at least one
    such kernel (on a CPU: operator) ran.
    """
    edges = np.linspace(trace.steps[step].start, trace.steps[step].end, bins + 1)
    shares = {}
    for kind in ("compute", "communication"):
        rows = trace.layers.get(kind, np.empty((0, 2)))
        rows = np.concatenate([np.zeros((1, 2)), rows[rows[:, 0].argsort()]])
        ends = np.maximum.accumulate(rows[:, 1])
        starts = np.minimum(np.maximum(rows[:, 0], np.append(0.0, ends[:-1])), ends)
        total = (ends - starts).cumsum()  # ms during which anything ran, up to each end
        points = np.stack([starts, ends], axis=1).ravel()
        before = np.stack([total - (ends - starts), total], axis=1).ravel()
        shares[kind] = np.diff(np.interp(edges, points, before)) / np.diff(edges)
    return shares


# ---- 3. several ranks side by side


def late(traces: Sequence[Trace]) -> dict[int, float]:
    """{rank: ms per step that the others wait because it has not yet reached a collective}.

    Only collectives that no rank can leave before all have arrived count. A wait lasts from the
    moment when half of the other ranks have arrived until the last one does; overlapping waits
    count once.
    """
    waits, steps = defaultdict(list), set()
    for key, come in _aligned(traces).items():
        steps.add(key[0])
        starts = {rank: collective.start for rank, collective in come.items()}
        last = max(starts, key=starts.get)
        first = median(start for rank, start in starts.items() if rank != last)
        waits[last, key[0]].append((first, starts[last]))
    totals = dict.fromkeys((trace.rank for trace in traces), 0.0)
    for (rank, _), some in waits.items():
        end = -np.inf
        for a, b in sorted(some):
            totals[rank] += max(0.0, b - max(a, end))
            end = max(end, b)
    return {rank: total / max(1, len(steps)) for rank, total in totals.items()}


def _aligned(traces: Sequence[Trace]) -> dict[tuple, dict[int, Collective]]:
    """{(step, op, group, bytes, number): {rank: the collective}} on one clock."""
    found = _by_order(traces)
    if len({trace.host for trace in traces}) > 1:  # the machines' clocks differ: align the ends
        apart = defaultdict(list)
        for come in found.values():
            end = median(collective.end for collective in come.values())
            for rank, collective in come.items():
                apart[rank].append(collective.end - end)
        for come in found.values():
            for rank, one in come.items():
                shift = median(apart[rank])
                come[rank] = replace(one, start=one.start - shift, end=one.end - shift)
    return {
        key: come
        for key, come in found.items()
        if max(c.start for c in come.values()) <= min(c.end for c in come.values()) + 1.0
    }


def _by_order(traces):
    by_key = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        starts = [step.start for step in trace.steps]
        for one in trace.collectives:
            index = int(np.searchsorted(starts, one.start, side="right")) - 1
            if one.op in TOGETHER and index >= 0 and one.start < trace.steps[index].end:
                key = trace.steps[index].number, one.op, one.group, one.bytes
                by_key[key][trace.rank].append(one)
    found = {}
    for key, by_rank in by_key.items():
        usual = Counter(map(len, by_rank.values())).most_common(1)[0][0]
        by_rank = {rank: some for rank, some in by_rank.items() if len(some) == usual}
        if len(by_rank) > 1:
            for number in range(usual):
                found[*key, number] = {rank: some[number] for rank, some in by_rank.items()}
    return found
