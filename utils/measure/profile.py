"""Traces into figures: when does a rank compute, and when does it talk?

    spans = profile.record(step)             # on a rank: runs step() three times, traces the last
    profile.timeline({"rank 0": spans})      # in the notebook
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

from utils.drawing import figures

COMPUTE = ("forward", "backward", "optimizer", "compute")
NUMBERED = 16  # as many collectives of a trace can be told apart by a number in the figure
COLLECTIVES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "sendrecv": "send",
    "reduce": "reduce",
}
TINTS = {"forward": "data", "backward": "compute", "optimizer": "optimizer", "compute": "compute"}


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


def timeline(traces: dict[str, list[Span]], *, title: str = "") -> None:
    """Draws traces below one another on one clock: a lane that computes, and lanes of collectives.

    traces: {name: spans}. Collectives, if there are few, are numbered in the order in which they
    began; those that run at the same time get lanes of their own.
    """
    _, axes = figures.figure("tall" if len(traces) > 1 else "normal")
    y, ticks = 0.0, []
    for name, trace in traces.items():
        ticks.append((y, f"{name}: compute"))
        for span in trace:
            if span.kind in COMPUTE:
                _bar(axes, y, span)
        few = len(communication(trace)) <= NUMBERED
        for depth, lane in enumerate(_lanes(communication(trace))):
            y += 1
            ticks.append((y, "" if depth else "communication"))
            for number, span in lane:
                _bar(axes, y, span, str(number) if few else "")
        y += 1.5
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set(xlabel="ms since the step began", title=title)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=5, fontsize=10)
    figures.show()


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


def _lanes(talk: list[Span]) -> list[list[tuple[int, Span]]]:
    """Numbered spans on as few lanes as keep those that run together apart."""
    lanes: list[list[tuple[int, Span]]] = []
    for number, span in enumerate(talk):
        free = next((lane for lane in lanes if lane[-1][1].end <= span.start), None)
        if free is None:
            lanes.append(free := [])
        free.append((number, span))
    return lanes


def _bar(axes, y: float, span: Span, text: str = "") -> None:
    """One span as a bar; the first of each kind names the colour in the legend."""
    label = span.kind.replace("_", "-")
    if label in axes.get_legend_handles_labels()[1]:
        label = None
    tint, edge = figures.shade(TINTS.get(span.kind, "communication")), "white" if text else "none"
    axes.barh(y, span.ms, left=span.start, height=0.7, color=tint, edgecolor=edge, label=label)
    axes.text(span.start + span.ms / 2, y, text, ha="center", va="center", fontsize=9)
