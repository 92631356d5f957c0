"""The ledger: what it notes and shows, and that nothing is lost or half written."""

import json
import multiprocessing
import os

import matplotlib
import numpy as np
import pytest
import torch

from utils.course import ledger, predictions
from utils.course.predictions import predict, reveal
from utils.paths import ROOT

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def nothing_unwritten(monkeypatch):
    monkeypatch.setattr(predictions, "_unwritten", {})


def test_a_prediction_is_noted_and_revealed(home, capsys):
    predict("01 payload", 12, "MB")
    assert capsys.readouterr().out == "01 payload: 12 MB is noted.\n"
    reveal("01 payload", theory=8, measured=8.04)
    assert capsys.readouterr().out.splitlines() == [
        "01 payload",
        "  prediction             12 MB",
        "  theory                  8 MB",
        "  measurement          8.04 MB",
        "Your prediction is 1.5 times the measurement.",
        "The theory is within 1 % of the measurement.",
    ]
    entry = json.loads((home / "ledger.json").read_text())["predictions"]["01 payload"]
    assert entry == {
        "value": 12.0, "late": False, "unit": "MB",
        "revealed": True, "theory": 8.0, "measured": 8.04,
    }


def test_the_lesson_goes_on_without_a_prediction(capsys):
    predict("01 payload", None, "MB")
    assert capsys.readouterr().out == "01 payload: write your number (MB) instead of None.\n"
    reveal("01 payload", theory=3, measured=2, show="text")
    out = capsys.readouterr().out
    assert "  prediction                 –\n" in out
    assert "No prediction was made: next time, guess before you run.\n" in out
    assert "The theory is 1.5 times the measurement.\n" in out


def test_reveal_without_predict_and_without_measurement(capsys):
    reveal("01 never predicted", theory=3, unit="ranks", show="text")
    out = capsys.readouterr().out
    assert "3 ranks" in out and out.count("–") == 2


def test_none_does_not_wipe_out_a_prediction_and_a_reveal_fixes_it(capsys):
    predict("01 a", 5)
    predict("01 a", None)
    predict("01 a", 6)
    reveal("01 a", measured=7, show="figure")
    capsys.readouterr()
    predict("01 a", 7)
    assert "6 stays, since the measurement has been revealed" in capsys.readouterr().out
    assert ledger.read()["predictions"]["01 a"]["value"] == 6


def test_a_number_after_the_reveal_is_kept_but_does_not_count(capsys):
    """After a run of all cells with None, a number is no longer a prediction."""
    predict("01 a", None, "MB")
    reveal("01 a", measured=7, show="text")
    for number in (5, 14):
        capsys.readouterr()
        predict("01 a", number, "MB")
        expected = f"01 a: {number} MB came after the reveal, so it does not count.\n"
        assert capsys.readouterr().out == expected
    assert not ledger.counts(ledger.read()["predictions"]["01 a"])
    reveal("01 a", measured=7, show="text")
    out = capsys.readouterr().out
    assert "Your number, which came after the reveal, is 2 times the measurement." in out


@pytest.mark.parametrize("value", ["12 MB", True, float("nan"), float("inf"), [1], 1j, np.ones(2)])
def test_bad_values_are_one_clear_sentence(value):
    with pytest.raises(ValueError, match=r"^01 a: the prediction .* is not a finite number: write"):
        predict("01 a", value)
    with pytest.raises(ValueError, match=r"^01 a: the measurement .* is not a finite number"):
        reveal("01 a", measured=value)


def test_bad_names_and_bad_show():
    with pytest.raises(ValueError, match="the name 3 is not a string"):
        predict(3, 4)
    with pytest.raises(ValueError, match="show='none' is not known: use one of all, text, figure"):
        reveal("01 a", show="none")


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3), torch.tensor(3.0)])
def test_numbers_of_all_libraries(value):
    predict("01 a", value)
    assert ledger.read()["predictions"]["01 a"]["value"] == 3.0


@pytest.mark.parametrize(
    "value, text",
    [(133120, "133,120"), (0.03125, "0.03125"), (1234.5, "1,234"), (0, "0"), (-2.5, "-2.5"),
     (1e20, "1e+20"), (1.23456e-7, "1.235e-07")],
)
def test_numbers_are_readable(value, text):
    assert predictions._text(value, "") == text


@pytest.mark.parametrize(
    "value, truth, text",
    [(8, 8.04, "within 1 % of"), (8, 8.0001, "equal to"), (0, 0, "equal to"), (3, 2, "1.5 times"),
     (2, 0, "2 above"), (-1, 3, "4 below"), (16, 15.3, "within 5 % of"), (16, 15, "1.1 times")],
)
def test_comparisons(value, truth, text):
    assert predictions._compared(value, truth) == text


# ── the file ──────────────────────────────────────────────────────────────────────────────────


def note_many(home: str, writer: int) -> None:
    os.environ["KINTSUGI_HOME"] = home
    for number in range(20):
        predict(f"{writer} {number}", number)


def test_notebooks_that_write_at_once_lose_nothing(home):
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=note_many, args=(str(home), n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(200)  # each imports torch first
    assert [writer.exitcode for writer in writers] == [0] * 4
    noted = ledger.read()["predictions"]
    assert {name: entry["value"] for name, entry in noted.items()} == {
        f"{writer} {number}": number for writer in range(4) for number in range(20)
    }
    assert sorted(path.name for path in home.iterdir()) == ["ledger.json", "ledger.lock"]


def test_a_failed_write_leaves_the_old_file(home, monkeypatch):
    predict("01 a", 1)
    before = (home / "ledger.json").read_bytes()
    with pytest.raises(TypeError):
        ledger.change(lambda content: content.update(bad=object()))
    assert (home / "ledger.json").read_bytes() == before
    assert not list(home.glob("*.tmp"))


@pytest.mark.parametrize("content", [b"{broken", b"\xff\xfe", b"[1]", b'{"predictions": {"a": 1}}'])
def test_an_unreadable_file_is_kept_aside(home, capsys, content):
    home.mkdir()
    for number in (1, 2):
        (home / "ledger.json").write_bytes(content)
        predict("01 a", number)
        aside = home / f"ledger-unreadable-{number}.json"
        assert f"It is kept as {aside}, and a new one begins." in capsys.readouterr().out
        assert aside.read_bytes() == content
    assert ledger.read()["predictions"]["01 a"]["value"] == 2


def test_a_folder_that_cannot_be_used_does_not_stop_the_lesson(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KINTSUGI_HOME", str(tmp_path / "file" / "home"))
    predict("01 a", 5, "MB")
    reveal("01 a", measured=5, show="text")
    out = capsys.readouterr().out
    assert "cannot be used (Not a directory): set KINTSUGI_HOME to another." in out
    assert "Your prediction is equal to the measurement." in out


def test_without_the_variable_the_ledger_lies_in_the_repository(monkeypatch):
    monkeypatch.delenv("KINTSUGI_HOME")
    assert ledger.home() == ROOT / ".kintsugi"


OLD = {  # current name: the name under the first, the second and, if different, the third numbering
    "00 tokens per second": ("00 tokens a second", "00 tokens a second", "00 tokens a second"),
    "01 payload": ("01 payload", "01 payload"),
    "08 bubble": ("07 bubble", "08 bubble"),
    "09 busiest": ("08 busiest", "09 busiest"),
    "16 steps": ("14 steps", "16 steps"),
    "17 in flight at half of the rate": (
        "14 in flight at half of the rate", "16 in flight at half of the rate"
    ),
    "lab 10d frontier": ("lab 09d frontier", "lab 10d frontier"),
    "lab 14a forward": ("lab 12a forward", "lab 14a forward"),
    "lab 16a loop of a rank": ("lab 14c loop of a rank", "lab 16c loop of a rank"),
    "lab 17a config.pbtxt": ("lab 14a config.pbtxt", "lab 16a config.pbtxt"),
}


@pytest.mark.parametrize("numbering", [1, 2, 3, 4])
def test_what_was_noted_under_an_old_name_is_carried_over(home, numbering):
    home.mkdir()
    names = [(*old, new, new)[numbering - 1] for new, old in OLD.items()]
    names = [new if numbering == 4 else name for new, name in zip(OLD, names)]
    old = {part: {name: {"of": name} for name in names} for part in ledger.PARTS}
    if numbering > 1:
        old["numbering"] = numbering
    (home / "ledger.json").write_text(json.dumps(old))
    for _ in range(2):
        content = ledger.read()
        for part in ledger.PARTS:
            assert {new: entry["of"] for new, entry in content[part].items()} == dict(
                zip(OLD, names)
            )
        ledger.change(lambda content: None)  # writes the new names



@pytest.mark.parametrize("before", ["12", "lab 12", "lab 13b"])
def test_a_figures_title_is_the_name_without_its_lesson(monkeypatch, before):
    titles = []
    monkeypatch.setattr(predictions.figures, "prediction", lambda rows, title: titles.append(title))
    reveal(f"{before} 400 loads", theory=8, show="figure")
    assert titles == ["400 loads"]
