"""utils/drawing/pipeline.py: what the drawings claim, and that they draw."""

import matplotlib.pyplot as plt
import pytest

from utils.drawing import pipeline as pictures
from utils.parallel.schedules import schedule, simulate


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(pictures.figures, "show", lambda: None)
    plt.close("all")
    yield
    plt.close("all")


def rows(name="1f1b", ranks=4, micro_batches=6, chunks=1):
    return pictures.of_simulation(simulate(schedule(name, ranks, micro_batches, chunks)))


def test_the_bubble_is_the_simulators():
    simulation = simulate(schedule("interleaved", 4, 8, 2))
    drawn = pictures.of_simulation(simulation)
    assert pictures.bubble(drawn) == pytest.approx(simulation.bubble)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_what_is_kept_is_what_the_simulator_counts(name):
    simulation = simulate(schedule(name, 4, 6))
    for row, peak in zip(rows(name), simulation.peak_in_flight, strict=True):
        _, amounts = pictures.kept(row)
        assert max(amounts) == peak
        assert amounts[-1] == pytest.approx(0)


def test_events_begin_at_zero_without_waiting():
    logs = [[("wait", 0, 0, 99.0, 100.0), ("F", 0, 0, 100.0, 100.5)], [("F", 0, 0, 101.0, 102.0)]]
    assert pictures.of_events(logs, unit=0.5) == [[("F", 0, 0, 2.0, 3.0)], [("F", 0, 0, 4.0, 6.0)]]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: pictures.stages([range(2), range(2, 4), range(4, 6)]),
        lambda: pictures.stages([range(1)] * 8, ranks=4),
        lambda: pictures.timeline(rows()),
        lambda: pictures.timelines({"a": rows(), "b": rows("zero-bubble")}, title="both"),
        lambda: pictures.ideal_and_real("1F1B", rows(chunks=1), rows("interleaved", chunks=2)),
    ],
)
def test_it_draws(draw):
    draw()
    assert len(plt.gcf().axes[0].patches) >= 3
    plt.gcf().canvas.draw()
