"""The reports that a lab sends and the board accepts; both sides use the same validation.

A message has one learner's reports, in JSON, at most BODY bytes:

    {"learner": 32 hex digits, "alias": "gentle otter", "now": seconds,
     "reports": [{"kind": "check", "name": "lab 01b ring all-reduce", …}, …]}

    kind          the other fields
    check         done, tries, symptom (first line, without paths of the learner), at
    prediction    value, unit, late (after the reveal), theory, measured
    help          question (None: withdrawn), at; its name is ""

A message has everything in a ledger, so none depends on another. Times are seconds since 1970 by
the learner's clock; `now` tells the board how far that clock is off.
"""

import json
import math
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.course import ledger
from utils.course.hand import LONGEST as QUESTION
from utils.paths import ROOT

BODY = 1024 * 1024  # bytes of a message
MOST = 400  # reports in a message: the course has about 200
ALIAS, NAME, SYMPTOM, UNIT = 40, 200, 300, 40  # characters
BIGGEST = 2**53  # integers up to here are exact in a browser


class Refused(ValueError):
    """The message is invalid. The text says why."""


def text(longest: int, least: int = 0) -> Callable[[Any], str]:
    """A validator of texts: printable, `least` to `longest` characters."""

    def judge(value: Any) -> str:
        if not isinstance(value, str) or not least <= len(value) <= longest:
            raise Refused(f"is not a text of {least} to {longest} characters")
        if not value.isprintable():  # nor is half of a surrogate pair
            raise Refused("holds characters that cannot be printed")
        return value

    return judge


def alias(value: Any) -> str:
    """Validate an alias: a text that is visible and stays in its line."""
    text(ALIAS, 1)(value)
    classes = [unicodedata.combining(sign) for sign in unicodedata.normalize("NFC", value)]
    accents = "".join("^" if one in (220, 230) else " " for one in classes)  # below or above
    if value.isspace() or "^^^" in accents:
        raise Refused("is only spaces, or stacks accents")
    return value


def _hexadecimal(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{32}", value):
        raise Refused("is not 32 hexadecimal digits")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= BIGGEST:
        raise Refused("is not a non-negative integer")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise Refused("is neither true nor false")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e300 or not math.isfinite(value):
        raise Refused("is not a number")
    return float(value)


def _maybe(judge: Callable) -> Callable[[Any], Any]:
    return lambda value: None if value is None else judge(value)


COMMON = {"kind": text(20), "name": text(NAME)}
FIELDS = {
    "check": {"done": _flag, "tries": _whole, "symptom": text(SYMPTOM), "at": _maybe(_number)},
    "prediction": {
        "value": _number, "unit": text(UNIT), "late": _flag,
        "theory": _maybe(_number), "measured": _maybe(_number),
    },
    "help": {"question": _maybe(text(QUESTION)), "at": _maybe(_number)},
}
MESSAGE = {
    "learner": _hexadecimal, "alias": alias, "now": _number,
    "reports": lambda value: value,
}


def _judge(what: str, value: Any, fields: dict[str, Callable]) -> dict:
    """A dict of exactly these fields, each validated; raises Refused."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        raise Refused(f"{what} is not an object of {', '.join(fields)}")
    found = {}
    for field, judge in fields.items():
        try:
            found[field] = judge(value[field])
        except Refused as error:
            raise Refused(f"{field} of {what} {error}") from None
    return found


def report(value: Any) -> dict:
    """A valid report; raises Refused."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in FIELDS:
        raise Refused(f"a report's kind is not one of {', '.join(FIELDS)}")
    return _judge(f"a report ({kind})", value, COMMON | FIELDS[kind])


def message(body: bytes) -> dict:
    """The message in a request's body; raises Refused."""

    def no_number(name: str) -> None:
        raise Refused(f"{name} is not a number in JSON")

    try:
        content = json.loads(body, parse_constant=no_number)
    except Refused:
        raise
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or [[[[…
        raise Refused("the body is not JSON") from None
    found = _judge("the message", content, MESSAGE)
    if not isinstance(found["reports"], list) or len(found["reports"]) > MOST:
        raise Refused(f"reports is not a list of at most {MOST}")
    found["reports"] = [report(one) for one in found["reports"]]
    return found


# ---- in the lab


def of_ledger(content: dict) -> list[dict]:
    """Reports of everything in a ledger that may be reported, at most MOST.

    Entries of another form (edited by hand) are left out.
    """
    found: list[dict] = []
    for name, done in content["checks"].items():
        tries = content["tries"].get(name, {})
        found.append({
            "kind": "check", "name": name, "done": done,
            "tries": tries.get("count", 1), "at": tries.get("at"),
            "symptom": _without_paths(tries.get("symptom", "")),
        })
    for name, entry in content["predictions"].items():
        if entry.get("value") is not None:
            found.append({
                "kind": "prediction", "name": name, "value": entry["value"],
                "unit": entry.get("unit", ""), "late": not ledger.counts(entry),
                "theory": entry.get("theory"), "measured": entry.get("measured"),
            })
    hand = content["help"]
    if hand:
        found.append(
            {"kind": "help", "name": "", "question": hand.get("question"), "at": hand.get("at")}
        )
    return list(filter(_is_report, found))[-MOST:]


def _is_report(one: dict) -> bool:
    try:
        report(one)
    except Refused:
        return False
    return True


def _without_paths(symptom: Any) -> str:
    """One short line without folders that identify the learner."""
    line = str(symptom)
    for folder, short in ((ROOT, "."), (Path.home(), "~")):
        if len(str(folder)) > 1:
            line = line.replace(str(folder), short)
    line = "".join(sign if sign.isprintable() else " " for sign in line)
    return line if len(line) <= SYMPTOM else line[: SYMPTOM - 1] + "…"
