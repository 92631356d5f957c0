"""Traces: when does a rank compute, and when does it communicate?

    spans = profile.record(step)             # on a rank: runs step() 3 times, traces the last
    timeline({"rank 0": spans})              # in the notebook: utils.drawing.timeline
    profile.hidden(spans)                    # fraction of communication hidden by computation
    with profile.tracing("traces") as p: …   # files for utils.measure.traces and for Perfetto

The events are those of `torch.profiler`. On the CPU, gloo records one event per collective, such as
`gloo:all_reduce`, from the moment one of its two threads picks it up until the result is available;
that includes waiting for the other ranks and a Python hook's callback. On a GPU a collective is an
NCCL kernel, and every other kernel counts as `compute`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

from utils.measure.machine import cores

COMPUTE = ("forward", "backward", "optimizer", "compute")
COLLECTIVES = {  # letters in a backend's own name: ncclDevKernel_AllReduce_…, _allgather_base
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "sendrecv": "send",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
FACTS = "kintsugi"  # the entry that `tracing` adds to a trace


@dataclass(frozen=True)
class Span:
    """Something that took time on one rank; `start` and `end` in ms since the step began."""

    kind: str  # one of COMPUTE, or a collective: "all_reduce", "all_gather" …
    start: float
    end: float

    @property
    def ms(self) -> float:
        return self.end - self.start


def record(step: Callable[[], object], *, skip: int = 2) -> list[Span]:
    """Run `step()` `skip` times, then once under the profiler; return its spans by start.

    Call it on every rank (a barrier lets them begin together). DDP rebuilds its buckets after the
    first step, so skip at least one. DDP and optimizers mark themselves; for a bare model, put the
    forward pass in `with torch.profiler.record_function("forward")`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the tracer writes to stderr
    for _ in range(skip):
        step()
    if dist.is_initialized():
        dist.barrier()
    with torch.profiler.profile(activities=_activities()) as trace:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif dist.is_initialized():
            time.sleep(0.05)  # gloo's thread records the end after DDP has continued
    return spans(trace.events())


@contextmanager
def tracing(
    folder: str | Path, *, steps: int = 3, skip: int = 2, stacks: bool = False
) -> Iterator[torch.profiler.profile]:
    """Write a trace of `steps` steps, after `skip` others, to folder/rank<number>.json.

        with profile.tracing("traces") as profiler:     # on every rank
            for _ in range(5):
                step()
                profiler.step()

    `utils.measure.traces` reads it; https://ui.perfetto.dev shows it. The trace also holds this
    rank's number of threads and cores, its CPU time and its time in the run queue. stacks: also
    record which function called which, which makes Python several times slower. Raises ValueError
    for fewer than one step, or if no trace was written.
    """
    if steps < 1 or skip < 0:
        raise ValueError(f"steps {steps}, skip {skip}: give 1 or more steps after 0 or more others")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    rank = dist.get_rank() if dist.is_initialized() else 0
    path = Path(folder) / f"rank{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = []

    def write(profiler):
        beside = path.with_name(f"{path.name}.part")
        profiler.export_chrome_trace(str(beside))
        written.append(beside.replace(path))

    warmup = min(skip, 1)
    with _Tracing(
        activities=_activities(),
        schedule=torch.profiler.schedule(wait=skip - warmup, warmup=warmup, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
        with_stack=stacks,
    ) as profiler:
        yield profiler
    if not written:
        raise ValueError(
            f"no trace was written to {path}: call profiler.step() {skip + steps} times"
        )


class _Tracing(torch.profiler.profile):
    """Adds to the trace what a profiler does not record: threads, cores, CPU time."""

    def start_trace(self) -> None:
        super().start_trace()
        self._began = _clocks()

    def stop_trace(self) -> None:
        facts = {name: now - self._began.get(name, 0.0) for name, now in _clocks().items()}
        facts |= {"threads": torch.get_num_threads(), "cores": cores()}
        self.add_metadata_json(FACTS, json.dumps(facts))
        super().stop_trace()


def _clocks() -> dict[str, float]:
    """ms of this process: wall clock, CPU time, and (Linux) time spent waiting for a core."""
    clocks = {"wall_ms": 1e3 * time.perf_counter(), "cpu_ms": 1e3 * time.process_time()}
    queued = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            queued += int(file.read_text().split()[1])
        except OSError:  # the thread has ended
            continue
    return clocks | ({"queued_ms": queued / 1e6} if queued else {})


def _activities() -> list[torch.profiler.ProfilerActivity]:
    on_gpu = [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [torch.profiler.ProfilerActivity.CPU, *on_gpu]


def spans(events: Iterable) -> list[Span]:
    """The profiler's events as spans; adjacent spans of one compute kind are joined."""
    events = list(events)
    on_gpu = any(event.device_type == DeviceType.CUDA for event in events)
    named = [(kind, event.time_range) for event in events if (kind := _kind(event, on_gpu))]
    if not named:
        return []
    zero = min(time.start for _, time in named)
    found = [Span(kind, (t.start - zero) / 1e3, (t.end - zero) / 1e3) for kind, t in named]
    joined: list[Span] = []
    for kind in COMPUTE:
        joined += _join([span for span in found if span.kind == kind], gap=0.1)
    joined += [span for span in found if span.kind not in COMPUTE]
    return sorted(joined, key=lambda span: span.start)


def communication(trace: list[Span]) -> list[Span]:
    """The collectives of a trace, in order of start."""
    return [span for span in trace if span.kind not in COMPUTE]


def hidden(trace: list[Span]) -> float:
    """The fraction of the communication time during which this rank also computed, 0 to 1."""
    talking = _join(communication(trace))
    working = _join([span for span in trace if span.kind in COMPUTE])
    total = sum(span.ms for span in talking)
    both = sum(
        max(0.0, min(talk.end, work.end) - max(talk.start, work.start))
        for talk in talking
        for work in working
    )
    return both / total if total else 0.0


def operation(name: str) -> str:
    """The collective behind a backend's own name: "ncclDevKernel_AllReduce…" -> all_reduce."""
    letters = name.lower().replace("_", "")
    return next((op for key, op in COLLECTIVES.items() if key in letters), "communication")


def loopback_bytes() -> int | None:
    """Bytes that this machine has sent to itself so far, TCP headers included; None if unknown.

    Ranks on one machine that talk over TCP (gloo) use the loopback device, and so do other
    programs. Linux keeps the count in /proc/net/dev.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    counts = [line.split(":")[1].split() for line in lines if line.strip().startswith("lo:")]
    return int(counts[0][8]) if counts else None


def _kind(event, on_gpu: bool) -> str | None:
    """The kind of a profiler event: a kind of compute, a collective, or None for others."""
    name = event.name
    if on_gpu:
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            return None
        if name.startswith("nccl"):
            return operation(name)
        return None if name.startswith("Mem") else "compute"
    if name.startswith("gloo:"):
        return name.removeprefix("gloo:")
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if name.startswith("Optimizer.step"):
        return "optimizer"
    return "forward" if name == "forward" or name.endswith("Parallel.forward") else None


def _join(some: list[Span], gap: float = 0.0) -> list[Span]:
    """Merge spans that touch or lie at most `gap` ms apart."""
    joined: list[Span] = []
    for span in sorted(some, key=lambda span: span.start):
        if joined and span.start <= joined[-1].end + gap:
            last = joined.pop()
            span = Span(last.kind, last.start, max(last.end, span.end))
        joined.append(span)
    return joined
