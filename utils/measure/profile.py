"""Traces: when does a rank compute, and when does it talk?

    spans = profile.record(step)             # on a rank: runs step() three times, traces the last
    timeline({"rank 0": spans})              # in the notebook: utils.drawing.timeline
    profile.hidden(spans)                    # share of the communication covered by computation

The events are those of `torch.profiler`. On the CPU, gloo notes one `gloo:all_reduce` for each
collective, from the moment one of its two threads takes it up to the moment the result is there;
waiting for the other ranks is part of it, and so is a Python hook's callback. On a GPU a collective
is NCCL's kernel, and every other kernel counts as `compute`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType

COMPUTE = ("forward", "backward", "optimizer", "compute")
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "sendrecv": "send",
    "reduce": "reduce",
}


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
    """Runs `step()` `skip` times, then once under the profiler; returns that step's spans by start.

    Call it on every rank (a barrier lets them begin together). DDP arranges its buckets anew after
    its first step, so skip at least one. DDP and the optimizers mark themselves; for a bare model
    put the forward pass in `with torch.profiler.record_function("forward")`.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the tracer talks on stderr
    for _ in range(skip):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    if dist.is_initialized():
        dist.barrier()
    with torch.profiler.profile(activities=activities) as trace:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif dist.is_initialized():
            time.sleep(0.05)  # DDP goes on when the sum is there; gloo's thread notes the end then
    return spans(trace.events())


def spans(events: Iterable) -> list[Span]:
    """The profiler's events as spans: neighbours of one kind of compute joined, others dropped."""
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
    """The collectives of a trace, in the order in which they began."""
    return [span for span in trace if span.kind not in COMPUTE]


def hidden(trace: list[Span]) -> float:
    """Share (0 to 1) of the time with a collective under way in which this rank also computed."""
    talking = _join(communication(trace))
    working = _join([span for span in trace if span.kind in COMPUTE])
    total = sum(span.ms for span in talking)
    both = sum(
        max(0.0, min(talk.end, work.end) - max(talk.start, work.start))
        for talk in talking
        for work in working
    )
    return both / total if total else 0.0


def loopback_bytes() -> int | None:
    """Bytes that this machine has sent to itself so far, TCP headers included; None if unknown.

    Ranks on one machine that talk over TCP (gloo) use this device; so does any other program. Linux
    keeps the count in /proc/net/dev.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    counts = [line.split(":")[1].split() for line in lines if line.strip().startswith("lo:")]
    return int(counts[0][8]) if counts else None


def _kind(event, on_gpu: bool) -> str | None:
    """What a profiler event is to us: a kind of compute, a collective, or nothing (None)."""
    name = event.name
    if on_gpu:
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            return None
        if name.startswith("nccl"):
            letters = name.lower().replace("_", "")
            return next((op for key, op in COLLECTIVES.items() if key in letters), "communication")
        return None if name.startswith("Mem") else "compute"
    if name.startswith("gloo:"):
        return name.removeprefix("gloo:")
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if name.startswith("Optimizer.step"):
        return "optimizer"
    return "forward" if name == "forward" or name.endswith("Parallel.forward") else None


def _join(some: list[Span], gap: float = 0.0) -> list[Span]:
    """Spans that touch, or that lie at most `gap` ms apart, become one."""
    joined: list[Span] = []
    for span in sorted(some, key=lambda span: span.start):
        if joined and span.start <= joined[-1].end + gap:
            last = joined.pop()
            span = Span(last.kind, last.start, max(last.end, span.end))
        joined.append(span)
    return joined
