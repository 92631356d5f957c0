"""`make grade`: the labs' checks on submissions, each run twice in a sandbox."""

import csv
import shutil
import subprocess
import sys

import pytest

from utils.paths import ROOT

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]
LAB = "10_five_dimensions"


def test_a_right_and_an_untouched_submission(tmp_path):
    for name, source in (("ada", f"labs/{LAB}/solution"), ("bob", f"labs/{LAB}")):
        folder = tmp_path / name / "labs" / LAB
        folder.mkdir(parents=True)
        for file in (ROOT / source).glob("*.py"):
            shutil.copy(file, folder)
    out = tmp_path / "grades.csv"
    command = [sys.executable, "-m", "utils.hub.grade", tmp_path / "ada", tmp_path / "bob"]
    subprocess.run([*command, "--out", out], cwd=ROOT, check=True, timeout=600)
    with out.open(newline="") as file:
        table = list(csv.DictReader(file))
    verdicts = {name: {row["verdict"] for row in table if row["submission"] == name}
                for name in ("ada", "bob")}
    assert verdicts == {"ada": {"ok"}, "bob": {"not started"}}
    assert {row["lab"] for row in table} == {LAB}
