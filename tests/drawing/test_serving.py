"""The figures of lessons 16 and 17 show what they are given and return their results."""

import numpy as np
import pandas as pd
import pytest

from utils.drawing import serving as pictures
from utils.drawing.figures import GOLD, plt
from utils.planner import MACHINES, MODELS
from utils.planner.decode import KINDS, over
from utils.serving.load import run

gold = plt.matplotlib.colors.to_rgba(GOLD)


def words_of(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def title_of(axes):
    return axes.get_title(loc="left")


def test_who_serves_names_every_server_and_engine():
    pictures.who_serves()
    words = "\n".join(words_of(plt.gcf()))
    for name in ("Triton", "Dynamo", "vLLM", "TensorRT-LLM", "SGLang", "gateway", "engine",
                 "round-robin"):
        assert name in words


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_front_doors_shows_every_model_and_rank(tp):
    pictures.front_doors(tp)
    words = "\n".join(words_of(plt.gcf()))
    assert words.count("rank ") == tp
    assert ("all-reduce" in words) == (tp > 1)
    for name in ("client", "gateway", "HTTP", "gRPC", "gpt_tokenize", "gpt_detokenize",
                 "gpt_engine", "tritonserver"):
        assert words.count(name) >= 1
    assert words.count(f"1/{tp} of each matrix") == (tp if 1 < tp <= 4 else 0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_engine_shows_a_leader_and_every_rank(tp):
    pictures.engine(tp)
    words = "\n".join(words_of(plt.gcf()))
    assert words.count("rank ") == tp and "leader" in words
    assert ("all-reduce" in words) == (tp > 1)


# ---- slots


def test_static_batches_wait_for_the_longest():
    assert pictures.static([3, 1, 2], 2) == [[0, 0, 0, 2, 2], [1, None, None, None, None]]


def test_continuous_batching_fills_a_free_slot_at_once():
    assert pictures.continuous([3, 1, 2], 2) == [[0, 0, 0], [1, 2, 2]]


def test_every_token_is_made_in_both_and_continuous_is_never_longer():
    lengths = np.random.default_rng(1).integers(1, 30, 23).tolist()
    for slots in (1, 3, 4, 30):
        tables = pictures.static(lengths, slots), pictures.continuous(lengths, slots)
        for table in tables:
            assert len(table) == slots
            cells = [cell for row in table for cell in row if cell is not None]
            assert [cells.count(number) for number in range(23)] == lengths
        assert len(tables[1][0]) <= len(tables[0][0])
        assert len(tables[1][0]) >= -(-sum(lengths) // slots)


def test_slots_draws_bars_and_returns_the_share_at_work():
    lengths = [6, 2, 4]
    found = pictures.slots(
        {"static": pictures.static(lengths, 2), "continuous": pictures.continuous(lengths, 2)}
    )
    assert found == {"static": (10, 12 / 20), "continuous": (6, 12 / 12)}
    above, below = plt.gcf().axes
    assert title_of(above) == "static: 10 steps, 60% of the rows are used"
    assert title_of(below) == "continuous: 6 steps, 100% of the rows are used"
    assert sorted(bar.get_width() for bar in below.patches) == sorted(lengths)
    assert [text.get_text() for text in below.texts] == ["0", "1", "2"]
    assert below.patches[1].get_x() == 0
    assert below.patches[2].get_x() == 2  # request 2 joins where request 1 has left


def test_block_tables_show_what_is_shared():
    pictures.block_tables({"first": [4, 7], "second": [4, 9]})
    axes = plt.gcf().axes[0]
    first, own, shared, _ = [patch.get_facecolor() for patch in axes.patches]
    assert first == shared != own
    assert words_of(plt.gcf()) == ["block 4", "block 7", "block 4", "block 9"]


def test_step_work_stacks_prompts_on_decoded_tokens():
    pictures.step_work({"whole": [(0, 2), (96, 2)], "chunks": [(16, 2)]})
    heights = [[bar.get_height() for bar in axes.patches] for axes in plt.gcf().axes]
    assert heights == [[2, 2, 0, 96], [2, 16]]


# ---- load


def point(tokens, latency):
    return {"tokens_per_second": tokens, "requests_per_second": tokens / 10,
            "latency_p50": latency, "latency_p95": 2 * latency}


def test_throughput_latency_takes_summaries_in_the_order_of_clients():
    curves = {"tp 1": {16: point(900, 0.4), 1: point(100, 0.1)}, "tp 2": {1: point(50, 0.3)}}
    pictures.throughput_latency(curves, "title")
    axes = plt.gcf().axes[0]
    high, middle = axes.lines[:2]
    assert list(middle.get_xdata()) == [100, 900]
    assert list(middle.get_ydata()) == [0.1, 0.4]
    assert list(high.get_ydata()) == [0.2, 0.8]
    words = words_of(plt.gcf())
    assert {"1", "16", "tp 1", "tp 2"} <= set(words)
    assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0
    pictures.throughput_latency(curves, tokens=False)
    assert list(plt.gcf().axes[0].lines[1].get_xdata()) == [10, 90]


def test_throughput_latency_takes_loads():
    loads = {many: run(lambda i: [1, 2], many, requests=8) for many in (1, 2)}
    pictures.throughput_latency({"echo": loads})
    line = plt.gcf().axes[0].lines[1]
    assert list(line.get_xdata()) == [load.summary["tokens_per_second"] for load in loads.values()]


def test_arrivals_mark_the_first_piece():
    found = pictures.arrivals({"a": [0.3, 0.5, 0.9], "b": [0.1]}, since="a prompt came")
    assert found == {"a": 0.3, "b": 0.1}
    axes = plt.gcf().axes[0]
    assert axes.get_xlabel() == "s since a prompt came; gold: the first of each row"
    ticks = [line for line in axes.lines if line.get_marker() == "|"]
    assert [list(line.get_xdata()) for line in ticks] == [[0.3, 0.5, 0.9], [0.3], [0.1], [0.1]]
    assert ticks[1].get_color() == GOLD


def test_rate_of_a_counter_that_starts_again():
    found = pictures.rate(np.array([0.0, 1.0, 3.0, 4.0]), np.array([5.0, 15.0, 35.0, 8.0]))
    assert found[:3].tolist() == [10, 10, 8]
    assert np.isnan(found[3])


@pytest.mark.parametrize("column", [True, False])
def test_over_time_has_a_panel_for_each_metric_and_marks_in_all(column):
    frame = pd.DataFrame({"kintsugi_kv_use": [0.1, 0.2, 0.3], "kintsugi_tokens_total": [0, 9, 9]})
    if column:
        frame["seconds"] = [0.0, 1.0, 2.0]
    else:
        frame.index = [0.0, 1.0, 2.0]
    pictures.over_time(frame, ("kintsugi_kv_use", "kintsugi_tokens_total"), {"killed": 1.5}, "x")
    use, tokens = plt.gcf().axes
    assert (use.get_ylabel(), tokens.get_ylabel()) == ("KV use", "tokens/s")
    assert list(use.lines[0].get_ydata()) == [0.1, 0.2, 0.3]
    assert list(tokens.lines[0].get_ydata())[:2] == [9, 0]
    assert all(list(axes.lines[1].get_xdata()) == [1.5, 1.5] for axes in (use, tokens))
    assert words_of(plt.gcf()) == ["killed"]


def test_who_answered_counts():
    found = pictures.who_answered([0, 1, 2, 3], ["1", "1", "2", "1"], {"loaded": 1.5})
    assert found == {"1": 3, "2": 1}
    axes = plt.gcf().axes[0]
    assert list(axes.lines[0].get_xdata()) == [0, 1, 3]
    assert list(axes.lines[1].get_ydata()) == [1]
    assert {"3 answers", "1 answers", "loaded"} <= set(words_of(plt.gcf()))


def test_each_client_has_its_own_height():
    pictures.who_answered([0, 0, 1, 1], ["1"] * 4, clients=[0, 1, 0, 1])
    first, second, third, fourth = plt.gcf().axes[0].lines[0].get_ydata()
    assert first == third < second == fourth


# ---- predictions


def test_decode_step_stacks_what_the_table_has():
    model = MODELS["llama2-13b"]
    tables = {name: over(model, MACHINES[name], batches=(1, 16)) for name in
              ("dgx-a100", "dgx-h100")}
    pictures.decode_step(tables, batch=16, title="13B")
    axes = plt.gcf().axes
    assert [title_of(one) for one in axes] == list(tables)
    for one, frame in zip(axes, tables.values(), strict=True):
        rows = frame[frame["batch"] == 16]
        widths = [bar.get_width() for bar in one.patches]
        wanted = [1e3 * row[kind] for _, row in rows.iterrows() for kind in KINDS]
        assert widths == pytest.approx(wanted)
        assert [text.get_text() for text in one.get_yticklabels()] == ["tp 1", "tp 2", "tp 4"]
    assert len(plt.gcf().legends[0].get_texts()) == len(KINDS)
    pictures.decode_step(tables["dgx-a100"])  # one table, its first batch
    assert "batch 1" in plt.gcf().axes[0].get_xlabel()
    with pytest.raises(ValueError, match="batch 7 is not in the frame: \\[1, 16\\]"):
        pictures.decode_step(tables, batch=7)
