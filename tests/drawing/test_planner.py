"""The planner's drawings and sliders: their claims, and that they draw."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from utils.drawing import planner as pictures
from utils.drawing import planner_widget as widget
from utils.planner import MACHINES, MODELS, Strategy, plan
from utils.planner.published import FITTED, HELD_OUT, OTHER_SOFTWARE

A100 = MACHINES["dgx-a100"]


def written():
    return {text.get_text() for axes in plt.gcf().axes for text in axes.texts}


def test_every_row_and_its_error_is_drawn():
    groups = {"fitted": FITTED, "held out": HELD_OUT, "other": OTHER_SOFTWARE}
    pictures.errors(groups)
    rows = [row for group in groups.values() for row in group]
    axes = plt.gcf().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [row.name for row in rows]
    assert {pictures.signed(row.error()) for row in rows} | set(groups) <= written()
    assert [pictures.signed(share) for share in (0.085, -0.003, -0.06)] == ["+8%", "0%", "−6%"]


def test_the_map_names_the_best_split():
    found = pictures.best_of_each(MODELS["gpt3-13b"], A100, 64)
    best = max(one.mfu for one in found.values() if one)
    pictures.strategy_map(MODELS["gpt3-13b"], A100, 64)
    bold = {text.get_text() for text in plt.gcf().axes[0].texts if text.get_fontweight() == "bold"}
    assert bold == {f"{best:.0%}"}
    assert all(tp <= 8 for (tp, _), one in found.items() if one and one.mfu == best)


def test_a_map_across_cp():
    model = MODELS["llama3-8b"]
    long = {"model": replace(model, seq=65536), "machine": MACHINES["dgx-h100"], "gpus": 16}
    found = pictures.best_of_each(**long, across="cp", global_batch=2)
    best = max((one for one in found.values() if one), key=lambda one: one.mfu)
    pictures.strategy_map(**long, across="cp", global_batch=2)
    axes = plt.gcf().axes[0]
    bold = {text.get_text() for text in axes.texts if text.get_fontweight() == "bold"}
    assert bold == {f"{best.mfu:.0%}"} and best.strategy.cp > 1
    assert all(one is None or one.strategy.cp == cp for (_, cp), one in found.items())
    assert "cp 4" in {text.get_text() for text in axes.texts} | {
        label.get_text() for label in axes.get_xticklabels()
    }


def test_more_micro_batches_are_better():
    series = pictures.micro_batch_curves(
        MODELS["gpt3-175b"], MACHINES["frontier"], [(8, 8, 1), (4, 16, 1)], [8, 32, 128],
        recompute="full",
    )
    assert all(shares == sorted(shares) for shares in series.values())


def test_without_a_browser_the_explorer_draws_one_figure(capsys):
    widget.explorer("gpt3-13b", gpus=128, live=False)
    assert len(plt.get_fignums()) == 1
    assert "gpt3-13b, tp 8 · pp 8 · dp 2" in capsys.readouterr().out


def test_the_sliders_change_the_plan_and_name_what_does_not_go():
    widgets = pytest.importorskip("ipywidgets")
    start = {"model": "gpt3-13b", "machine": "dgx-a100", "gpus": 128, "tp": 8, "cp": 1,
             "pp": 2, "context": "ring", "interleave": 1, "micro_batch": 1, "recompute": "full",
             "zero": 1, "sequence_parallel": False}
    panel = widget._panel(widgets, start)
    left, right = panel.children
    *sliders, button = left.children
    controls = {control.description: control for control in sliders}
    image, words = right.children
    before, first = bytes(image.value), words.value
    assert before.startswith(b"\x89PNG") and "tp 8 · pp 2 · dp 8" in first
    controls["tp"].value = 4
    assert "tp 4 · pp 2 · dp 16" in words.value and bytes(image.value) != before
    controls["tp"].value = 16
    assert "No plan" in words.value  # 40 heads
    controls["tp"].value, controls["cp"].value = 4, 2
    assert "No plan" in words.value and "attention fused" in words.value
    controls["context"].value = "ulysses"
    assert "tp 4 · cp 2, ulysses · pp 2 · dp 8" in words.value
    button.click()
    best = widget.search(MODELS["gpt3-13b"], A100, 128, top=1)[0]
    assert f"MFU {best.mfu:.1%}" in words.value


def test_a_plan_in_one_sentence():
    one = plan(MODELS["1t"], Strategy(1, 64, 8, global_batch=512, recompute="full"), A100)
    assert widget.sentence(one).startswith("1t, tp 8 · pp 64 · dp 1 · micro-batch 1")
