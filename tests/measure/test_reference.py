"""What the lessons show of a stored card: the newest one, and what they have stored of it."""

import contextlib
import io
import json
import shutil

import pytest

from utils.measure import reference
from utils.paths import ROOT

SHIPPED = reference.FOLDER / "nvidia_h200.json"


@pytest.fixture
def shipped(tmp_path):
    """A folder with the workshop's own card, and not those that `make gpu` has measured here."""
    shutil.copy(SHIPPED, tmp_path)
    return tmp_path


def test_the_newest_card_is_shown_with_name_date_and_commit(shipped, capsys):
    rows = {"copy": {"bytes_per_s": 2e12}, "apex": {"absent": "apex is not installed"}}
    part = {"date": "2099-01-02T03:04:05+00:00", "commit": "0123456789, changed", "rows": rows}
    later = {"gpu": "NVIDIA Z1", "parts": {"adamw": part, "tests": {"rows": {}}}}
    (shipped / "nvidia_z1.json").write_text(json.dumps(later))
    (shipped / "two_nodes.json").write_text("{}")
    reference.show("adamw", "mfu", folder=shipped, bytes_per_s="{:.1e}", of_copy="{:.2f}")
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["one", "NVIDIA", "Z1,", "2099-01-02,", "commit", "0123456"],
        ["bytes_per_s", "of_copy"],
        ["copy", "2.0e+12"],
    ]
    reference.show("mfu", folder=shipped, mfu="{}")
    assert capsys.readouterr().out.startswith("no card's figures are stored for this")


def test_without_a_card_there_is_nothing_to_show(tmp_path, capsys):
    assert reference.newest(tmp_path) is None and reference.rows("mfu", tmp_path) == {}
    reference.show("mfu", folder=tmp_path, mfu="{}")
    assert "`make gpu` stores them" in capsys.readouterr().out


def cells():
    """(notebook, source, text) of the lessons' cells that show the card."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and "reference.show(" in source:
                outputs = ("".join(one.get("text", "")) for one in cell["outputs"])
                yield pytest.param(source, "".join(outputs), id=path.stem)


@pytest.mark.parametrize("source, stored", cells())
def test_lessons_have_stored_what_the_workshops_card_shows(source, stored, shipped, monkeypatch):
    """nbval ignores it, because a learner's own card may be the newest."""
    monkeypatch.setattr(reference.show, "__kwdefaults__", {"folder": shipped})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(source, {})
    assert said.getvalue() == stored
