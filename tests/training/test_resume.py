"""A run that saves memory resumes bit for bit in the same way, and closely in any other."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.tiers import first
from tests.training.train_combinations import PLAIN
from utils.memory.precision import LossScaler
from utils.training.config import resumed
from utils.training.train import train

STEPS, STOPPED = 5, 2
RUN = replace(PLAIN, steps=STEPS, batch=11)

# (ranks, options): every kind of state that a checkpoint has to gather and restore
WAYS = [
    (2, {"accumulate": 2, "recompute": "full", "offload": "optimizer"}),
    (3, {"shard": "1", "accumulate": 3}),
    (2, {"shard": "1", "offload": "optimizer", "tie": True}),
    (2, {"shard": "2", "recompute": "selective", "precision": "bf16"}),
    (3, {"shard": "2", "optimizer": "adamw", "offload": "optimizer"}),
    (2, {"shard": "3", "optimizer": "adamw", "offload": "activations", "precision": "fp16"}),
    (3, {"shard": "3", "tie": True}),
    (2, {"shard": "3", "optimizer": "adamw", "offload": "parameters"}),
    (2, {"engine": "deepspeed", "optimizer": "adamw", "accumulate": 2}),
    (2, {"engine": "deepspeed", "optimizer": "adamw", "shard": "1"}),
    (3, {"engine": "deepspeed", "optimizer": "adamw", "shard": "2", "precision": "bf16"}),
    (3, {"engine": "deepspeed", "optimizer": "adamw", "shard": "3", "tie": True}),
]
MEMORY = ("accumulate", "recompute", "offload", "shard", "engine")


def run(config, stop_at=None):
    """Return ((loss, gradient norm) per step, parameters on rank 0)."""
    first = not dist.is_initialized() or dist.get_rank() == 0

    def on_step(row):
        if row["step"] == stop_at and first:
            os.kill(os.getpid(), signal.SIGTERM)

    model, history = train(config, on_step=on_step)
    rows = [(row["loss"], row["grad_norm"]) for row in history]
    return rows, dict(model.state_dict()) if first else None


@pytest.mark.parametrize("ranks, options", first(2, WAYS), ids=str)
def test_a_stopped_run_goes_on(pools, ranks, options, tmp_path):
    config = replace(RUN, **options)
    folder = tmp_path / "run"
    whole, parameters = pools[ranks].run(run, config)[0]
    first, _ = pools[ranks].run(run, replace(config, out=str(folder)), STOPPED)[0]
    assert len(first) == STOPPED + 1 and first == whole[: len(first)]
    again = replace(resumed(folder), out=None)
    rest, others = pools[ranks].run(run, again)[0]
    assert first + rest == whole
    assert all(torch.equal(value, parameters[name]) for name, value in others.items())

    plain = replace(again, **{name: getattr(PLAIN, name) for name in MEMORY})
    alone, _ = run(plain)  # the same checkpoint on one plain rank
    near = 5e-3 if config.precision in ("bf16", "fp16") else 2e-4
    assert [loss for loss, _ in alone] == pytest.approx([loss for loss, _ in rest], rel=near)


@pytest.mark.parametrize("ranks, options", first(2, WAYS[1::2]), ids=str)
def test_a_plain_checkpoint_goes_on_in_another_way(pools, ranks, options, tmp_path):
    config = replace(RUN, **options)
    plain = replace(config, **{name: getattr(PLAIN, name) for name in MEMORY})
    whole, _ = run(plain)
    run(replace(plain, out=str(tmp_path / "run")), STOPPED)
    way = {name: getattr(config, name) for name in MEMORY}
    rest, _ = pools[ranks].run(run, replace(resumed(tmp_path / "run"), out=None, **way))[0]
    near = 5e-3 if config.precision in ("bf16", "fp16") else 2e-4
    losses = [loss for loss, _ in whole[STOPPED + 1 :]]
    assert [loss for loss, _ in rest] == pytest.approx(losses, rel=near)


# ---- steps that fp16 skips


def test_skipped_steps_are_seen_saved_and_resumed(tmp_path, monkeypatch):
    """With a scale that is far too large, the first steps overflow and update nothing."""
    monkeypatch.setattr(LossScaler.__init__, "__defaults__", (2.0**31, 2000))
    config = replace(RUN, precision="fp16", optimizer="adamw", steps=30)
    _, history = train(replace(config, steps=16))
    skipped = [row["step"] for row in history if row["grad_norm"] is None]
    assert skipped == list(range(1, len(skipped) + 1)) and 3 < len(skipped) < 14
    scales = [row["loss_scale"] for row in history]
    assert scales[: len(skipped)] == [2.0 ** (30 - n) for n in range(len(skipped))]
    assert history[len(skipped) - 1]["lr"] > 0
    losses = [row["loss"] for row in history]
    assert losses[-1] < losses[len(skipped)] - 0.05  # it learns once the scale fits

    out = tmp_path / "run"
    train(replace(config, steps=3, out=str(out)))
    record = json.loads((out / "training.json").read_text())
    assert record["skipped"] == 3 and record["scaler"]["scale"] == 2.0**28
    assert load_file(out / "optimizer.safetensors") == {}
    monkeypatch.undo()
    _, rest = train(resumed(out, steps=6))
    assert rest[0]["loss_scale"] == 2.0**27 and rest[0]["grad_norm"] is None
