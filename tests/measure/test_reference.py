"""The lessons show the newest card's figures, and their stored outputs match."""

import contextlib
import io
import json
import shutil

import pytest

from utils.measure import reference
from utils.paths import ROOT

SHIPPED = reference.FOLDER / "nvidia_h200.json"


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder with only the workshop's card, without those that `make gpu` measured here."""
    monkeypatch.setattr(reference, "FOLDER", tmp_path)
    shutil.copy(SHIPPED, tmp_path)
    return tmp_path


def test_the_newest_card_is_shown_with_name_date_and_commit(shipped, capsys):
    rows = {"copy": {"bytes_per_s": 2e12}, "apex": {"absent": "apex is not installed"}}
    part = {"date": "2099-01-02T03:04:05+00:00", "commit": "0123456789, changed", "threads": 2}
    later = {"gpu": "NVIDIA Z1", "parts": {"adamw": part | {"rows": rows}, "tests": {"rows": {}}}}
    (shipped / "nvidia_z1.json").write_text(json.dumps(later))
    (shipped / "two_nodes.json").write_text("{}")
    reference.show("adamw", "mfu", bytes_per_s="{:.1e}".format, of_copy="{:.2f}".format)
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "one NVIDIA Z1, 2099-01-02, commit 0123456, 2 CPU threads",
        "bytes_per_s of_copy",
        "copy 2.0e+12",
        "mfu: no card's figures are stored; `make gpu PARTS=mfu` stores them",
    ]


def test_without_a_card_there_is_nothing_to_show(shipped, capsys):
    (shipped / SHIPPED.name).unlink()
    assert reference.newest() is None and reference.rows("mfu") == {}
    reference.show("mfu", mfu=str)
    assert capsys.readouterr().out.startswith("mfu: no card's figures are stored")


def cells():
    """(source, output) of the lessons' cells that show a card."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and "reference.show(" in source:
                stored = "".join("".join(one.get("text", "")) for one in cell["outputs"])
                yield pytest.param(source, stored, id=path.stem)


@pytest.mark.parametrize("source, stored", list(cells()))
def test_lessons_have_stored_what_the_workshops_card_shows(source, stored, shipped):
    """nbval ignores these outputs, because a learner's card may be newer."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(source, {})
    assert said.getvalue() == stored
