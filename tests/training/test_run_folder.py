"""Generations of checkpoints: the one found is intact, whatever was killed or damaged."""

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

from tests.patience import patience
from tests.training.train_combinations import PLAIN
from utils.models import hf_format
from utils.models.gpt import GPT
from utils.models.hf_format import CheckpointError
from utils.training.config import parse, resumed
from utils.training.join import join
from utils.training.join import main as join_command
from utils.training.run_folder import RunFolder, checkpoints, newest
from utils.training.train import main, train

RUN = replace(PLAIN, steps=5, batch=11)
FLAGS = "--layers 2 --hidden 24 --heads 4 --batch 7 --seq 33 --held-out-every 99 --sample 0"


def save(folder, step, content="x", began=None):
    run = RunFolder(str(folder), keep=2, rank=0)
    steps = [int(path.name.split("-")[1]) for path in run.found]
    with run.opened(began or max([each for each in steps if each < step], default=-1)):
        run.save(step, lambda beside: (beside / "config.json").write_text(f"{content} {step}"))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- generations


def test_the_newest_stay_and_the_folder_links_to_the_last(tmp_path):
    run = tmp_path / "run"
    for step in (2, 4, 6, 10):
        save(run, step)
    assert names(run) == [".lock", "SHA256SUMS", "checkpoint-10", "checkpoint-6", "config.json"] + [
        "newest"
    ]
    assert (run / "config.json").read_text() == "x 10"
    summed = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=newest(run), capture_output=True, text=True
    )
    assert summed.stdout == "config.json: OK\n"


def test_a_run_that_goes_back_leaves_the_way_it_had_gone(tmp_path):
    for step in (2, 4, 3):
        save(tmp_path / "run", step)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-3", "checkpoint-2"]
    save(tmp_path / "run", 5), save(tmp_path / "run", 8, began=3)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-8", "checkpoint-3"]


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def fifo(file):
    """Replace it with a FIFO, whose reader would block forever."""
    file.unlink()
    os.mkfifo(file)


def link(file):
    (file.parent / "SHA256SUMS").unlink()
    (file.parent / "SHA256SUMS").symlink_to(file)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (cut, "config.json is damaged: its bytes do not match SHA256SUMS"),
        (flip, "config.json is damaged: its bytes do not match SHA256SUMS"),
        (Path.unlink, "config.json is missing"),
        (lambda file: (file.parent / "SHA256SUMS").unlink(), "checkpoint-4 has no SHA256SUMS"),
        (lambda file: (file.parent / "SHA256SUMS").write_text("?"), "SHA256SUMS cannot be read"),
        (lambda file: (file.parent / "SHA256SUMS").write_text(""), "lacks config.json"),
        (lambda file: fifo(file), "config.json is not a regular file"),
        (lambda file: (fifo(file), link(file)), "SHA256SUMS is not a regular file"),
        (
            lambda file: (file.parent / "SHA256SUMS").write_text(f"0  {__file__}"),
            "test_run_folder.py', which no save wrote",
        ),
    ],
)
def test_damage_is_named_and_the_one_before_is_taken(tmp_path, capsys, damage, sentence):
    run = tmp_path / "run"
    save(run, 2), save(run, 4)
    damage(run / "checkpoint-4" / "config.json")
    assert newest(run).name == "checkpoint-2"
    said = capsys.readouterr().err
    assert sentence in said and "using checkpoint-2" in said and said.count("\n") == 1
    damage(run / "checkpoint-2" / "config.json")
    with pytest.raises(CheckpointError, match=r"no checkpoint is left to use: .*-4.*; .*-2"):
        newest(run)


def test_a_run_goes_back_to_the_undamaged_one(tmp_path, capsys):
    config = replace(RUN, steps=4, save_every=2, out=str(tmp_path / "run"))
    whole = train(config)[1]
    flip(tmp_path / "run" / "checkpoint-4" / "optimizer.safetensors")
    rest = train(resumed(tmp_path / "run"))[1]
    assert "checkpoint-4/optimizer.safetensors is damaged" in capsys.readouterr().err
    assert [row["loss"] for row in rest] == [row["loss"] for row in whole[2:]]
    assert newest(tmp_path / "run").name == "checkpoint-4"  # saved again


# ---- two processes at once


def test_a_second_run_into_the_same_folder_is_refused(tmp_path):
    out = str(tmp_path / "run")
    refused = pytest.raises(ValueError, match=r"another run is writing to .*run: choose another")
    with RunFolder(out, keep=2, rank=0).opened(), refused:
        train(replace(RUN, out=out))
    assert not Path(out).exists()  # nothing was saved, so nothing is left
    train(replace(RUN, steps=1, out=out))


@pytest.mark.thorough
def test_readers_never_disturb_who_writes(tmp_path):
    """`recover` restores the old folder if it looks between the writer's two renames."""
    folder, over = tmp_path / "model", threading.Event()

    def read():
        while not over.is_set():
            hf_format.recover(folder)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(300):
            with hf_format.replacing(folder) as beside:
                (beside / "config.json").write_text(str(number))
            assert (folder / "config.json").read_text() == str(number)
    finally:
        over.set()
        reader.join()


@pytest.mark.parametrize("word", ["partial", "old"])
def test_what_a_stranger_has_beside_it_stays(tmp_path, word):
    notes = tmp_path / f".model.{word}" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    (tmp_path / "model").mkdir()
    refused = pytest.raises(CheckpointError, match=r"holds notes\.txt, which is not part of")
    with refused, hf_format.replacing(tmp_path / "model"):
        pass
    assert notes.read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoint-5", ".checkpoint-5.gone", ".checkpoint-5.partial"])
@pytest.mark.parametrize("entry", ["mine.txt", "model.safetensors", ".tmpa1B2c3"])
def test_what_a_stranger_has_under_our_names_stays(tmp_path, name, entry):
    """Any program may write model.safetensors; only in a save's leftovers is it ours."""
    run = tmp_path / "run"
    train(replace(RUN, steps=1, out=str(run)))
    (run / name).mkdir()
    (run / name / entry).write_text("mine")
    if entry == "mine.txt" or name == "checkpoint-5":
        sentence = rf"{name} (holds mine\.txt, which|has no SHA256SUMS and no training\.json, so)"
        with pytest.raises(CheckpointError, match=sentence):
            train(resumed(run, steps=2))
        for step in (2, 3, 4, 6):  # had it appeared during the run
            save(run, step)
    else:
        train(resumed(run, steps=2))
    assert (run / name / entry).exists() == (entry == "mine.txt" or name == "checkpoint-5")


# ---- kills, and a full disk


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["whole", "sharded"])
@pytest.mark.timeout(900)
def test_kills_lose_nothing(tmp_path, form):
    command = [sys.executable, "-m", "tests.training.killed_saves", tmp_path / "run", form, "50"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patience(600))
    assert ended.returncode == 0, ended.stderr
    counts = json.loads(ended.stdout)
    assert counts["saves"] > 5 and counts["in_a_save"] > 5, counts  # kills have hit both


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_one_sentence_and_leaves_what_there_was(tmp_path, background):
    """A limit on file sizes simulates the disk: writing fails at the same calls."""
    config = replace(RUN, steps=1, out=str(tmp_path / "run"))
    train(config)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    again = resumed(tmp_path / "run", steps=3, save_every=1, save_async=background)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint .*-[23] could not be written: .*"):
            train(again)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert newest(tmp_path / "run").name == "checkpoint-1"
    assert not list((tmp_path / "run").glob(".checkpoint*"))
    assert len(train(resumed(tmp_path / "run", steps=2))[1]) == 1


def test_a_folder_that_is_taken_away_is_not_made_again(tmp_path):
    run = RunFolder(str(tmp_path / "run"), keep=2, rank=0)
    refused = pytest.raises(CheckpointError, match=r"-1 could not be written: .*No such file")
    with refused, run.opened():
        (tmp_path / "run").rename(tmp_path / "moved")
        run.save(1, lambda beside: None)
    assert os.listdir(tmp_path) == ["moved"]


def test_an_interrupt_as_a_save_begins(tmp_path, monkeypatch):
    def start(thread):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    run = RunFolder(str(tmp_path / "run"), keep=2, rank=0, background=True)
    with pytest.raises(KeyboardInterrupt), run.opened():
        run.save(1, lambda beside: None)


# ---- one file per rank, and saves in the background

LAYOUTS = [
    (3, {"shard": "3", "tie": True}),
    (2, {"tp": 2, "shard": "2", "precision": "fp32"}),
    (3, {"pp": 3, "layers": 3, "tie": True, "micro_batches": 2}),
]


def curve(config):
    """Return ([(loss, gradient norm)], the steps that saved)."""
    _, history = train(config)
    steps = [row["step"] for row in history if "save_s" in row]
    return [(row["loss"], row["grad_norm"]) for row in history], steps


@pytest.mark.parametrize("ranks, way", LAYOUTS, ids=str)
def test_pieces_are_the_whole(pools, ranks, way, tmp_path):
    config = {"steps": 4, "save_every": 2, "precision": "fp64", "out": str(tmp_path / "whole")}
    config, pool = replace(RUN, **{**config, **way}), pools[ranks]
    expected, _ = pool.run(curve, config)[0]
    sharded = replace(config, out=str(tmp_path / "pieces"), save_format="sharded")
    assert pool.run(curve, sharded)[0] == (expected, [2, 4])
    whole, pieces = tmp_path / "whole" / "checkpoint-2", tmp_path / "pieces" / "checkpoint-2"
    assert len(list(pieces.glob("model-rank-*"))) == ranks
    stored = {stem: load_file(whole / f"{stem}.safetensors") for stem in ("model", "optimizer")}
    held = sum(file.stat().st_size for file in pieces.glob("*-rank-*"))
    most = sum(t.nbytes for tensors in stored.values() for t in tensors.values())
    assert held < most + 40_000  # replicated tensors are stored once

    join(pieces, tmp_path / "joined")
    with pytest.raises(
        CheckpointError, match=r"holds one file per rank: python -m utils\.training"
    ):
        GPT.from_pretrained(pieces)
    (tmp_path / "torch").mkdir()  # torch's own tool, on the same files
    consolidate_safetensors_files(
        str(pieces), str(tmp_path / "torch"), dict.fromkeys(stored["model"], 1)
    )
    mine = load_file(tmp_path / "joined" / "model.safetensors")
    by_torch = load_file(tmp_path / "torch" / "model-00001-of-00001.safetensors")
    assert mine.keys() == by_torch.keys() == stored["model"].keys()
    assert all(torch.equal(mine[name], stored["model"][name]) for name in mine)
    assert all(torch.equal(mine[name], by_torch[name]) for name in mine)
    # the run resumes as it was, and on one rank
    same = resumed(pieces, out=None, save_every=None)
    assert pool.run(curve, same)[0][0] == expected[2:]
    alone = {"pp": 1, "tp": 1, "shard": "none", "micro_batches": None}
    rest, _ = curve(replace(same, **alone))
    near = 1e-6 if config.precision == "fp64" else 2e-4
    assert [loss for loss, _ in rest] == pytest.approx([loss for loss, _ in expected[2:]], rel=near)


def test_joining_says_what_is_missing(tmp_path, capsys):
    train(replace(RUN, steps=1, out=str(tmp_path / "run"), save_format="sharded"))
    assert join_command([str(tmp_path / "run"), str(tmp_path / "run" / "checkpoint-1")]) == 2
    assert "holds a training run's checkpoint" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoint-1" / "model-rank-00000.safetensors").unlink()
    assert join_command([str(tmp_path / "run"), str(tmp_path / "joined")]) == 2
    assert "model-rank-00000.safetensors is missing" in capsys.readouterr().err
    assert join_command(["run"]) == 2


def test_saving_in_the_background_changes_nothing(tmp_path):
    config = replace(RUN, save_every=1, keep=9, out=str(tmp_path / "now"))
    now = train(config)[1]
    later = train(replace(config, out=str(tmp_path / "later"), save_async=True))[1]
    assert [row["loss"] for row in now] == [row["loss"] for row in later]
    for step in range(1, 6):
        for file in ("model.safetensors", "optimizer.safetensors"):
            mine, other = (tmp_path / n / f"checkpoint-{step}" / file for n in ("now", "later"))
            assert mine.read_bytes() == other.read_bytes()


# ---- the same command after every fault


def test_the_same_command_begins_goes_on_and_ends(tmp_path, capsys):
    command = [*FLAGS.split(), "--steps", "2", "--out", str(tmp_path / "run"), "--auto-resume"]
    assert main(command) == 0
    assert "after 2 steps" in capsys.readouterr().out
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert parse([*command, "--steps", "3"]).resume == str(tmp_path / "run" / "checkpoint-2")
    assert main([*command, "--steps", "3"]) == 0
    assert newest(tmp_path / "run").name == "checkpoint-3"


def test_a_run_that_was_killed_in_its_last_save_is_finished(tmp_path, capsys):
    """After the rename, links, older checkpoint and last line of metrics are still to do."""
    run, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"
    command = [*FLAGS.split(), "--out", str(run), "--metrics", str(metrics), "--auto-resume"]
    command += ["--keep", "1", "--steps"]
    run.mkdir()
    metrics.write_text('{"step": 1, "lo')  # killed before its first save
    assert main([*command, "2"]) == 0
    shutil.copytree(run, tmp_path / "before", symlinks=True)
    assert main([*command, "3"]) == 0
    *lines, last = metrics.read_text().splitlines(keepends=True)
    whole = names(run)
    (run / "checkpoint-3").rename(tmp_path / "before" / "checkpoint-3")
    shutil.rmtree(run)
    (tmp_path / "before").rename(run)
    metrics.write_text("".join(lines))
    for _ in range(2):
        assert main([*command, "3"]) == 0
        assert "nothing to do" in capsys.readouterr().out
        assert names(run) == whole and (run / "newest").resolve().name == "checkpoint-3"
        (*before, again), expected = metrics.read_text().splitlines(keepends=True), json.loads(last)
        assert before == lines and "val_loss" in expected and expected.pop("save_s")
        assert json.loads(again) == expected
