"""A run's folder under kills at any call, concurrent readers and limited file systems."""

import errno
import fcntl
import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.models.small_models import random_model, small
from tests.training.train_combinations import PLAIN
from utils.models.gpt import GPT
from utils.models.hf_format import CheckpointError
from utils.training.config import resumed
from utils.training.run_folder import RunFolder, checkpoints, newest
from utils.training.train import train

pytestmark = pytest.mark.thorough

RUN = replace(PLAIN, steps=2)
CALLS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink"}


def save(folder, step, files=("config.json", "training.json")):
    def write(beside):
        for name in files:
            (beside / name).write_text(f"{step}")

    run = RunFolder(str(folder), keep=2, rank=0)
    steps = [int(path.name.split("-")[1]) for path in run.found]
    with run.opened(max([each for each in steps if each < step], default=-1)):
        run.save(step, write)


def killed_before(call, act):
    """Kill act() at its call-th access to the file system; return whether it got that far."""
    pid = os.fork()
    if pid == 0:
        left = call

        def hook(event, arguments):
            nonlocal left
            if event in CALLS:
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            act()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize(
    "before, step, least, files",
    [
        ((), 2, None, ("config.json",)),
        ((2, 4), 6, 4, ("config.json", "training.json")),
        ((2, 4), 6, 4, ("config.json", "model-rank-00000.safetensors")),  # sharded
        ((2, 4, 6), 4, 4, ("config.json", "training.json")),  # went back, reaches 4 again
    ],
)
def test_a_kill_before_any_call_of_a_save_loses_nothing(tmp_path, before, step, least, files):
    start = tmp_path / "start"
    start.mkdir()
    for each in before[:-1] if step in before else before:
        save(start, each)
    if step in before:  # all three, although only two are kept
        shutil.copytree(start / "checkpoint-4", start / "checkpoint-6")
    run, call, steps = tmp_path / "run", 1, set()
    while True:
        shutil.copytree(start, run, symlinks=True)
        killed = killed_before(call, lambda: save(run, step, files))
        found = checkpoints(run)
        assert not least or newest(run) == found[0]  # undamaged
        steps.update(int(path.name.split("-")[1]) for path in found[:1])
        if least and (step not in before or sys.platform == "linux"):
            assert step not in before or run / "checkpoint-4" in found
            assert int((run / "config.json").read_text()) >= least  # through the links
        save(run, 8)  # the next run removes all traces of this one
        names = sorted(path.name for path in run.iterdir())
        kept = [f"checkpoint-{each}" for each in sorted(_steps(run))]
        links = ["config.json", "newest", "training.json"]
        assert names == [".lock", "SHA256SUMS", *kept, *links] and kept[-1] == "checkpoint-8"
        shutil.rmtree(run)
        if not killed:
            break
        call += 1
    assert call > 15 and steps == {step, *before[-1:]}


def test_a_run_that_goes_back_and_dies_has_either_trys_last_checkpoint(tmp_path):
    start, run, call, steps = tmp_path / "start", tmp_path / "run", 1, set()
    for each in (8, 9):
        save(start, each)
    killed = True
    while killed:
        shutil.copytree(start, run, symlinks=True)
        killed = killed_before(call, lambda: save(run, 5))
        steps.add(newest(run).name)
        shutil.rmtree(run)
        call += 1
    assert call > 15 and steps == {"checkpoint-9", "checkpoint-5"}


def _steps(run):
    return [int(path.name.split("-")[1]) for path in checkpoints(run)]


def test_a_reader_beside_a_run_that_saves_sees_one_step(tmp_path):
    """The files of a model must all come from one checkpoint."""
    run, over, seen, wrong = tmp_path / "run", threading.Event(), set(), []
    model = random_model(small())

    def values(step):
        return {name: torch.full_like(p, step) for name, p in model.named_parameters()}

    def write(step):
        return lambda beside: model.write_pretrained(beside, 4000, values(step))

    def read():
        while not over.is_set():
            try:
                parameters = list(GPT.from_pretrained(run).parameters())
                steps = {value for p in parameters for value in p.unique().tolist()}
            except Exception as error:
                wrong.append(error)
                return
            seen.update(steps)
            if len(steps) > 1:
                wrong.append(steps)

    with RunFolder(str(run), keep=1, rank=0).opened() as folder:
        folder.save(1, write(1))
        assert len(list((run / "checkpoint-1").glob("model-*.safetensors"))) > 5
        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for step in range(2, 200):
            folder.save(step, write(step))
            if wrong or len(seen) > 8:
                break
        over.set()
        for reader in readers:
            reader.join()
    assert not wrong and len(seen) > 5


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links_or_locks(tmp_path, monkeypatch, code):
    def refuse(*arguments, **keywords):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(fcntl, "flock", refuse)
    train(replace(RUN, out=str(tmp_path / "run")))
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "checkpoint-2"]
    assert [row["step"] for row in train(resumed(tmp_path / "run", steps=3))[1]] == [3]
    assert newest(tmp_path / "run").name == "checkpoint-3"


def test_a_run_that_waited_for_another_does_not_replace_it(tmp_path):
    """Neither found a checkpoint; the second starts to write after the first has ended."""
    second = RunFolder(str(tmp_path / "run"), keep=2, rank=0)
    save(tmp_path / "run", 7)
    refused = pytest.raises(ValueError, match=r"another run has written to .*run meanwhile")
    with refused, second.opened():
        pass
    assert newest(tmp_path / "run").name == "checkpoint-7"


def test_what_a_stranger_has_in_the_folder_stays(tmp_path):
    save(tmp_path / "run", 2)
    notes = tmp_path / "run" / ".notes.link" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    (tmp_path / "run" / ".other.link").symlink_to("elsewhere")
    save(tmp_path / "run", 4)
    assert notes.read_text() == "mine" and (tmp_path / "run" / ".other.link").is_symlink()


# ---- a rank that cannot write


def one_cannot_write(out, background, form):
    """Let one rank's disk refuse to write; return (this rank's error, the checkpoints)."""
    config = replace(
        RUN, batch=8, steps=4, save_every=2, out=out, save_format=form, save_async=background
    )
    train(replace(config, steps=2))
    mkdir = Path.mkdir

    def full(self, *arguments, **keywords):
        if self.name == f"rank-{culprit}":
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return mkdir(self, *arguments, **keywords)

    culprit = 1 if form == "sharded" else 0
    if dist.get_rank() == culprit:
        Path.mkdir = full
    try:
        train(resumed(out, steps=8))
    except CheckpointError as error:
        return str(error), [path.name for path in checkpoints(out)]
    finally:
        Path.mkdir = mkdir


@pytest.mark.parametrize("form", ["whole", "sharded"])
@pytest.mark.parametrize("background", [False, True])
def test_a_rank_that_cannot_write_is_told_to_all(pools, tmp_path, background, form):
    out = str(tmp_path / "run")
    told = pools[2].run(one_cannot_write, out, background, form)
    assert told[0] == told[1] and told[0][1] == ["checkpoint-2"]
    assert "checkpoint-4 could not be written: [Errno 28] No space left" in told[0][0]
    assert not list((tmp_path / "run").glob(".checkpoint*"))
    more = pools[2].run(lambda: len(train(resumed(out, steps=4))[1]))
    assert more == [2, 2]
