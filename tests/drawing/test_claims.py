"""The claims of the drawings of lessons 00 to 12: values, owners and orders match the code."""

import re
from itertools import chain

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist
from torch import nn

from utils.drawing import (
    accumulation,
    context,
    data_parallel,
    experts,
    grid,
    kernels,
    memory,
    pipeline,
    precision,
    sharded,
    start_here,
    tensor,
)
from utils.measure.memory import Memory
from utils.memory.number_formats import FORMATS
from utils.models.gpt import GPT, GPTConfig
from utils.parallel.context.positions import pairs, positions
from utils.parallel.schedules import schedule, simulate
from utils.ranks import Ranks


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


# ---- lesson 00


@pytest.mark.parametrize(
    "config",
    [
        GPTConfig(),
        GPTConfig(
            vocab_size=300, hidden_size=24, layers=3, heads=4, kv_heads=2, tie_embeddings=True
        ),
        GPTConfig(hidden_size=20, layers=1, heads=2, head_dim=6, intermediate_size=33),
    ],
)
def test_the_numbers_in_the_picture_add_up_to_the_model(config):
    start_here.model(config)
    labels = [text.get_text() for text in plt.gca().texts]
    sizes = [
        int(re.sub(r".*\n|,", "", label)) for label in labels if re.search(r"\n[\d,]+$", label)
    ]
    embedding, norm, attention, norm_b, mlp, last_norm, head = sizes
    total = embedding + config.layers * (norm + attention + norm_b + mlp) + last_norm + head
    assert total == GPT(config).parameter_count()
    assert f"{config.layers} blocks in sequence" in labels


def test_the_map_names_every_lesson_that_cuts_something():
    start_here.workshop_map()
    words = " ".join(text.get_text() for text in plt.gca().texts)
    assert all(f"{lesson:02d} " in words for lesson in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10))


def test_a_matrix_in_two_shows_both_ranks():
    start_here.matrix_in_two()
    words = " ".join(text.get_text() for text in plt.gca().texts)
    assert "on rank 0" in words and "on rank 1" in words


# ---- lesson 01


def value(origin):
    """A chunk's value: 10^rank, so that a sum is unmistakable."""
    return {None: 0.0, 0: 1.0, 1: 10.0, 2: 100.0, 3: 1000.0, "sum": 1111.0}[origin]


def after(name, before):
    """This rank's chunks after the collective `name`."""
    rank = dist.get_rank()
    chunks = [torch.tensor([value(origin)]) for origin in before[rank]]
    whole = torch.cat(chunks)
    if name == "broadcast":
        dist.broadcast(whole, src=0)
    elif name == "all-reduce":
        dist.all_reduce(whole)
    elif name == "reduce-scatter":
        mine = torch.empty(1)
        dist.reduce_scatter(mine, chunks)
        whole = torch.zeros(4)
        whole[rank] = mine
    elif name == "all-gather":
        parts = [torch.empty(1) for _ in range(4)]
        dist.all_gather(parts, chunks[rank])
        whole = torch.cat(parts)
    return whole.tolist()


def test_the_collectives_do_what_the_picture_shows():
    with Ranks(4) as ranks:
        for name, (before, expected) in data_parallel.COLLECTIVES.items():
            shown = [[value(origin) for origin in row] for row in expected]
            assert ranks.run(after, name, before) == shown, name


def test_the_ring_sums_every_chunk_and_hands_it_round():
    data_parallel.ring(4)
    panels = {
        title: [int(text) for text in texts(axes) if text.isdigit()]
        for axes in plt.gcf().axes
        if (title := axes.get_title(loc="left"))
    }
    assert list(panels) == [
        "own values", *[f"reduce-scatter, {k}" for k in (1, 2, 3)],
        *[f"all-gather, {k}" for k in (1, 2, 3)],
    ]
    finished = torch.tensor(panels["reduce-scatter, 3"]).view(4, 4) == 4
    assert finished.sum(0).tolist() == finished.sum(1).tolist() == [1] * 4  # one per rank
    assert set(panels["all-gather, 3"]) == {4}


# ---- lesson 02


@pytest.mark.parametrize("micro_batches", [1, 4, 6])
def test_the_same_time_and_a_fraction_of_the_activations(micro_batches):
    whole_times, whole_heights = accumulation.teeth(1, micro_batches)
    times, heights = accumulation.teeth(micro_batches, 1)
    assert times[-1] == whole_times[-1]
    assert max(heights) * micro_batches == max(whole_heights)
    assert heights[-1] == 0 and times == sorted(times)


def test_forward_backward_and_the_step_are_one_bar_each():
    accumulation.accumulation(4)
    whole, pieces = plt.gcf().axes
    assert len(whole.patches) == 3 and len(pieces.patches) == 9


# ---- lesson 03


def test_bits_draws_one_box_for_each_bit():
    precision.bits()
    axes = plt.gca()
    assert len(axes.patches) == sum(form.bits for form in FORMATS.values())
    assert {"fp32", "fp8 e4m3", "8 + 7", "bits of each"} <= set(texts(axes))


def test_bits_of_a_value_are_written_into_the_boxes():
    precision.bits(1.0)
    axes = plt.gca()
    written = [text for text in texts(axes) if text in ("0", "1")]
    assert len(written) == sum(form.bits for form in FORMATS.values())
    assert texts(axes).count("1   (0)") == len(FORMATS)


def test_ranges():
    precision.ranges()
    axes = plt.gca()
    assert len(axes.patches) == 2 * len(FORMATS)
    assert "2.4 digits" in texts(axes)  # bf16


@pytest.mark.parametrize("numbers", [torch.randn(1000) * 1e-6, torch.zeros(5), torch.ones(3) * 1e9])
def test_histogram(numbers):
    precision.histogram({"weights": numbers}, FORMATS["fp16"], title="t")
    assert plt.gcf().get_size_inches().tolist() == [8.0, 3.6]
    assert "becomes 0" in texts(plt.gca())


def test_staircase_marks_the_skipped_steps():
    precision.staircase([2.0**16, 2.0**15, 2.0**15], [True, False, False])
    line, marks = plt.gca().lines
    assert line.get_ydata().tolist() == [16, 15, 15]
    assert list(marks.get_xdata()) == [0]


# ---- lesson 04


@pytest.fixture
def measured():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.ones(32, 64)
    with Memory(model=model) as counted:
        with counted.phase("forward"):
            loss = model(x).square().sum()
        with counted.phase("backward"):
            loss.backward()
    return counted


def test_the_areas_end_where_the_counts_end(measured, capsys):
    memory.timeline(measured, title="a step")
    axes = plt.gca()
    kinds = [area.get_label() for area in axes.collections]
    assert kinds == ["parameters", "gradients", "activations", "temporary"]
    top = max(path.vertices[:, 1].max() for a in axes.collections for path in a.get_paths())
    assert top * 2**10 == pytest.approx(measured.peak_bytes)
    words = [text.get_text() for text in axes.texts]
    assert words == ["forward", "backward"] and axes.get_ylabel() == "KiB"
    printed = capsys.readouterr().out
    assert printed.startswith(f"Peak {measured.peak_bytes / 2**10:.1f} KiB in the phase ")


def test_the_height_can_be_fixed_and_axes_given(measured, capsys):
    axes = plt.subplots()[1]
    memory.timeline(measured, ax=axes, top=2**30)
    assert axes.get_ylabel() == "GiB" and axes.get_ylim()[1] > 1
    assert capsys.readouterr().out == ""


def test_without_phases_it_says_what_to_do():
    with Memory(device="cpu") as empty:
        torch.ones(3)
    with pytest.raises(ValueError, match="has no phase"):
        memory.timeline(empty)


def test_the_drawing_of_recomputation_names_its_rows():
    memory.recomputation()
    words = " ".join(text.get_text() for text in plt.gca().texts)
    for word in ("keep all", "every layer", "segments of", "layer 5"):
        assert word in words


# ---- lesson 05


def whole_at(rows, moment):
    return {unit for when, unit, _ in rows if when == moment}


def test_when_units_are_whole():
    always = sharded.unit_schedule(4, stage=2)
    assert all(whole_at(always, moment) == {0, 1, 2, 3} for moment in range(8))
    alone = sharded.unit_schedule(4, stage=3)
    assert [whole_at(alone, moment) for moment in range(8)] == [
        {0}, {1}, {2}, {3}, {3}, {2}, {1}, {0}
    ]
    ahead = sharded.unit_schedule(4, stage=3, ahead=1)
    assert [whole_at(ahead, moment) for moment in range(8)] == [
        {0, 1}, {1, 2}, {2, 3}, {3}, {3, 2}, {2, 1}, {1, 0}, {0}
    ]


def test_the_bytes_in_the_titles():
    sharded.who_holds_what(4)
    titles = [axes.get_title("left") for axes in plt.gcf().axes]
    assert [title.split(": ")[1].split()[0] for title in titles] == ["16", "7", "5.5", "4"]


# ---- lesson 06


@pytest.mark.parametrize(
    ("queries", "keys", "ranks", "owners"),
    [
        (4, 4, 2, [0, 0, 1, 1]),
        (6, 3, 2, [0, 0, 0, 0, 1, 1]),  # with its key-value head
        (4, 1, 2, [0, 0, 1, 1]),  # one key-value head for all: only queries are split
    ],
)
def test_who_computes_which_head(queries, keys, ranks, owners):
    assert tensor.query_owners(queries, keys, ranks) == owners


# ---- lesson 07


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("length, ranks", [(16, 4), (13, 3), (7, 5)])
def test_every_cell_below_the_diagonal_is_drawn_once(length, ranks, balanced):
    places = positions(length, ranks, balanced)
    cells = [cell for rank in range(ranks) for cell in context.looks(places, rank)]
    assert sorted(cells) == [(query, key) for query in range(length) for key in range(query + 1)]
    for rank, mine in enumerate(places):
        by_turn = [context.looks(places, rank, other) for other in range(ranks)]
        assert sorted(chain(*by_turn)) == sorted(context.looks(places, rank))
        assert [len(turn) for turn in by_turn] == [pairs(mine, theirs) for theirs in places]
        assert all(any(query in block for block in mine) for query, _ in chain(*by_turn))


def test_the_parts_beside_are_those_of_the_cells():
    context.who_looks({"a": positions(16, 4, balanced=False), "b": positions(16, 4)})
    shown = [[text.split(": ")[1] for text in texts(axes)] for axes in plt.gcf().axes]
    assert shown == [["7%", "19%", "31%", "43%"], ["25%"] * 4]


def test_a_turn_has_the_colours_of_its_own_cells_only():
    context.turns(places := positions(16, 4))
    for turn, axes in enumerate(plt.gcf().axes):
        tints = [patch.get_facecolor() for patch in axes.patches[136:]]  # after the pale ones
        work = [pairs(places[rank], places[(rank - turn) % 4]) for rank in range(4)]
        assert len(tints) == sum(work)
        assert sorted(tints.count(tint) for tint in set(tints)) == sorted(work)


def test_bars_are_as_long_as_the_work_and_name_whose_keys():
    logs = [
        [("wait", 5.0, 5.5), ("work", 5.5, 6.0), ("wait", 6.0, 8.0), ("work", 8.0, 8.0)],
        [("wait", 5.0, 5.0), ("work", 5.0, 6.0), ("wait", 6.0, 6.0), ("work", 6.0, 9.0)],
    ]
    context.clocks({"a": logs, "b": logs})
    assert context.span(logs) == 4.0
    axes = plt.gcf().axes[0]
    bars = [(bar.get_x(), bar.get_y(), bar.get_width()) for bar in axes.patches]
    assert bars == [(0, 0, 4), (0.5, 0, 0.5), (0, 1, 4), (0, 1, 1), (1, 1, 3)]  # no work: no bar
    assert texts(axes) == ["0", "1", "0"]


def test_ways_are_lines_and_what_was_counted_is_dots_of_their_colour():
    formulas = {"few heads": {"ring": ((2, 4, 8), (1, 2, 3)), "gather": ((2, 4, 8), (3, 2, 1))}}
    context.ways(
        formulas | {"many": formulas["few heads"]},
        {"few heads": {"gather": ((2,), (3,))}},
        y="bytes",
    )
    axes, other = plt.gcf().axes
    ring, gather, dots = axes.lines
    assert list(ring.get_ydata()) == [1, 2, 3] and list(dots.get_xydata()[0]) == [2, 3]
    assert dots.get_color() == gather.get_color() != ring.get_color()
    assert len(other.lines) == 2
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "4", "8"]


def test_a_rank_has_equal_parts_of_every_box():
    context.layer()
    for axes, count in zip(plt.gcf().axes, (2, 2, 4)):
        areas = {}
        for box in axes.patches:
            tint = box.get_facecolor()
            areas[tint] = areas.get(tint, 0) + box.get_width() * box.get_height()
        assert len(areas) == count and max(areas.values()) == pytest.approx(min(areas.values()))


# ---- lesson 08


def rows(name="1f1b", ranks=4, micro_batches=6, chunks=1):
    return pipeline.of_simulation(simulate(schedule(name, ranks, micro_batches, chunks)))


def test_the_bubble_is_the_simulators():
    simulation = simulate(schedule("interleaved", 4, 8, 2))
    drawn = pipeline.of_simulation(simulation)
    assert pipeline.bubble(drawn) == pytest.approx(simulation.bubble)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_what_is_kept_is_what_the_simulator_counts(name):
    simulation = simulate(schedule(name, 4, 6))
    for row, peak in zip(rows(name), simulation.peak_in_flight, strict=True):
        _, amounts = pipeline.kept(row)
        assert max(amounts) == peak
        assert amounts[-1] == pytest.approx(0)


def test_events_begin_at_zero_without_waiting():
    logs = [[("wait", 0, 0, 99.0, 100.0), ("F", 0, 0, 100.0, 100.5)], [("F", 0, 0, 101.0, 102.0)]]
    assert pipeline.of_events(logs, unit=0.5) == [[("F", 0, 0, 2.0, 3.0)], [("F", 0, 0, 4.0, 6.0)]]


# ---- lesson 09


def test_every_row_arrives_where_it_was_sent():
    table = [[1, 2, 0], [0, 0, 3], [1, 1, 1]]
    before, after = experts.sent(table)
    assert [len(row) for row in before] == [3, 3, 3]
    assert [len(row) for row in after] == [2, 3, 4]
    assert all(goal == rank for rank, row in enumerate(after) for _, goal in row)
    assert sorted(chain(*before)) == sorted(chain(*after))


def test_loads_above_capacity_are_drawn_apart():
    experts.loads([5, 1, 3], capacity=4)
    heights = [patch.get_height() for patch in plt.gcf().axes[0].patches]
    assert heights == [4, 1, 3, 1]


# ---- lesson 10


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 2, 4), (4, 1, 2), (2, 2, 2, 2), (1, 1, 2, 4)])
def test_every_rank_stands_once_in_each_panel(sizes):
    dp, pp, tp, cp = (*sizes, 1)[:4]
    grid.who_talks(dp=dp, pp=pp, tp=tp, cp=cp, per_node=4)
    panels = plt.gcf().axes
    names = [panel.get_title(loc="left").split()[0] for panel in panels]
    assert names == ["tp", "cp", "dp", "pp"] if cp > 1 else names == ["tp", "dp", "pp"]
    for panel in panels:
        ranks = [text for text in texts(panel) if text.isdigit()]
        assert sorted(ranks, key=int) == [str(rank) for rank in range(dp * pp * tp * cp)]


def test_partners_have_one_colour():
    grid.who_talks()
    colours = {}
    for line in plt.gcf().axes[2].lines:  # pipeline groups
        (x,), (y,) = line.get_data()
        colours.setdefault(line.get_color(), []).append((x, round(y, 2)))
    assert sorted(len(places) for places in colours.values()) == [2, 2, 2, 2]


def test_every_rank_has_its_piece():
    grid.pieces(dp=2, pp=2, tp=2, layers=4)
    words = texts(plt.gcf().axes[0])
    assert "rank 5\nlayers 2 to 3\nslice 1 of each matrix" in words
    assert "rank 2\nlayers 0 to 1\nslice 0 of each matrix" in words


def test_ranks_of_cp_have_the_same_piece():
    grid.pieces(dp=1, pp=2, tp=2, layers=4, cp=2)
    words = texts(plt.gcf().axes[0])
    pair = [text for text in words if text.startswith(("rank 1\n", "rank 3\n"))]
    assert {text[6:] for text in pair} == {"\nlayers 0 to 1\nslice 1 of\nmatrices"}
    assert "rows of replica 0,\nslice 1 of the positions" in words


def test_a_slower_network_is_further_right():
    grid.network({"DP 4": {10: 60, 1: 80, 0.1: 400}, "PP 4": {10: 90, 1: 90, 0.1: 100}})
    axes = plt.gcf().axes[0]
    assert axes.xaxis_inverted()
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0.1", "1", "10"]


# ---- lesson 12


def test_the_roofs_meet_where_the_peak_takes_over():
    kernels.roofline(8e12, 2e12, {"slow": (1, 1e12), "on the roof": (64, 8e12)})
    axes = plt.gca()
    memory_roof, peak, *points = [list(zip(*line.get_data())) for line in axes.lines]
    assert memory_roof[1] == peak[0] == (4, 8e12)  # FLOPs per byte, FLOP/s
    left, speed = memory_roof[0]
    assert speed == left * 2e12 and peak[1][1] == 8e12
    assert points == [[(1, 1e12)], [(64, 8e12)]]
    assert {"slow", "on the roof", "the peak: 8 TFLOP/s"} < set(texts(axes))


@pytest.mark.parametrize("n, block", [(10, 4), (8, 4), (1, 2)])
def test_each_number_is_in_one_program_and_the_others_are_masked(n, block):
    kernels.blocks(n, block)
    words = texts(plt.gca())
    programs = -(-n // block)
    assert (words.count("true"), words.count("false")) == (n, programs * block - n)
    assert [word for word in words if word.isdigit()] == [str(i) for i in range(programs * block)]
    assert f"program {programs - 1}" in words and f"program {programs}" not in words


def test_no_number_is_one_sentence():
    with pytest.raises(ValueError, match="0 elements in blocks of 4"):
        kernels.blocks(0, 4)
