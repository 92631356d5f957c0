"""A figure of when a rank computes and when it communicates.

    timeline({"rank 0": spans, "rank 1": others})     # spans of utils.measure.profile

Each rank has one lane of computation and, below it, as many lanes of communication as it needs.
"""

from __future__ import annotations

from utils.drawing import figures
from utils.measure.profile import COMPUTE, Span, communication

NUMBERED = 16  # a trace with more collectives shows no numbers
TINTS = {"forward": "data", "backward": "compute", "optimizer": "optimizer", "compute": "compute"}


def timeline(traces: dict[str, list[Span]], *, title: str = "") -> None:
    """Draw traces below one another on one clock: a lane of computation, lanes of collectives.

    traces: {name: spans}. Collectives, if they are few, are numbered in the order in which they
    began; those that overlap are on separate lanes.
    """
    _, axes = figures.figure("tall" if len(traces) > 1 else "normal")
    y, ticks = 0.0, []
    for name, trace in traces.items():
        ticks.append((y, f"{name}: compute"))
        for span in trace:
            if span.kind in COMPUTE:
                _bar(axes, y, span)
        few = 1 < len(communication(trace)) <= NUMBERED
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


def _lanes(talk: list[Span]) -> list[list[tuple[int, Span]]]:
    """Numbered spans on the fewest lanes without overlap."""
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
