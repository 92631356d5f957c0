"""Every drawing draws, at the sizes of its lesson and at others."""

import pytest
import torch

from utils.compression import Scheme, quantize
from utils.compression.evaluate import Cost
from utils.drawing import (
    accumulation,
    compression,
    context,
    data_parallel,
    experts,
    failures,
    figures,
    pipeline,
    profiling,
    sharded,
    tensor,
)
from utils.drawing import planner as plans
from utils.drawing.figures import plt
from utils.measure.findings import Report
from utils.measure.traces import Split
from utils.parallel.context.positions import positions
from utils.parallel.schedules import schedule, simulate
from utils.planner.published import FITTED

ROW = torch.linspace(-0.3, 1.0, 12)
RING = [[("wait", 0.0, 0.1), ("work", 0.1, 0.5), ("wait", 0.5, 0.6), ("work", 0.6, 0.9)]] * 2
COSTS = {"free": Cost(-0.00001, -0.001, 0.001), "dear": Cost(2.0, 1.5, 2.5)}
PLANS = {row.name: row.plan() for row in FITTED[:3]}


def rows(name="1f1b", chunks=1):
    return pipeline.of_simulation(simulate(schedule(name, 4, 6, chunks)))


def report(ranks):
    splits = [Split(rank, None, 5.0, 3.0, 1.0, 0.0, 1.0) for rank in range(ranks)]
    return Report([], [], splits, dict.fromkeys(range(ranks), 2.0), [])


def draw_heat_map():
    axes = figures.figure()[1]
    figures.heat_map(axes, ["a", "b"], ["x", "y"], {(0, 0): ("1", 0.5), (1, 1): ("–", None)})
    assert [text.get_text() for text in axes.texts] == ["1", "–"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y"]


# (function that draws, least number of patches and lines in its first panel)
DRAWINGS = {
    "figures: heat map": (draw_heat_map, 2),
    "accumulation": (accumulation.accumulation, 3),
    "accumulation, 6": (lambda: accumulation.accumulation(6), 3),
    "data parallel": (data_parallel.data_parallel, 5),
    "data parallel, 2": (lambda: data_parallel.data_parallel(2), 5),
    "collectives": (data_parallel.collectives, 5),
    "ring": (data_parallel.ring, 16),
    "who holds what": (sharded.who_holds_what, 4),
    "units in time": (sharded.units_in_time, 4),
    "decision": (sharded.decision, 4),
    "matrix": (
        lambda: sharded.matrix({"a": {"x": 1.0, "y": None}, "b": {"x": 2.0, "y": 3.0}}, limit=2),
        4,
    ),
    "column and row": (lambda: tensor.column_and_row(2), 8),
    "column and row, 4": (lambda: tensor.column_and_row(4), 14),
    "heads": (lambda: tensor.heads([(8, 8), (8, 2), (6, 3)], ranks=2), 16),
    "messages": (
        lambda: tensor.messages({"a": {"x": 2.0}, "b": {}}, {"a": {}, "b": {"y": 3.0}}),
        2,
    ),
    "layer regions": (tensor.layer_regions, 5),
    "who looks": (lambda: context.who_looks({"a": positions(16, 4), "b": positions(9, 2)}), 136),
    "turns": (lambda: context.turns(positions(16, 4)), 136),
    "turns, uneven": (lambda: context.turns(positions(11, 3, balanced=False)), 66),
    "clocks": (lambda: context.clocks({"a": RING, "b": RING}), 6),
    "one layer, three cuts": (context.layer, 10),
    "ways": (
        lambda: context.ways(
            {"a": {"x": ([2, 4], [1.0, 2.0]), "y": ([2, 4], [2.0, 1.0])}, "b": {"x": ([2], [1])}},
            {"a": {"x": ([2], [1.0])}},
            y="numbers",
        ),
        3,
    ),
    "stages": (lambda: pipeline.stages([range(2), range(2, 4), range(4, 6)]), 3),
    "stages, looped": (lambda: pipeline.stages([range(1)] * 8, ranks=4), 3),
    "timeline": (lambda: pipeline.timeline(rows()), 3),
    "timelines": (
        lambda: pipeline.timelines({"a": rows(), "b": rows("zero-bubble")}, title="both"),
        3,
    ),
    "ideal and real": (
        lambda: pipeline.ideal_and_real("1F1B", rows(), rows("interleaved", chunks=2)),
        3,
    ),
    "mixture": (experts.mixture, 3),
    "exchange": (lambda: experts.exchange([[1, 2], [0, 3]]), 3),
    "loads": (lambda: experts.loads([3, 2, 5]), 3),
    "busiest": (lambda: experts.busiest({"a": [1.0, 2.0], "b": [2.0, 1.0]}), 3),
    "time split": (lambda: profiling.time_split(report(2)), 8),
    "busy": (
        lambda: profiling.busy(
            {"compute": [0, 0.5], "communication": [1, 1]},
            40.0,
            notes=[(5, "compute", "one"), (30, "communication", "two")],
        ),
        2,
    ),
    "rank map": (lambda: profiling.rank_map(report(8)), 48),
    "rank map, 64": (lambda: profiling.rank_map(report(64)), 384),
    "lives": (
        lambda: failures.lives(
            {"a": [("computing", 5), ("saving", 1), ("lost", 2), ("restarting", 1)]}, unit="hours"
        ),
        5,
    ),
    "intervals": (
        lambda: failures.intervals(60, 600, 11_000, {"simulated": [(300, 1.3), (900, 1.2)]}),
        4,
    ),
    "intervals, band": (
        lambda: failures.intervals(
            60, 600, 11_000, {"measured": [(600, 1.3)]}, band=[(300, 1.1, 1.4), (900, 1.1, 1.3)]
        ),
        4,
    ),
    "grids": (
        lambda: compression.grids(
            ROW,
            {"a": quantize(ROW[None], Scheme(3)), "b": quantize(ROW[None], Scheme(2, "tensor"))},
        ),
        5,
    ),
    "channels": (lambda: compression.channels({"before": ROW.abs(), "after": ROW.abs()}), 0),
    "costs": (lambda: compression.costs(COSTS), 5),
    "costs, many": (lambda: compression.costs({str(n): COSTS["dear"] for n in range(9)}), 19),
    "frontier": (
        lambda: compression.frontier({"a": {"x": (1.0, 2.0), "y": (2.0, 1.5)}, "b": {"x": (4, 1)}}),
        2,
    ),
    "memory of plans": (lambda: plans.memory_of(PLANS), 3),
    "time of plans": (lambda: plans.time_of(PLANS), 3),
    "time of plans, seconds": (lambda: plans.time_of(PLANS, share=False), 3),
    "card of a plan": (lambda: plans.card(next(iter(PLANS.values()))), 3),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_it_draws(name):
    draw, least = DRAWINGS[name]
    draw()
    assert len(plt.get_fignums()) == 1
    drawn = plt.gcf().axes[0]
    assert len(drawn.patches) + len(drawn.lines) >= least
    plt.gcf().canvas.draw()
