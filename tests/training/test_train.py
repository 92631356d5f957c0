"""Training: N ranks match one, a stopped run resumes exactly, metrics replace no other file."""

import json
import os
import platform
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from utils.cli import flag
from utils.data import corpus
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.ranks import Ranks
from utils.ranks.context import freed_memory_kept
from utils.training.config import parse, resumed
from utils.training.run_folder import checkpoints
from utils.training.train import TrainConfig, main, schedule, train

pytestmark = pytest.mark.usefixtures("one_thread")

# odd on purpose: 7 rows on 3 ranks are 3 + 2 + 2
ODD = TrainConfig(
    layers=2, hidden=24, heads=4, kv_heads=2, vocab=259, batch=7, seq=33, steps=6, held_out_every=4,
    precision="fp64", device="cpu", sample=0,
)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only for glibc")
def test_freed_memory_is_used_again():
    def new_pages():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            tensors = [torch.ones(2**20) for _ in range(4)]  # 4 MiB each, 1024 pages
            del tensors
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    with freed_memory_kept():
        new_pages()
        assert new_pages() < 1024


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, device="cpu") as group:
        yield group


def run(config, stop_at=None, stop_rank=0):
    """Train on this rank; return (rows without times, parameters by name)."""
    rank = dist.get_rank() if dist.is_initialized() else 0

    def on_step(row):
        if row["step"] == stop_at and rank == stop_rank:
            os.kill(os.getpid(), signal.SIGTERM)

    model, history = train(config, on_step=on_step)
    return [timeless(row) for row in history], dict(model.state_dict())


def timeless(row):
    return {key: value for key, value in row.items() if key not in ("seconds", "tokens_per_s")}


def assert_same_run(ours, theirs, tolerance):
    """Assert equal loss curves, gradient norms, held-out losses and final parameters."""
    assert [set(row) for row in ours[0]] == [set(row) for row in theirs[0]]
    for mine, other in zip(ours[0], theirs[0]):
        assert mine == pytest.approx(other, rel=tolerance, abs=0), f"step {mine['step']}"
    for name, parameter in ours[1].items():
        torch.testing.assert_close(parameter, theirs[1][name], rtol=tolerance, atol=tolerance)


# ---- N ranks match one


def test_ranks_learn_what_one_rank_learns(ranks):
    alone, together = run(ODD), ranks.run(run, ODD)
    assert_same_run(together[0], alone, tolerance=1e-11)
    for other in together[1:]:
        assert other[0] == together[0][0]  # all ranks agree bit for bit
        assert all(torch.equal(other[1][name], value) for name, value in together[0][1].items())
    assert [row["step"] for row in alone[0] if "val_loss" in row] == [4, 6]


# ---- a stopped run resumes


def test_a_stopped_run_goes_on_to_the_bit(tmp_path):
    whole = run(replace(ODD, precision="fp32"))
    first = run(replace(ODD, precision="fp32", out=str(tmp_path / "run")), stop_at=2)
    rest = run(resumed(tmp_path / "run"))
    assert [row["step"] for row in first[0]] == [1, 2, 3]  # it finishes the step it was in
    assert without_validation(first[0] + rest[0]) == without_validation(whole[0])
    assert all(torch.equal(value, whole[1][name]) for name, value in rest[1].items())


def without_validation(rows):
    """Nor with the keys that only a run that saves has."""
    left_out = ("val_", "save_")
    return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in rows]


def test_ranks_stop_together_and_go_on(ranks, tmp_path):
    config = replace(ODD, precision="fp32", out=str(tmp_path / "run"))
    whole = ranks.run(run, replace(config, out=None))[0]
    first = ranks.run(run, config, stop_at=2, stop_rank=ranks.size - 1)
    assert [len(rows) for rows, _ in first] == [3] * ranks.size  # only one rank was asked to stop
    again = replace(resumed(tmp_path / "run"), out=None)
    rest = ranks.run(run, again)[0]
    assert without_validation(first[0][0] + rest[0]) == without_validation(whole[0])
    assert all(torch.equal(value, whole[1][name]) for name, value in rest[1].items())
    losses = [row["loss"] for row in run(again)[0]]  # and on a single rank
    assert losses == pytest.approx([row["loss"] for row in rest[0]], rel=1e-4)


def test_resuming_what_differs_is_refused(tmp_path):
    folder = tmp_path / "run"
    run(replace(ODD, out=str(folder), steps=1))
    with pytest.raises(ValueError, match=r"at step 1 after .* give a larger --steps"):
        run(resumed(folder))
    with pytest.raises(ValueError, match="hidden_size 24, this run asks for 48"):
        run(resumed(folder, steps=2, hidden=48))
    with pytest.raises(ValueError, match="optimizer 'muon'; this run asks for 'adamw'"):
        run(resumed(folder, steps=2, optimizer="adamw"))
    with pytest.raises(ValueError, match="already holds a checkpoint: continue it with --resume"):
        run(replace(ODD, out=str(folder)))
    rows, _ = run(resumed(folder, steps=2, lr=0.001))
    assert len(rows) == 1 and resumed(folder, steps=9).lr == 0.001


# ---- the command line, in real processes


def command(*arguments, ranks=1):
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return [*start, "utils.train", *map(str, arguments)]


def small_flags(**changes):
    options = {"layers": 2, "hidden": 24, "heads": 4, "batch": 7, "seq": 33, **changes}
    return [part for name, value in options.items() for part in (flag(name), value)]


@pytest.mark.thorough
def test_torchrun_and_a_signal(tmp_path):
    """Two ranks, stopped by SIGTERM, continued by one process: one curve."""
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "run"
    flags = small_flags(steps=4000, precision="fp64", metrics=metrics, out=out)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(*flags, ranks=2), env=environment, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3, process)
        process.terminate()
        process.communicate(timeout=patience(90))
    finally:
        process.kill()
    stopped = json.loads((out / "training.json").read_text())["step"]
    assert stopped >= 3
    train(resumed(out, steps=stopped + 2))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, stopped + 3))
    alone = train(parse([*map(str, small_flags(steps=4000, precision="fp64"))]), on_step=stop_at(3))
    assert [r["loss"] for r in alone[1]] == pytest.approx([r["loss"] for r in rows[:4]], rel=1e-9)


@pytest.mark.thorough
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    flags = small_flags(steps=1_000_000, metrics=metrics)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(*flags, ranks=2), env=environment, stderr=subprocess.PIPE)
    ranks = []
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text(), process)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        assert not psutil.wait_procs(ranks, patience(30))[1]
    finally:
        for one in [process, *psutil.wait_procs(ranks, 0)[1]]:
            one.kill()
        process.communicate()


def stop_at(step):
    return lambda row: os.kill(os.getpid(), signal.SIGINT) if row["step"] == step else None


def wait_for(condition, process, seconds=150):
    deadline = time.monotonic() + patience(seconds)
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.05)


def test_command(tmp_path, capsys):
    flags = [*map(str, small_flags(steps=3, sample=40, out=tmp_path / "run"))]
    assert main([*flags, "--metrics", "-"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["loss"] == pytest.approx(5.55, abs=0.1)  # ln 256 = 5.545: untrained
    assert rows[2]["tokens"] == 3 * 7 * 33
    assert rows[2]["val_bits"] == pytest.approx(rows[2]["val_loss"] / 0.6931, rel=1e-3)
    text = "\n".join(lines)
    assert "held-out loss" in text and "bits per byte after 3 steps" in text
    assert "a sample of its text:\nThe " in text
    assert main(["--resume", str(tmp_path / "run"), "--steps", "4", "--sample", "0"]) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("more", [[], ["--save-every", "1", "--save-async"]])
def test_a_second_interrupt_stops_at_once(tmp_path, capsys, monkeypatch, more):
    """Earlier checkpoints stay, and no partial one is left."""

    def twice(row):
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("utils.training.train.train", partial(train, on_step=twice))
    out = tmp_path / "run"
    assert main([*map(str, small_flags(steps=9, out=out)), *more]) == 130
    assert capsys.readouterr().err == "\nutils.train: stopped at once, unsaved\n"
    found = [path.name for path in checkpoints(out)]
    assert found == (["checkpoint-2", "checkpoint-1"] if more else [])
    assert not list(out.glob(".checkpoint*")) and out.exists() == bool(more)


# ---- tokenizers


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    Tokenizer.train([corpus.embedded()[:40_000].decode()], 300).save(folder)
    return str(folder)


def test_bits_are_per_byte_whatever_the_tokens_are(words, ranks, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(corpus.embedded()[:40_000])  # short: every rank encodes all of it
    config = replace(ODD, text=str(text), tokenizer=words, steps=1, held_out_every=1, seq=20)
    alone, together = run(config), ranks.run(run, config)[0]
    assert_same_run(together, alone, tolerance=1e-11)
    row, tokenizer = alone[0][0], Tokenizer.load(words)
    tokens = corpus.load_split(text, tokenizer)[1]
    rows = torch.cat([y for _, y in corpus.held_out_batches(tokens, 20)])
    lengths = tokenizer.byte_lengths()[rows].sum().item()
    expected = row["val_loss"] * rows.numel() / lengths / 0.6931471805599453
    assert row["val_bits"] == pytest.approx(expected, rel=1e-9)
    assert alone[1]["lm_head.weight"].shape[0] == 300  # the vocabulary follows the tokenizer


def test_a_checkpoint_carries_its_tokenizer(words, tmp_path, capsys):
    moved, out = tmp_path / "moved", tmp_path / "run"
    shutil.copytree(words, moved)
    flags = small_flags(steps=1, tokenizer=moved, out=out, sample=5)
    assert main([*map(str, flags)]) == 0
    assert "a sample of its text:\nThe" in capsys.readouterr().out
    shutil.rmtree(moved)
    assert GPT.from_pretrained(out).config.eos_token_id == Tokenizer.load(out).end
    assert len(run(resumed(out, steps=2, sample=0))[0]) == 1
    assert Tokenizer.load(out).size == 300  # the folder was rewritten
    with pytest.raises(ValueError, match="is not the tokenizer of the run"):
        resumed(out, tokenizer=str(tmp_path))
    run(replace(ODD, steps=1, out=str(tmp_path / "bytes")))
    with pytest.raises(ValueError, match="is on bytes: leave out --tokenizer"):
        resumed(tmp_path / "bytes", tokenizer=words)


# ---- the training loop


def test_schedule_is_a_trapezoid():
    rates = [schedule(step / 100, warmup=0.1, cooldown=0.5) for step in range(101)]
    assert 0 < rates[0] < 0.02 and rates[50] == 1.0 and rates[100] == 0.0
    assert rates[:11] == sorted(rates[:11]) and rates[50:] == sorted(rates[50:], reverse=True)
    assert schedule(0.75, 0.1, 0.5) == pytest.approx(0.5)
    assert schedule(0.0, 0.0, 0.0) == schedule(1.0, 0.0, 0.0) == 1.0


def test_a_time_budget_cools_down():
    config = replace(ODD, steps=None, seconds=1.5, lr=0.5, optimizer="adamw", precision="fp32")
    _, history = train(config)
    assert 1.5 <= history[-1]["seconds"] < 20.0
    assert history[-1]["lr"] < 0.5 * max(row["lr"] for row in history)


def test_it_learns_and_leaves_no_trace():
    state = torch.get_rng_state()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    config = replace(ODD, precision="fp32", steps=60, held_out_every=60, hidden=32, batch=16)
    _, history = train(config)
    assert history[-1]["val_loss"] < 2.9  # 5.5 at first; 3.1 for the best guess without context
    assert torch.equal(torch.get_rng_state(), state) and not dist.is_initialized()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert train(config)[1][-1]["loss"] == history[-1]["loss"]


def test_bf16_is_near_fp32():
    losses = [
        train(replace(ODD, precision=precision, steps=4))[1][-1]["loss"]
        for precision in ("bf16", "fp32")
    ]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("wild", ["--lr 1e30 --clip 0", "--lr 1e38 --save-every 1"])
def test_a_diverged_run_says_so_and_keeps_its_checkpoint(tmp_path, capsys, wild):
    out = tmp_path / "run"
    train(replace(ODD, precision="fp32", steps=2, save_every=1, out=str(out)))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["--resume", str(out), "--steps", "50", *wild.split()]) == 2
    way = f"lower --lr; if checkpoint-2 is already ruined, go back: --resume {out}/checkpoint-1\n"
    assert re.search(f"utils.train: the (held-out )?loss is .*: {way}", capsys.readouterr().err)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_ruined_weights_are_not_saved(tmp_path, capsys):
    out = tmp_path / "run"
    flags = small_flags(steps=1, adamw_lr=1e308, out=out)
    assert main([str(flag) for flag in flags]) == 2
    assert "utils.train: the held-out loss is nan after step 1" in capsys.readouterr().err
    assert not out.exists()


def test_metrics_of_steps_that_are_run_again_are_cut(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    config = replace(ODD, metrics=str(metrics), out=str(tmp_path / "run"), steps=3)
    train(config)
    row = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("a") as file:  # as if killed some steps after its last checkpoint
        for step in (4, 5):
            file.write(json.dumps({**row, "step": step, "loss": 9.9}) + "\n")
        file.write('{"step": 6, "lo')
    train(resumed(tmp_path / "run", steps=5))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and rows[3]["loss"] != 9.9
    train(replace(config, steps=2, out=str(tmp_path / "other"), metrics=None))
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds another run's lines"):
        train(resumed(tmp_path / "other", steps=3, metrics=str(metrics)))
    assert len(metrics.read_text().splitlines()) == 5
    again = replace(config, out=str(tmp_path / "new"), auto_resume=True)
    train(again)  # the same run, killed before its first save, starts its file over
    assert len(metrics.read_text().splitlines()) == 3


def test_a_run_whose_metrics_have_no_reader_saves(tmp_path, monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    flags = small_flags(steps=9, out=tmp_path / "run", metrics="-", sample=0)
    with os.fdopen(write, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main([*map(str, flags)]) == 2
    sentence = "utils.train: --metrics - cannot be written: Broken pipe\n"
    assert capsys.readouterr().err == sentence
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-2"]


@pytest.mark.parametrize("left", ["", '{"step": 3, "lo'])
def test_metrics_have_the_step_of_a_checkpoint_whose_run_died_before_it_wrote_them(tmp_path, left):
    metrics = tmp_path / "metrics.jsonl"
    train(replace(ODD, metrics=str(metrics), out=str(tmp_path / "run"), steps=3))
    *before, last = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(before) + left)
    for steps in (5, 6):  # added once, not twice
        train(resumed(tmp_path / "run", steps=steps))
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        assert rows[2].items() <= json.loads(last).items()
        assert {"loss", "tokens", "seconds", "lr", "grad_norm"} <= set(rows[2])
    (tmp_path / "another.jsonl").touch()  # which lacks the earlier steps too
    config = resumed(tmp_path / "run", steps=7, metrics=str(tmp_path / "another.jsonl"))
    train(config)
    assert json.loads((tmp_path / "another.jsonl").read_text())["step"] == 7


@pytest.mark.parametrize(
    "kind", ["fifo", "device", "folder", "notes", "one line", "a line of another kind", "another's"]
    + ["another run's"],
)
def test_metrics_replace_nothing_that_they_did_not_write(tmp_path, kind):
    target = tmp_path / "target"
    texts = {
        "notes": "mine\n", "one line": "mine", "a line of another kind": '{"step": 1}\nmine\n',
        "another's": '{"step": 1, "loss": 2.0, "epoch": 1}\n',
        "another run's": '{"step": 1, "loss": 2.0, "tokens": 3, "seconds": 4}\n',
    }
    if kind in texts:
        target.write_text(texts[kind])
    elif kind == "fifo":
        os.mkfifo(target)
    elif kind == "device":
        try:  # device numbers without a driver
            os.mknod(target, stat.S_IFCHR | 0o600, os.makedev(0, 0))
        except PermissionError:
            pytest.skip("only root can create devices")
    else:
        target.mkdir()
    before = written(target)
    refused = "(does not hold metric|holds another run's) lines"
    sentence = refused if kind in texts else "regular file"
    with pytest.raises(ValueError, match=f"--metrics .*target .*{sentence}"):
        train(replace(ODD, metrics=str(target), steps=1))
    assert written(target) == before and os.listdir(tmp_path) == ["target"]
    assert kind not in texts or target.read_text() == texts[kind]


def written(path):
    """The status fields that change when a file is written or replaced, but not when it is read."""
    found = path.stat()
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def test_metrics_go_through_a_link_to_their_file(tmp_path):
    (tmp_path / "link").symlink_to("file")
    config = replace(ODD, metrics=str(tmp_path / "link"), out=str(tmp_path / "run"), steps=1)
    train(config)  # first a new file, then an existing one
    train(resumed(tmp_path / "run", steps=2))
    assert len((tmp_path / "file").read_text().splitlines()) == 2
    assert (tmp_path / "link").is_symlink()


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_learns_the_same_with_experts(monkeypatch):
    """Inductor compiles the training; the held-out loss skips its C++, which takes long."""

    def backend(graph, inputs):
        name = "inductor" if torch.is_grad_enabled() else "aot_eager"
        return torch._dynamo.lookup_backend(name)(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    config = TrainConfig(
        text=corpus.__file__, layers=1, hidden=16, heads=2, experts=3, batch=4, seq=16, steps=2,
        optimizer="adamw", device="cpu", sample=0,
    )
    plain, compiled = (train(c)[1] for c in (config, replace(config, compile=True)))
    for name in ("loss", "val_loss"):
        ours, theirs = ([row[name] for row in rows if name in row] for rows in (compiled, plain))
        assert ours == pytest.approx(theirs, 1e-5)
