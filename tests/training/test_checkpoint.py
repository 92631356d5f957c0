"""Checkpoints hold no pickles; one that does not fit is refused, and nothing changes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.models.hf_format import CheckpointError
from utils.training import checkpoint
from utils.training.optimizer import make_optimizer
from utils.training.run_folder import RunFolder, newest

SIZES = {"vocab_size": 61, "hidden_size": 24, "layers": 2, "heads": 4, "kv_heads": 2}


def save(folder, model, optimizer, run):
    run = {**run, "optimizer": optimizer.kind}
    with RunFolder(str(folder), keep=2, rank=0).opened() as opened:
        checkpoint.save_whole(
            opened, model, model.named_parameters(), optimizer.named_state().items(), run
        )


def load(folder, model, optimizer):
    taken = newest(folder)
    run = checkpoint.load_weights(taken, model, optimizer.kind)
    optimizer.load_named_state(checkpoint.read_state(taken))
    return run


def pair(kind="muon", **changes):
    model = GPT(GPTConfig(**{**SIZES, **changes}))
    return model, make_optimizer(model, kind)


def steps(model, optimizer, count):
    """Train on tokens from the global random generator; return the losses."""
    losses = []
    for _ in range(count):
        tokens = torch.randint(61, (3, 11))
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model, optimizer = pair()
    steps(model, optimizer, 2)
    save(tmp_path / "run", model, optimizer, {"step": 2, "config": {"seed": 5}})
    (tmp_path / "run" / "checkpoint-2").rename(tmp_path / "one")
    (tmp_path / "one" / "SHA256SUMS").unlink()  # so that the contents themselves are checked
    return tmp_path / "one"


def test_nothing_in_the_folder_is_a_pickle(saved):
    names = sorted(path.name for path in saved.iterdir())
    assert names == ["config.json", "model.safetensors", "optimizer.safetensors", "training.json"]
    state = load_file(saved / "optimizer.safetensors")
    assert state["model.layers.0.mlp.up_proj.weight/momentum_buffer"].shape == (64, 24)
    assert state["model.embed_tokens.weight/exp_avg"].shape == (61, 24)
    assert state["model.norm.weight/step"].item() == 2
    assert json.loads((saved / "training.json").read_text())["config"] == {"seed": 5}


def test_a_run_can_be_saved_before_its_first_step(tmp_path):
    model, optimizer = pair()
    save(tmp_path / "run", model, optimizer, {"step": 0})
    assert load(tmp_path / "run", *pair())["step"] == 0


# ---- refusals change nothing


def refused(folder, sentence, kind="muon", **changes):
    model, optimizer = pair(kind, **changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=sentence) as caught:
        load(folder, model, optimizer)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.named_state() and torch.equal(torch.get_rng_state(), random_state)


def test_another_run_is_named(saved):
    refused(saved, "num_hidden_layers 2, this run asks for 3", layers=3)
    refused(saved, "hidden_size 24, this run asks for 32", hidden_size=32)
    refused(saved, "num_key_value_heads 2, this run asks for 4", kv_heads=4)
    refused(saved, "tie_word_embeddings False, this run asks for True", tie_embeddings=True)
    refused(saved, "trained with optimizer 'muon'; this run asks for 'adamw'", kind="adamw")


@pytest.mark.parametrize(
    "file, sentence",
    [
        ("training.json", "has no training.json: it holds no training run to resume"),
        ("config.json", "config.json is missing"),
        ("model.safetensors", "holds neither model.safetensors nor"),
        ("optimizer.safetensors", "optimizer.safetensors is missing: the folder was only partly"),
    ],
)
def test_a_missing_file_is_named(saved, file, sentence):
    (saved / file).unlink()
    refused(saved, sentence)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "training.json"])
def test_a_file_cut_short_is_named(saved, file):
    content = (saved / file).read_bytes()
    (saved / file).write_bytes(content[: len(content) // 2])
    refused(saved, f"{file} (is not a readable safetensors file|cannot be read as JSON)")


def test_wrong_contents_are_named(saved):
    state = load_file(saved / "optimizer.safetensors")
    name = "model.norm.weight/exp_avg"
    save_file({k: v for k, v in state.items() if k != name}, saved / "optimizer.safetensors")
    refused(saved, f"optimizer.safetensors lacks {name}")
    save_file({**state, name: torch.zeros(3)}, saved / "optimizer.safetensors")
    refused(saved, r"has shape \[3\], but the model needs \[24\]")
    save_file(state, saved / "optimizer.safetensors")
    run = json.loads((saved / "training.json").read_text())
    (saved / "training.json").write_text(json.dumps({**run, "format": 7}))
    refused(saved, "has format 7, but this version reads format 1")
    (saved / "training.json").write_text(json.dumps({"format": 1, "step": 1}))
    refused(saved, "training.json has no optimizer")
    shutil.rmtree(saved)
    refused(saved, "one does not exist")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/run cannot be written to: Not a directory"):
        save(tmp_path / "file" / "run", *pair(), {"step": 1})
