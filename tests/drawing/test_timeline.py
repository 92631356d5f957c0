"""Every span of a trace is a bar; spans that overlap have separate lanes."""

from utils.drawing import figures
from utils.drawing.timeline import timeline
from utils.measure.profile import Span


def test_timeline_draws_every_span(monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setattr(figures, "show", lambda: None)
    trace = [Span("backward", 0, 5), Span("all_reduce", 1, 4), Span("all_reduce", 2, 6)]
    timeline({"rank 0": trace, "rank 1": trace})
    axes = plt.gcf().axes[0]
    assert len(axes.patches) == 6
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    assert lanes == ["rank 0: compute", "communication", "", "rank 1: compute", "communication", ""]
    plt.close("all")
