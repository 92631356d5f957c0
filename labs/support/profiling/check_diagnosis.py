"""Given: what the check cells of the diagnoses look at: they are compared with what was planted.

They say which entries do not hold, and not what would. A diagnosis is data: the file is read, and
nothing in it runs.
"""

import ast
from pathlib import Path
from typing import Any

from labs.support.profiling import programs
from utils.course.assertions import Wrong
from utils.course.runner import Trial

ROOM_MS, ROOM = 8.0, 0.25  # what ms may be off, at least, and as a share: a busy machine
ROOM_BYTES = 0.01  # a report shows three digits
LIBRARY = ("labs.support.profiling.programs", "labs.support.profiling.check_diagnosis",
           "labs.support.profiling.reference")


def slow(trial: Trial) -> str:
    """Judges `slow` in diagnosis.py."""
    number = programs.number_in(trial.path.parent)
    truth = programs.slow(number).truth
    messages = {f"message_{key}": value for key, value in truth["messages"].items()}
    _judged(trial, "slow", truth["late"] | messages)
    return f"the late rank and the messages of the slow program of learner {number}: all 8 hold."


def hanging(trial: Trial) -> str:
    """Judges `hanging` in diagnosis.py."""
    number = programs.number_in(trial.path.parent)
    _judged(trial, "hanging", programs.hanging(number).truth["hanging"])
    return f"who left the others waiting in the hanging program of learner {number}: all 4 hold."


def wrong(trial: Trial) -> str:
    """Judges `wrong` in diagnosis.py."""
    number = programs.number_in(trial.path.parent)
    _judged(trial, "wrong", programs.wrong(number).truth["wrong"])
    return f"where the numbers of learner {number} first go wrong, and why: all 5 hold."


def _judged(trial: Trial, name: str, truth: dict[str, Any]) -> None:
    said = _written(trial.path, name)
    if missing := sorted(truth.keys() - said.keys()):
        raise Wrong(f"{name}() does not say {', '.join(missing)}.")
    for key, value in said.items():
        number = value is None or isinstance(value, int | float)
        if key in truth and not (number or "cause" in key or key == "name"):
            raise Wrong(f"{name}(): {key} is {value!r}, and should be a number, or None for all.")
        if "cause" in key and _words(value) not in map(_words, _known(name, key)):
            listed = ", ".join(f'"{one}"' for one in _known(name, key))
            raise Wrong(f"{name}(): {key} is {value!r}, and should be one of {listed}.")
    wrong = [key for key in truth if not _holds(key, said[key], truth[key])]
    if wrong:
        raise Wrong(
            f"{len(truth) - len(wrong)} of the {len(truth)} entries of {name}() hold for your "
            f"program, and not {', '.join(wrong)}.\nWhich figure, line or report does each of "
            "them come from? The hints name a tool for each."
        )


def _written(path: Path, name: str) -> dict[str, Any]:
    """The dictionary that the function `name` returns, as it is written there.

    Raises NotImplementedError with the task of a stub.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    if not found:
        raise Wrong(f"there is no function {name} in {path.name}.")
    *before, last = found[-1].body
    if isinstance(last, ast.Raise) and "NotImplementedError" in (text := ast.unparse(last)):
        raise NotImplementedError(ast.literal_eval(text.split("NotImplementedError")[1]))
    value = last.value if isinstance(last, ast.Return) else None
    try:
        if not all(isinstance(one, ast.Expr) for one in before):  # a docstring
            raise ValueError
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "dict" and not value.args:
            said = {one.arg: ast.literal_eval(one.value) for one in value.keywords}
        else:
            said = ast.literal_eval(value)
    except (ValueError, TypeError):
        raise Wrong(
            f"{path.name} line {last.lineno}: {name}() is not written out. It is read, and nothing "
            "in it runs:\none `return` of a dictionary with numbers, texts and None."
        ) from None
    if not isinstance(said, dict):
        raise Wrong(f"{name}(): a {type(said).__name__} comes back, and should be a dictionary.")
    return said


def _known(name: str, key: str) -> tuple[str, ...]:
    late = tuple(programs.LATE.values())
    named = {"hanging": programs.HANGS, "wrong": programs.WRONGS, "slow": late}
    return programs.MESSAGES if key == "message_cause" else named[name]


def _words(value: Any) -> str:
    return " ".join(str(value).lower().replace("-", " ").replace("_", " ").split())


def _holds(key: str, said: Any, right: Any) -> bool:
    """Whether an entry is right; where `right` is a list, one of them is meant."""
    if "cause" in key:
        return _words(said) == _words(right)
    if isinstance(right, list):
        return any(said == one for one in right)
    if right is None or said is None or isinstance(said, bool):
        return said is right
    if key == "ms":
        return abs(said - right) <= max(ROOM_MS, ROOM * right)
    if key == "message_bytes":
        return abs(said - right) <= ROOM_BYTES * right
    return said == right
