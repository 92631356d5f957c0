"""The report on traces of training libraries, recorded as their users do: transformers' Trainer
under torchrun, and DeepSpeed's engine."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from utils.measure import profile
from utils.measure.findings import report
from utils.ranks import Ranks
from utils.ranks.launch import launch
from utils.training.deepspeed import import_deepspeed, settings

TRAINER = """
import os
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

rank = int(os.environ["RANK"])
os.chdir(sys.argv[1])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if rank == 1:
            time.sleep(0.1)
        row = torch.arange(index, index + 8) % 32
        return {"input_ids": row, "labels": row}


class Steps(TrainerCallback):
    def on_step_end(self, *_, **__):
        profiler.step()


def trainer(*callbacks):
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=2)
    settings = TrainingArguments("out", max_steps=5, per_device_train_batch_size=2, use_cpu=True,
                                 report_to=[], save_strategy="no", disable_tqdm=True,
                                 logging_strategy="no")
    return Trainer(LlamaForCausalLM(config), settings, train_dataset=Rows(), callbacks=[*callbacks])


def export(profiler):
    profiler.export_chrome_trace(f"marked/rank{rank}.json.gz")


os.makedirs("marked", exist_ok=True)
os.makedirs("bare", exist_ok=True)
activities = [ProfilerActivity.CPU]
with profile(activities=activities, schedule=schedule(wait=0, warmup=2, active=2, repeat=1),
             on_trace_ready=export, record_shapes=True) as profiler:
    trainer(Steps()).train()
with profile(activities=activities) as bare:  # without step()
    trainer().train()
bare.export_chrome_trace(f"bare/{rank}.json")
"""


@pytest.mark.thorough
def test_transformers_trainer(tmp_path):
    """Data is late on rank 1; steps by the profiler's marks, then by the optimizer."""
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    launch(script, ranks=2, args=[tmp_path], timeout=patience(200))
    for folder, marked, steps in (("marked", True, 2), ("bare", False, 5)):
        made = report(tmp_path / folder)
        assert [(t.rank, t.marked, len(t.steps)) for t in made.traces] == [
            (0, marked, steps),
            (1, marked, steps),
        ]
        assert made.ranks[1].data > 100 > made.ranks[0].data
        assert made.late[1] > 2 * made.late[0]
        found = {finding.kind: finding for finding in made.findings}
        assert found["data"].rank == found["straggler"].rank == 1
        assert "its data loading takes" in found["straggler"].text
        assert made.collectives()["all_reduce"]["calls"] >= 1
        assert all(one.compute > 0 for one in made.steps)


def deepspeed_steps(folder, zero_stage):
    """Runs on a rank: steps of DeepSpeed's engine to which rank 0 is late; three are recorded."""
    deepspeed = import_deepspeed(torch.device("cpu"))
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config=settings(
            torch.device("cpu"), dist.get_world_size(), parameters=306, zero_stage=zero_stage
        ),
        dist_init_required=False,
    )
    with profile.tracing(folder) as profiler:
        for _ in range(5):
            loss = engine(torch.ones(4, 16)).square().mean()
            if dist.get_rank() == 0:
                time.sleep(0.3)
            engine.backward(loss)
            engine.step()
            profiler.step()


@pytest.mark.thorough
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_deepspeed(pair, tmp_path, zero_stage):
    pair.run(deepspeed_steps, tmp_path, zero_stage)
    made = report(tmp_path)
    (straggler,) = (finding for finding in made.findings if finding.kind == "straggler")
    assert straggler.rank == 0 and 150 < straggler.ms < 600
    assert made.ranks[0].host >= 299
    assert sum(one["bytes"] for one in made.collectives().values()) >= 306 * 4
    assert all(one.compute > 0 for one in made.steps)


@pytest.fixture(scope="module")
def pair():
    with Ranks(2, device="cpu", timeout=patience(60)) as ranks:
        yield ranks
