"""The prediction ledger: write down a number first, look at the measurement afterwards.

    predict("01 all-reduce payload", None, "MB")     # replace None with your number
    …
    reveal("01 all-reduce payload", theory=3.5, measured=traffic.payload() / 1e6)

`reveal` shows prediction, theory and measurement in a small table and figure, followed by one
sentence that compares them. The numbers are kept in one file for all lessons
(`utils/course/ledger.py`), so begin names with the lesson's number to make them unique.
"""

import math
import numbers
import re

from utils.course import ledger
from utils.drawing import figures

SHOW = ("all", "text", "figure")


def predict(name: str, value: float | None = None, unit: str = "") -> None:
    """Record your prediction. None: print how to fill it in, and the lesson continues.

    A number entered after the reveal does not count as a prediction: it does not replace one, and
    without one it is kept as late, for comparison.
    Raises ValueError for anything but a finite number or None.
    """
    _check_name(name)
    number = None if value is None else _finite(name, "prediction", value)

    def note(content: dict) -> None:
        entry = content["predictions"].setdefault(name, {"value": None, "revealed": False})
        entry["unit"] = unit
        if number is not None and not (entry["revealed"] and ledger.counts(entry)):
            entry.update(value=number, late=entry["revealed"])

    _keep(note)
    entry = _entry(name)
    kept = entry["value"]
    if kept is None:
        print(f"{name}: write your number{f' ({unit})' if unit else ''} instead of None.")
    elif number is not None and kept != number:
        print(f"{name}: {_text(kept, unit)} stays, since the measurement has been revealed.")
    elif ledger.counts(entry):
        print(f"{name}: {_text(kept, unit)} is noted.")
    else:
        print(f"{name}: {_text(kept, unit)} came after the reveal, so it does not count.")


def reveal(
    name: str,
    theory: float | None = None,
    measured: float | None = None,
    unit: str | None = None,
    show: str = "all",
) -> None:
    """Show prediction, theory and measurement, all in the unit of `predict`.

    show: "all", or only the "text" or the "figure" (a cell whose text the notebook test compares
        must hold no measured time; put that into a cell tagged `nbval-ignore-output`).
    Raises ValueError for values that are not finite numbers.
    """
    _check_name(name)
    if show not in SHOW:
        raise ValueError(f"show={show!r} is not known: use one of {', '.join(SHOW)}")
    theory = None if theory is None else _finite(name, "theory", theory)
    measured = None if measured is None else _finite(name, "measurement", measured)

    def note(content: dict) -> None:
        entry = content["predictions"].setdefault(name, {"value": None, "unit": unit or ""})
        entry.update(revealed=True, theory=theory, measured=measured)

    _keep(note)
    entry = _entry(name)
    unit = entry.get("unit", "") if unit is None else unit
    rows = {"prediction": entry["value"], "theory": theory, "measurement": measured}
    if show != "text":
        title = re.sub(r"^(lab )?\d+\w? ", "", name)  # "12 loads": 12 is the lesson
        figures.prediction([(kind, value, unit) for kind, value in rows.items()], title=title)
    if show != "figure":
        print(_table(name, rows, unit, entry.get("late", False)))


def _table(name: str, rows: dict, unit: str, late: bool) -> str:
    lines = [name]
    for kind, value in rows.items():
        lines.append(f"  {kind:<12}{'–' if value is None else _text(value, unit):>16}")
    prediction, theory, measured = rows.values()
    truth, word = (theory, "theory") if measured is None else (measured, "measurement")
    if prediction is None:
        lines.append("No prediction was made: next time, guess before you run.")
    elif truth is not None:
        what = "number, which came after the reveal," if late else "prediction"
        lines.append(f"Your {what} is {_compared(prediction, truth)} the {word}.")
    if theory is not None and measured is not None:
        lines.append(f"The theory is {_compared(theory, measured)} the measurement.")
    return "\n".join(lines)


def _compared(value: float, truth: float) -> str:
    """ "equal to" if shown with equal digits, "within 1 % of", "within 5 % of" or "1.5 times"."""
    if _text(value, "") == _text(truth, "") or abs(value - truth) <= 1e-12:
        return "equal to"
    if math.isclose(value, truth, rel_tol=0.01):
        return "within 1 % of"
    if truth == 0 or value / truth <= 0:
        return f"{abs(value - truth):.2g} {'above' if value > truth else 'below'}"
    times = f"{value / truth:.2g} times"
    return "within 5 % of" if times == "1 times" else times


def _text(value: float, unit: str) -> str:
    """4 significant digits, no exponent where it can be avoided: 133,120 B, 0.0312 s."""
    whole = float(value).is_integer() and abs(value) < 1e15
    number = f"{value:,.0f}" if whole or 1000 <= abs(value) < 1e15 else f"{value:.4g}"
    return f"{number} {unit}".rstrip()


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'the name {name!r} is not a string: predict("01 my guess", 12, "MB")')


def _finite(name: str, what: str, value) -> float:
    """A plain float of a Python, NumPy or PyTorch number."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{name}: the {what} {value!r} is not a finite number: write 12 or 0.5")
    return float(value)


# Entries that could not be written (a read-only folder) are kept as long as this kernel runs.
_unwritten: dict[str, dict] = {}


def _keep(note) -> None:
    try:
        ledger.change(note)
    except ledger.LedgerError as error:
        print(f"Kept only while this notebook runs: {error}.")
        content = {"predictions": _unwritten}
        note(content)


def _entry(name: str) -> dict:
    return _unwritten.get(name) or ledger.read()["predictions"][name]
