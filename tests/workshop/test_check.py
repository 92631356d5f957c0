"""`make check`: its tests exist, and their results are reported in plain words."""

import pytest

from tests import check
from utils.paths import ROOT


@pytest.mark.parametrize("tests", [tests for _, tests, _ in check.STEPS])
def test_what_it_runs_is_there(tests):
    file, _, function = tests.partition("::")
    assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text() if function else True
    assert (ROOT / file).is_file()


@pytest.mark.parametrize(
    ("body", "state", "words"),
    [
        ("pass", "ok", ""),
        ("pytest.skip('no server here')", "note", "no server here"),
        ("assert 1 + 1 == 3", "fix", "assert (1 + 1) == 3"),
    ],
)
def test_each_outcome(tmp_path, body, state, words):
    file = tmp_path / "test_one.py"
    file.write_text(f"import pytest\n\ndef test_one():\n    {body}\n")
    found = check.run(str(file))
    assert found[0] == state and words in found[1]


def test_a_failure_names_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(check, "check_environment", lambda: True)
    monkeypatch.setattr(check, "STEPS", (("sums are right", "tests/sums.py", "learn to add"),))
    monkeypatch.setattr(check, "run", lambda tests: ("fix", "assert 2 == 3"))
    assert check.main() == 1
    out = capsys.readouterr().out
    assert "NOT: sums are right → learn to add" in out and "assert 2 == 3" in out
    assert "1 of 2 failed" in out
