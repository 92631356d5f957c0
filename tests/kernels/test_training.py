"""The trainer's `--optimizer adamw-triton`: AdamW's curve and checkpoints."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the Triton language is not installed: make setup TRITON=yes")

from tests.patience import patience
from utils.paths import ROOT
from utils.training.config import TrainConfig, resumed
from utils.training.train import main, train

RUN = TrainConfig(
    layers=1, hidden=24, heads=2, kv_heads=1, batch=3, seq=16, steps=4, sample=0, weight_decay=0.1,
    optimizer="adamw", device="cpu",
)


def curve(device, config):
    """(loss and norm of each step, parameters) of a run."""
    model, history = train(replace(config, device=device))
    rows = [(row["loss"], row["grad_norm"]) for row in history]
    return rows, {name: value.cpu() for name, value in model.state_dict().items()}


def resumed_curve(device, folder, **changes):
    return curve(device, resumed(str(folder), **changes))


def resumed_with(device, folder, optimizer):
    return resumed_curve(device, folder, steps=4, optimizer=optimizer)


def assert_same(ours, theirs):
    (rows, weights), (other_rows, others) = ours, theirs
    assert len(rows) == len(other_rows)
    for row, other in zip(rows, other_rows):
        assert row == pytest.approx(other, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-5)


def test_a_run_is_the_run_of_adamw(on):
    assert_same(on(curve, replace(RUN, optimizer="adamw-triton")), on(curve, RUN))


def test_a_run_goes_on_in_either_optimizer(on, tmp_path):
    half = replace(RUN, steps=2, warmup=0.0, cooldown=0.0)
    whole = on(curve, replace(half, steps=4))
    for optimizer, then in (("adamw-triton", "adamw"), ("adamw", "adamw-triton")):
        folder = tmp_path / then
        first, _ = on(curve, replace(half, optimizer=optimizer, out=str(folder)))
        rows, weights = on(resumed_with, folder, then)
        assert_same((first + rows, weights), whole)


def test_ranks_step_the_shards_that_they_have(tmp_path):
    """Two ranks, each with its shard of the parameters and the state; some shards are empty."""
    metrics = tmp_path / "metrics.jsonl"
    ways = {"shard": "3", "optimizer": "adamw-triton", "metrics": metrics, "device": "cpu"}
    sizes = {"layers": 1, "hidden": 24, "heads": 2, "kv_heads": 1, "batch": 3, "seq": 16}
    more = {"steps": 4, "sample": 0, "weight_decay": 0.1}
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in {**ways, **sizes, **more}.items()
    ]
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "utils.train"]
    subprocess.run(
        [sys.executable, "-m", *launch, *flags], cwd=ROOT, check=True, timeout=patience(200),
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    theirs, _ = curve("cpu", RUN)
    assert [(row["loss"], row["grad_norm"]) for row in rows] == [
        pytest.approx(row, rel=1e-5) for row in theirs
    ]


def test_what_does_not_go_together_is_one_sentence(capsys):
    for options, words in (
        ({"engine": "deepspeed"}, "take --optimizer adamw"),
        ({"precision": "fp64"}, "computes in fp32: take --optimizer adamw"),
        ({"offload": "optimizer"}, "updates the weights outside the GPU"),
    ):
        with pytest.raises(ValueError, match=words):
            replace(RUN, optimizer="adamw-triton", **options)
    flags = ["--optimizer", "adamw-triton", "--device", "cpu", "--steps", "1", "--layers", "1"]
    assert main(flags) != 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "need a GPU" in said and "use --optimizer adamw, or" in said
