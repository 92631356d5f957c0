"""A full disk, a real one of a few megabytes: one sentence, and nothing is lost."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.patience import patience
from tests.small_disk import small_disk
from tests.training.test_train import small_flags
from utils.training.checkpoint import read_run
from utils.training.join import main as join_command
from utils.training.run_folder import newest
from utils.training.train import main

pytestmark = pytest.mark.thorough

DISK = 3 * 2**20


@pytest.fixture
def disk(tmp_path):
    """A folder on its own file system of DISK bytes."""
    with small_disk(tmp_path, DISK) as folder:
        yield folder


def command(*arguments, folder):
    """Return (exit status, stderr); temporary files go to `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    line = [sys.executable, "-m", "utils.train", *map(str, arguments)]
    ended = subprocess.run(
        line, env=environment, capture_output=True, text=True, timeout=patience(120)
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("form", ["whole", "sharded"])
@pytest.mark.parametrize("more", [[], ["--save-async"]])
def test_while_checkpoints_are_written(disk, capsys, form, more):
    """A file leaves no room for the second; the first stays, and the run resumes from it later."""
    file, out = disk / "file", disk / "run"
    flags = small_flags(steps=2, out=out, hidden=64, sample=0, save_format=form)
    assert main([*map(str, flags), *more]) == 0
    file.write_bytes(bytes(DISK - 2**20 * 3 // 2))
    again = ["--resume", str(out), "--steps", "4"]
    assert main(again) == 2
    sentence = r"utils\.train: checkpoint .*-4 could not be written: .*No space left.*\n"
    assert re.fullmatch(sentence, capsys.readouterr().err)
    assert newest(out).name == "checkpoint-2" and not list(out.glob(".checkpoint*"))
    file.unlink()
    assert main(again) == 0 and newest(out).name == "checkpoint-4"


@pytest.mark.parametrize("what", ["optimizer", "activations"])
def test_while_tensors_go_out_of_memory(disk, what):
    """Writing to the optimizer's memory-mapped files would otherwise end in SIGBUS."""
    flags = small_flags(steps=1, offload=what, sample=0, hidden=256)
    status, said = command(*flags, folder=disk)
    assert status == 2, said
    assert re.fullmatch(
        rf"utils\.train: no room in {disk} for [\d,]+ bytes that move out of memory \(No space "
        r"left on device; set TMPDIR to use another folder\): choose smaller sizes\n",
        said,
    )
    assert not os.listdir(disk)


def test_while_ranks_files_are_joined(disk, tmp_path, capsys):
    flags = small_flags(steps=1, out=tmp_path / "run", hidden=64, sample=0, save_format="sharded")
    assert main([*map(str, flags)]) == 0
    capsys.readouterr()
    (disk / "file").write_bytes(bytes(DISK - 2**16))
    assert join_command([str(tmp_path / "run"), str(disk / "whole")]) == 2
    sentence = r"utils\.training\.join: .*model\.safetensors could not be written: .*No space .*\n"
    assert re.fullmatch(sentence, capsys.readouterr().err)
    assert os.listdir(disk) == ["file"]


def test_while_metrics_are_written(disk, tmp_path, capsys):
    metrics = disk / "metrics.jsonl"
    (disk / "file").write_bytes(bytes(DISK - 8192))
    sizes = {"sample": 0, "layers": 1, "hidden": 8, "batch": 1, "seq": 2}
    flags = small_flags(steps=10_000, metrics=metrics, out=tmp_path / "run", **sizes)
    assert main([*map(str, flags), "--held-out-every", "99999"]) == 2
    sentence = f"utils.train: --metrics {metrics} cannot be written: No space left on device\n"
    assert capsys.readouterr().err == sentence
    lines = metrics.read_bytes()
    assert len(lines) == 4096 * (len(lines) // 4096)  # the last one is cut: the disk was full
    (disk / "file").unlink()
    step = read_run(newest(tmp_path / "run"))["step"]  # --out had room
    assert main(["--resume", str(tmp_path / "run"), "--steps", str(step + 2)]) == 0
    assert [json.loads(line) for line in metrics.read_text().splitlines()][-1]["step"] == step + 2
