"""Sliders for a strategy: move one, and see memory and time change.

    from utils.drawing.planner_widget import explorer

    explorer()                       # in JupyterLab: sliders; elsewhere: the figure of one plan
    explorer("1t", "frontier", 3072, live=False)

Without sliders (no browser, or no ipywidgets), the same figure is drawn once, for the start values.
"""

import html
import io
import os
from typing import Any

from utils.choices import RECOMPUTE
from utils.drawing import figures
from utils.planner.machine import MACHINES
from utils.planner.model import MODELS
from utils.planner.plan import Plan, plan
from utils.planner.search import search
from utils.planner.strategy import CONTEXT, Strategy

GPUS = tuple(2**n for n in range(3, 15))
SIZES = (1, 2, 4, 8, 16, 32, 64)


def explorer(
    model: str = "gpt3-175b", machine: str = "dgx-a100", gpus: int = 1024, live: bool | None = None
) -> None:
    """Show the sliders, or one figure.

    model, machine  names of presets;  gpus: devices at the start
    live    None: sliders if a Jupyter server runs this kernel and ipywidgets is installed
    """
    start = {"model": model, "machine": machine, "gpus": gpus, "tp": 8, "cp": 1, "pp": 8,
             "context": "ring", "interleave": 1, "micro_batch": 1, "recompute": "full", "zero": 1,
             "sequence_parallel": False}
    if live is None:
        live = "JPY_SESSION_NAME" in os.environ
    widgets = _ipywidgets() if live else None
    if widgets is None:
        from utils.drawing import planner as pictures_planner

        one = work_out(**start)
        pictures_planner.card(one)
        print(sentence(one))
        print("In JupyterLab this cell has sliders.")
        return
    from IPython.display import display

    display(_panel(widgets, start))


def work_out(
    model: str, machine: str, gpus: int, tp: int, pp: int, cp: int = 1, **choices: Any
) -> Plan:
    """The plan that the sliders set, with the dp that remains; ValueError if none does."""
    if gpus % (tp * cp * pp):
        raise ValueError(
            f"{gpus} GPUs are not a multiple of tp · cp · pp = {tp} · {cp} · {pp}: dp is not whole"
        )
    strategy = Strategy(gpus // (tp * cp * pp), pp, tp, cp=cp, **choices)
    return plan(MODELS[model], strategy, MACHINES[machine])


def sentence(one: Plan) -> str:
    """A plan in one line."""
    return (
        f"{one.model.name}, {one.strategy}: {'fits' if one.fits else 'does not fit'}, "
        f"{one.memory['total'] / 1e9:.1f} GB per rank, {one.seconds['total']:.2f} s per step, "
        f"MFU {one.mfu:.1%}."
    )


def picture(one: Plan) -> bytes:
    """The figure of a plan as PNG."""
    from utils.drawing import planner as pictures_planner

    drawn, axes = figures.plt.subplots(2, 1, figsize=(8.0, 2.6))
    pictures_planner.card(one, axes)
    file = io.BytesIO()
    drawn.savefig(file, format="png")
    figures.plt.close(drawn)
    return file.getvalue()


def _ipywidgets():
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets


def _panel(widgets, start):
    """The sliders, the button and the figure, connected."""
    known = {"model": [*MODELS], "machine": [*MACHINES], "recompute": [*RECOMPUTE],
             "context": [*CONTEXT]}
    ranges = {"gpus": sorted({*GPUS, start["gpus"]}), "tp": SIZES[:6], "cp": SIZES[:6],
              "pp": SIZES,
              "interleave": (1, 2, 3, 4, 6, 8), "micro_batch": SIZES[:5],
              "zero": (0, 1, 2, 3)}
    controls = {}
    for name, value in start.items():
        text = {"description": name.replace("_", " "), "style": {"description_width": "110px"}}
        if name in known:
            controls[name] = widgets.Dropdown(options=known[name], value=value, **text)
        elif name in ranges:
            controls[name] = widgets.SelectionSlider(
                options=ranges[name], value=value, continuous_update=False, **text
            )
        else:
            controls[name] = widgets.Checkbox(value=value, indent=True, **text)
    image, words = widgets.Image(format="png", width="720"), widgets.HTML()
    button = widgets.Button(description="the fastest that fits")

    def update(*_):
        try:
            one = work_out(**{name: control.value for name, control in controls.items()})
        except ValueError as error:
            words.value = f"<b>No plan:</b> {html.escape(str(error))}"
            return
        words.value = html.escape(sentence(one))
        image.value = picture(one)

    def best(*_):
        fixed = {name: ranges[name] for name in ("tp", "cp", "pp", "interleave", "micro_batch")}
        found = search(MODELS[controls["model"].value], MACHINES[controls["machine"].value],
                       controls["gpus"].value, top=1, zero=(0, 1, 3), **fixed)
        if not found:
            words.value = "<b>No strategy fits.</b>"
            return
        for control in controls.values():
            control.unobserve(update, "value")
        for name in set(controls) - {"model", "machine", "gpus"}:
            controls[name].value = getattr(found[0].strategy, name)
        for control in controls.values():
            control.observe(update, "value")
        update()

    for control in controls.values():
        control.observe(update, "value")
    button.on_click(best)
    update()
    left = widgets.VBox([*controls.values(), button])
    return widgets.HBox([left, widgets.VBox([image, words])])
