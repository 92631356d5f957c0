"""A request for help is a line in the ledger; outside a class the learner is told so."""

import time

import pytest

from utils.course import ask_for_help, helped, ledger


def test_a_question_is_kept_until_it_is_taken_back(monkeypatch, capsys):
    monkeypatch.setenv(ledger.CLASS, "owl")
    ask_for_help("my ring\nhangs")
    assert capsys.readouterr().out == (
        "The instructor sees that owl asks for help. To withdraw: helped().\n"
    )
    asked = ledger.read()["help"]
    assert asked["question"] == "my ring hangs" and abs(asked["at"] - time.time()) < 60
    helped()
    assert capsys.readouterr().out == "Your request for help is withdrawn.\n"
    assert ledger.read()["help"]["question"] is None


def test_a_long_question_is_cut(monkeypatch):
    monkeypatch.setenv(ledger.CLASS, "owl")
    ask_for_help("x" * 500)
    question = ledger.read()["help"]["question"]
    assert len(question) == 200 and question.endswith("x…")


def test_without_a_class_nobody_sees_it(monkeypatch, capsys):
    monkeypatch.delenv(ledger.CLASS, raising=False)
    ask_for_help()
    assert "This lab is not in a class" in capsys.readouterr().out
    assert ledger.read()["help"] == {}


def test_only_a_text_is_a_question():
    with pytest.raises(TypeError, match="the question 3 is not a string"):
        ask_for_help(3)


def test_a_folder_that_cannot_be_used_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(ledger.CLASS, "owl")
    (tmp_path / "flat").write_text("")
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "flat"))
    ask_for_help()
    assert capsys.readouterr().out.startswith("Not saved: the ledger's folder")
