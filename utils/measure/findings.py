"""What the traces of a run show: which rank is late, what costs the most, and how to fix it.

    made = report("traces")             # files or folders, or traces that were read
    print(made)                         # tables, then the findings as sentences
    made.findings[0].ms                 # the most expensive finding, ms per step
    made.ranks, made.late               # each rank's mean step; ms that the others wait for it

Each finding looks for one cause in the figures of utils/measure/traces.py, which says what they
mean.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from utils.measure.traces import (
    KINDS,
    POINT_TO_POINT,
    Collective,
    Split,
    Trace,
    late,
    mean,
    read,
    splits,
)


@dataclass(frozen=True)
class Finding:
    """Something that costs time, as a sentence for people and as values for programs."""

    kind: str  # straggler, data, small collectives, wait, stages, bubble, communication …
    ms: float  # per step, about
    text: str
    rank: int | None = None
    where: str = ""  # "in step (train.py:40)", the function's first line; "" without stacks


# ---- 1. the report


@dataclass
class Report:
    """The mean step of each rank, which ranks are late, what costs the most, and why."""

    traces: list[Trace]
    steps: list[Split]  # of each rank, step by step
    ranks: list[Split]  # the mean step of each rank
    late: dict[int, float]  # ms per step that the others wait for a rank
    findings: list[Finding]  # the most expensive first

    @property
    def step_ms(self) -> float:
        """The mean step of all ranks."""
        return fmean(one.total for one in self.ranks)

    def table(self) -> Any:
        """One row per rank and step, in ms, as a pandas DataFrame."""
        import pandas

        return pandas.DataFrame([asdict(one) | {"total": one.total} for one in self.steps])

    def collectives(self) -> dict[str, dict[str, float | None]]:
        """{operation: calls, bytes and ms under way, per step of a rank}, averaged over ranks."""
        found = {}
        steps = sum(len(trace.steps) for trace in self.traces)
        for op in dict.fromkeys(c.op for trace in self.traces for c in trace.collectives):
            some = [c for trace in self.traces for c in _inside(trace) if c.op == op]
            sizes = [c.bytes for c in some if c.bytes is not None]
            known = bool(some) and len(sizes) == len(some)
            found[op] = {
                "calls": len(some) / steps,
                "bytes": sum(sizes) / steps if known else None,
                "ms": sum(c.ms for c in some) / steps,
            }
        return {op: one for op, one in found.items() if one["calls"]}

    def kernels(self, most: int = 8) -> dict[str, tuple[float, float]]:
        """{kernel, or operator on a CPU: (calls, ms of its own) per step}, averaged over ranks."""
        steps, total = sum(len(trace.steps) for trace in self.traces), defaultdict(lambda: [0, 0.0])
        for trace in self.traces:
            for name, (calls, ms) in trace.kernels.items():
                total[name][0] += calls
                total[name][1] += ms
        largest = sorted(total.items(), key=lambda item: -item[1][1])[:most]
        return {name: (calls / steps, ms / steps) for name, (calls, ms) in largest}

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a JSON file."""
        return {
            "step_ms": self.step_ms,
            "ranks": [_values(one) | {"late": self.late[one.rank]} for one in self.ranks],
            "steps": [_values(one) for one in self.steps],
            "collectives": self.collectives(),
            "kernels": {
                name: {"calls": calls, "ms": ms} for name, (calls, ms) in self.kernels(50).items()
            },
            "findings": [asdict(one) for one in self.findings],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def report(traces: str | Path | Sequence[str | Path | Trace]) -> Report:
    """Report where the time of these traces goes; paths are read first."""
    given = [traces] if isinstance(traces, (str, Path)) else list(traces)
    if not all(isinstance(one, Trace) for one in given):
        given = read(given)
    traces = given
    steps = [one for trace in traces for one in splits(trace)]
    by_rank = defaultdict(list)
    for one in steps:
        by_rank[one.rank].append(one)
    made = Report(traces, steps, [mean(some) for some in by_rank.values()], late(traces), [])
    found = [finding for look in LOOKS for finding in look(made)]
    made.findings = sorted(found, key=lambda finding: -finding.ms)
    return made


def _values(one: Split) -> dict:
    return asdict(one) | {"total": one.total}


def _inside(trace: Trace) -> list[Collective]:
    """The collectives that began in one of the steps."""
    starts = [step.start for step in trace.steps]
    indices = np.searchsorted(starts, [c.start for c in trace.collectives], side="right") - 1
    pairs = zip(trace.collectives, indices.tolist())
    return [c for c, index in pairs if index >= 0 and c.start < trace.steps[index].end]


# ---- 2. findings: each looks for one cause


def _straggler(made: Report) -> Iterator[Finding]:
    rank = max(made.late, key=made.late.get)
    ms = made.late[rank]
    if len(made.ranks) < 2 or ms < max(1.0, 0.05 * made.step_ms):
        return
    own = next(one for one in made.ranks if one.rank == rank)
    more = {
        kind: getattr(own, kind) - median(getattr(o, kind) for o in made.ranks if o.rank != rank)
        for kind in ("compute", "data", "host")
    }
    why = max(more, key=more.get)
    text = f"rank {rank} is late for the collectives: the others wait {_ms(ms)} per step for it"
    if more[why] > 0.3 * ms:
        text += f"; its {NAMED[why]} takes {_ms(more[why])} more than theirs"
    yield Finding("straggler", ms, text, rank)


def _data(made: Report) -> Iterator[Finding]:
    worst = max(made.ranks, key=lambda one: one.data)
    if worst.data > 0.1 * worst.total:
        text = (
            f"rank {worst.rank} waits {_ms(worst.data)} per step for its data loader, "
            f"{_percent(worst.data / worst.total)} of the step: num_workers, prefetch_factor, or "
            "less work per sample"
        )
        yield Finding("data", worst.data, text, worst.rank)


def _small_collectives(made: Report) -> Iterator[Finding]:
    for op, one in made.collectives().items():
        calls, size = one["calls"], one["bytes"]
        if op in POINT_TO_POINT or calls < 8:
            continue
        if size is None:
            if calls >= 50:
                text = f"{calls:.0f} {_plain(op)}s per step, sizes unknown: set record_shapes=True"
                yield Finding("small collectives", one["ms"], text)
        elif size / calls < 1 << 20:
            text = (
                f"{calls:.0f} {_plain(op)}s of {_bytes(size / calls)} per step: bucket them, "
                "because each pays the latency"
            )
            yield Finding("small collectives", one["ms"], text)


def _asked(made: Report) -> Iterator[Finding]:
    """How long `.item()` and similar calls wait, by place in the program."""
    total, calls, steps = Counter(), Counter(), Counter()
    for trace in made.traces:
        starts = [step.start for step in trace.steps]
        steps[trace.rank] += len(starts)
        for wait in trace.waits:
            index = int(np.searchsorted(starts, wait.start, side="right")) - 1
            if index >= 0 and wait.start < trace.steps[index].end:
                total[trace.rank, wait.op, wait.where] += wait.ms
                calls[trace.rank, wait.op, wait.where] += 1
    worst = {}
    for (rank, op, where), ms in total.items():
        if ms / steps[rank] > worst.get((op, where), (0.0,))[0]:
            worst[op, where] = ms / steps[rank], rank, calls[rank, op, where] / steps[rank]
    for (op, where), (ms, rank, often) in worst.items():
        if ms > max(1.0, 0.02 * made.step_ms):
            name = "`.item()`" if op.startswith("aten::") else f"`{op}`"
            place = f" {where}" if where else ""
            text = (
                f"{name}{place} waits {_ms(ms)} per step on rank {rank}, in {often:.3g} calls: "
                "read values rarely, and all at once"
            )
            yield Finding("wait", ms, text, rank, where)


def _stages(made: Report) -> Iterator[Finding]:
    bubble = fmean(one.bubble for one in made.ranks)
    if len(made.ranks) < 2 or bubble < 0.1 * made.step_ms:
        return
    slow = max(made.ranks, key=lambda one: one.busy)
    usual = median(one.busy for one in made.ranks if one is not slow)
    if slow.busy > 1.3 * usual:
        text = (
            f"rank {slow.rank} works {_ms(slow.busy)} per step, the others {_ms(usual)}: the "
            f"stages are unequal, and the ranks wait {_ms(bubble)} for messages on average"
        )
        yield Finding("stages", bubble, text, slow.rank)
    else:
        text = (
            f"the ranks wait {_ms(bubble)} per step for messages from other stages, "
            f"{_percent(bubble / made.step_ms)}: more micro-batches, or another schedule"
        )
        yield Finding("bubble", bubble, text)


def _exposed(made: Report) -> Iterator[Finding]:
    """Only the communication that even the last rank waits for; the straggler causes the rest."""
    least = min(made.ranks, key=lambda one: one.communication)
    if least.communication > 0.15 * made.step_ms:
        text = (
            f"even rank {least.rank}, which waits least, has {_ms(least.communication)} of "
            f"exposed collectives per step, {_percent(least.communication / least.total)}"
        )
        yield Finding("communication", least.communication, text, least.rank)


def _launching(made: Report) -> Iterator[Finding]:
    """Only the idle time that every rank has; the straggler finding covers any excess."""
    least = min(made.ranks, key=lambda one: one.host)
    if least.host < 0.15 * least.total:
        return
    whose = "every rank" if len(made.ranks) > 1 else f"rank {least.rank}"
    share = _percent(least.host / least.total)
    traces = [trace for trace in made.traces if trace.rank == least.rank]
    if not traces[0].gpu:
        text = (
            f"{whose} is in no operator for {_ms(least.host)} per step or more, {share}: Python, a "
            "file, a lock or a sleep; py-spy or with_stack=True shows where"
        )
    else:
        steps = sum(len(trace.steps) for trace in traces)
        kernels = [entry for trace in traces for entry in trace.kernels.items()]
        calls = sum(n for name, (n, _) in kernels if "nccl" not in name.lower()) / steps
        ms = sum(ms for name, (_, ms) in kernels if "nccl" not in name.lower()) / steps
        text = (
            f"the GPU of {whose} is idle for {_ms(least.host)} per step or more, {share}: "
        )
        if ms < 0.1 * max(1, calls):  # 100 µs: a launch takes the host a tenth of that
            text += (
                f"the host launches {calls:,.0f} kernels of {1e3 * ms / max(1, calls):.0f} µs; "
                "torch.compile, CUDA graphs, larger batches"
            )
        else:
            text += "the host does something else meanwhile, or waits; py-spy shows what"
    yield Finding("host", least.host, text, least.rank)


def _threads(made: Report) -> Iterator[Finding]:
    """Only for traces made by `profile.tracing`: a plain trace does not record CPU time."""
    known = {trace.rank: trace for trace in made.traces if trace.facts}
    for host in {trace.host for trace in known.values()}:
        here = [trace for trace in known.values() if trace.host == host]
        threads = sum(trace.facts["threads"] for trace in here)
        cores = max(trace.facts["cores"] for trace in here)
        if threads <= cores or max(trace.facts["threads"] for trace in here) == 1:
            continue
        steps = fmean(trace.facts["wall_ms"] / _step_ms(trace) for trace in here)
        cpu = sum(trace.facts["cpu_ms"] for trace in here) / max(1.0, steps)
        waited = fmean(trace.facts.get("queued_ms", 0.0) for trace in here) / max(1.0, steps)
        text = (
            f"{threads:.0f} threads of {len(here)} ranks share {cores:.0f} cores, and a step takes "
            f"{_ms(cpu)} of CPU time in {_ms(made.step_ms)}"
        )
        if waited:
            text += f"; a rank's threads wait {_ms(waited)} for a core"
        text += f": OMP_NUM_THREADS={max(1, int(cores) // len(here))}"
        yield Finding("threads", waited, text)


def _step_ms(trace: Trace) -> float:
    return fmean(step.end - step.start for step in trace.steps)


def _unseen(made: Report) -> Iterator[Finding]:
    world = max((trace.world_size or 1 for trace in made.traces), default=1)
    if world > len(made.ranks):
        verb = "has" if len(made.ranks) == 1 else "have"
        text = f"{len(made.ranks)} of {world} ranks {verb} a trace here: a late rank may be missing"
        yield Finding("missing", 0.0, text)
    if any(not trace.gpu and "nccl" in "".join(trace.kernels) for trace in made.traces):
        yield Finding("missing", 0.0, "no GPU was recorded: activities=[CPU, CUDA]")


LOOKS = (
    _straggler,
    _data,
    _small_collectives,
    _asked,
    _stages,
    _exposed,
    _launching,
    _threads,
    _unseen,
)
NAMED = {
    "compute": "compute",
    "communication": "exposed communication",
    "data": "data loading",
    "bubble": "pipeline bubble",
    "host": "time in no operator",
}


# ---- 3. as text

MANY = 16  # up to this many ranks, all are shown


def _lines(made: Report) -> Iterator[str]:
    count = {trace.rank: 0 for trace in made.traces}
    for trace in made.traces:
        count[trace.rank] += len(trace.steps)
    marks = "" if all(trace.marked for trace in made.traces) else " (no ProfilerStep marks)"
    yield f"{_counted(len(made.ranks), 'rank')}, {_counted(max(count.values()), 'step')}{marks}"
    yield ""
    yield f"{'ms per step':<12}" + "".join(f"{k:>14}" for k in (*KINDS, "step", "others wait"))
    shown = made.ranks
    if len(shown) > MANY:  # the late ranks, the slowest and the fastest
        order = sorted(shown, key=lambda one: (-made.late[one.rank], -one.busy))
        shown = sorted([*order[: MANY - 4], *order[-2:]], key=lambda one: one.rank)
    for one in shown:
        numbers = [*(getattr(one, kind) for kind in KINDS), one.total, made.late[one.rank]]
        yield f"rank {one.rank:<7}" + "".join(f"{n:>14.1f}" for n in numbers)
    if len(shown) < len(made.ranks):
        yield f"… and {len(made.ranks) - len(shown)} ranks between these"
    mean = [fmean(getattr(one, kind) for one in made.ranks) for kind in KINDS]
    yield f"{'share':<12}" + "".join(f"{_percent(n / made.step_ms):>14}" for n in mean)
    talk = made.collectives()
    if talk:
        yield ""
        yield f"{'collectives of a rank, per step':<44}{'calls':>8}{'bytes':>12}{'ms':>10}"
        for op, one in talk.items():
            size = "unknown" if one["bytes"] is None else _bytes(one["bytes"])
            yield f"{op:<44}{one['calls']:>8.3g}{size:>12}{one['ms']:>10.1f}"
    yield ""
    gpu = any(trace.gpu for trace in made.traces)
    yield f"{'kernels' if gpu else 'operators, excluding nested ones':<44}{'calls':>8}{'ms':>22}"
    for name, (calls, ms) in made.kernels().items():
        yield f"{name if len(name) < 44 else name[:42] + '…':<44}{calls:>8.4g}{ms:>22.1f}"
    yield ""
    yield "Findings, the most expensive first" if made.findings else "Nothing stands out."
    yield from (f"{number}. {one.text}." for number, one in enumerate(made.findings, start=1))


def _ms(ms: float) -> str:
    return f"{ms:.0f} ms" if ms >= 9.5 else f"{ms:.2g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _bytes(size: float) -> str:
    for unit, letters in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.3g} {letters}"
    return f"{size:.0f} B"


def _plain(op: str) -> str:
    return op.replace("_", "-")


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
