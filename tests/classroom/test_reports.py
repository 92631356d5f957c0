"""Only what may be reported is; an invalid message is refused with its reason."""

import json
from pathlib import Path

import pytest

from tests.classroom.boards import check, message, prediction
from utils.classroom import reports
from utils.paths import ROOT


def encoded(content):
    return json.dumps(content).encode()


def test_a_message_is_read_as_it_was_written():
    hand = {"kind": "help", "name": "", "question": "Why?", "at": None}
    content = message(check(), prediction(2.5, theory=1.0), hand)
    assert reports.message(encoded(content)) == content
    for alias in ("Nguyễn", "မြို့", "🦉"):  # a script's necessary marks are allowed
        assert reports.alias(alias) == alias


WRONG = {
    "no JSON": (b"{", "the body is not JSON"),
    "no UTF-8": (b'"\xff"', "the body is not JSON"),
    "deep": (b"[" * 100_000, "the body is not JSON"),
    "a list": (b"[]", "the message is not an object of learner, alias"),
    "more": (encoded({**message(), "path": "/home"}), "the message is not an object of"),
    "no alias": (encoded(message(alias="")), "alias of the message is not a text of 1 to 40"),
    "long alias": (encoded(message(alias="x" * 41)), "alias of the message is not a text"),
    "only spaces": (encoded(message(alias="   ")), "alias of the message is only spaces, or"),
    "accents": (encoded(message(alias="a\u0301\u0302\u0303\u0304")), "or stacks accents"),
    "control": (encoded(message(alias="a\x1b[2J")), "alias of the message holds characters that"),
    "half a pair": (encoded(message(alias="\ud800")), "alias of the message holds characters"),
    "learner": (encoded(message(learner="1")), "learner of the message is not 32 hexadecimal"),
    "NaN": (encoded(message(prediction(float("nan")))), "NaN is not a number in JSON"),
    "a huge number": (encoded(message(prediction(10**400))), "value of a report (prediction)"),
    "a truth": (encoded(message(prediction(True))), "value of a report (prediction) is not"),
    "no list": (encoded({**message(), "reports": {}}), "reports is not a list of at most 400"),
    "too many": (encoded(message(*[check()] * 401)), "reports is not a list of at most 400"),
    "unknown kind": (encoded(message({**check(), "kind": "code"})), "kind is not one of check"),
    "no kind": (encoded(message(3)), "a report's kind is not one of"),
    "another's field": (encoded(message({**check(), "value": 3})), "a report (check) is not an"),
    "long symptom": (encoded(message(check(symptom="x" * 301))), "symptom of a report (check)"),
    "negative": (encoded(message(check(tries=-1))), "tries of a report (check) is not a non-neg"),
}


@pytest.mark.parametrize("body, reason", WRONG.values(), ids=WRONG)
def test_what_is_no_message_is_refused_with_its_reason(body, reason):
    with pytest.raises(reports.Refused) as refused:
        reports.message(body)
    assert reason in str(refused.value)


def ledger(**parts):
    return {"checks": {}, "predictions": {}, "tries": {}, "help": {}, "secret": {"a": 1}} | parts


def test_a_ledger_becomes_reports_and_no_path_leaves():
    found = reports.of_ledger(
        ledger(
            checks={"lab 01a": False, "lab 01b": True, "lab of before": False},
            tries={
                "lab 01a": {
                    "count": 3, "at": 5.0,
                    "symptom": f"there is no file {ROOT}/labs/x.py\tin {Path.home()}/y",
                },
                "lab 01b": {"count": 1, "at": 6.0, "symptom": ""},
            },
            predictions={
                "01 a": {"value": 2.0, "unit": "MB", "revealed": True, "measured": 3},
                "01 b": {"value": None, "revealed": True, "measured": 3.0},
                "01 late": {"value": 1.0, "late": True},
            },
            help={"question": "Why?", "at": 7.0},
        )
    )
    home = "~" if len(str(Path.home())) > 1 else ""
    assert found == [
        {
            "kind": "check", "name": "lab 01a", "done": False, "tries": 3, "at": 5.0,
            "symptom": f"there is no file ./labs/x.py in {home}/y",
        },
        {"kind": "check", "name": "lab 01b", "done": True, "tries": 1, "at": 6.0, "symptom": ""},
        {
            "kind": "check", "name": "lab of before", "done": False, "tries": 1, "at": None,
            "symptom": "",
        },
        {
            "kind": "prediction", "name": "01 a", "value": 2.0, "unit": "MB", "late": False,
            "theory": None, "measured": 3,
        },
        {
            "kind": "prediction", "name": "01 late", "value": 1.0, "unit": "", "late": True,
            "theory": None, "measured": None,
        },
        {"kind": "help", "name": "", "question": "Why?", "at": 7.0},
    ]


def test_what_is_no_report_is_left_out_of_a_ledger():
    """After an edit by hand, the valid rest is still reported."""
    found = reports.of_ledger(
        ledger(
            checks={"lab 01a": "yes", "lab 01b": True, "x" * 300: True},
            tries={"lab 01b": {"count": 1, "symptom": "🙂" * 400}},
            predictions={"01 a": {"value": "12", "unit": "MB"}, "01 b": {"value": 1, "unit": 5}},
            help={"question": 5},
        )
    )
    (kept,) = found
    assert kept["name"] == "lab 01b" and len(kept["symptom"]) == reports.SYMPTOM


def test_the_largest_message_of_a_lab_is_one_that_the_board_takes():
    content = message(
        *[check(name="𝔸" * reports.NAME, symptom="𝔸" * reports.SYMPTOM)] * reports.MOST
    )
    assert len(json.dumps(content, ensure_ascii=False).encode()) < reports.BODY
