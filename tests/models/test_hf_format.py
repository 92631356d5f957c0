"""Hugging Face folders: unsupported or damaged ones are named, and written ones are complete."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.small_models import random_model, small
from utils.models import hf_format
from utils.models.gpt import GPT
from utils.models.hf_format import CheckpointError
from utils.models.tokenizer import Tokenizer
from utils.training.run_folder import newest

# ---- refusals: configs


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"heads": 5}, "heads 5 does not divide hidden_size 24"),
        ({"kv_heads": 3}, "kv_heads 3 does not divide heads 4"),
        ({"heads": 8}, "head size 3 is odd"),
        ({"head_dim": 5}, "head size 5 is odd"),
        ({"layers": 0}, "layers 0 is not an integer of at least 1"),
        ({"vocab_size": 6.5}, "vocab_size 6.5 is not an integer"),
        ({"kv_heads": 0}, "kv_heads 0 is not an integer"),
        ({"rope_theta": 0.0}, "rope_theta 0.0 and norm_eps"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a positive factor, not None"),
    ],
)
def test_sizes_that_do_not_fit_are_named(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        small(**changes)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model_type": "gpt2"}, "'gpt2' is not supported: only llama, mistral, qwen2, mixtral"),
        ({"model_type": "mistral"}, "sliding_window 4096 is not supported: only a model without"),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            "use_sliding_window True is not supported",
        ),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config 'gptq'"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope scaling 'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not"),
        ({"hidden_size": 25}, "heads 4 does not divide hidden_size 25"),
    ],
)
def test_unsupported_models_are_named(tmp_path, changes, sentence):
    GPT(small()).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=sentence) as caught:
        GPT.from_pretrained(tmp_path / "model")
    assert "\n" not in str(caught.value) and str(tmp_path / "model") in str(caught.value)


# ---- refusals: files


@pytest.fixture
def folders(tmp_path):
    """(a folder with one file, a folder with shards)"""
    model = random_model(small())
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_bytes=4000)
    return tmp_path / "one", tmp_path / "many"


def refused(folder, sentence):
    with pytest.raises(CheckpointError, match=sentence) as caught:
        GPT.from_pretrained(folder)
    assert "\n" not in str(caught.value)


def test_missing_files_are_named(folders, tmp_path):
    one, many = folders
    refused(tmp_path / "nowhere", "nowhere does not exist")
    refused(one / "config.json", "config.json is a file: give the checkpoint's folder")
    shard = sorted(many.glob("model-*.safetensors"))[2]
    shard.unlink()
    refused(many, f"names the shard {shard.name}, which is missing")
    (one / "model.safetensors").unlink()
    refused(one, "holds neither model.safetensors nor model.safetensors.index.json")
    (one / "config.json").unlink()
    refused(one, "config.json is missing")
    (one / "config.json").write_text("{")
    refused(one, "cannot be read as JSON")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickle_is_refused_unread(folders, name):
    one, _ = folders
    (one / "model.safetensors").rename(one / name)
    refused(one, f"{name} is a pickle checkpoint, which can run code when it is read")


def test_tensors_that_do_not_fit_are_named(folders):
    one, _ = folders
    file = one / "model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, file)
    refused(one, "lacks model.norm.weight")
    save_file({**tensors, "model.extra": torch.zeros(1)}, file)
    refused(one, "holds model.extra, which this model does not have")
    save_file({**tensors, "lm_head.weight": torch.zeros(61, 23)}, file)
    refused(one, r"lm_head.weight has shape \[61, 23\], but the model needs \[61, 24\]")
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3)}, file)
    GPT.from_pretrained(one)  # older files store what the config determines


def test_damaged_files_are_named(folders):
    one, many = folders
    file = one / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 50 + whole[50:]):
        file.write_bytes(damaged)
        refused(one, "model.safetensors is not a readable safetensors file")
    file.unlink()
    os.mkfifo(file)  # reading it would block forever
    refused(one, "model.safetensors is not a readable safetensors file")
    shard = min(many.glob("model-*.safetensors")).name
    index = many / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    for weight_map, sentence in (
        ({**content["weight_map"], "lm_head.weight": "../one/x.safetensors"}, "not a safetensors"),
        ({**content["weight_map"], "lm_head.weight": "model.pt"}, "not a safetensors"),
        ({**content["weight_map"], "lm_head.weight": "x" * 300 + ".safetensors"}, "not a saf"),
        ({**content["weight_map"], "lm_head.weight": [1]}, "not a safetensors"),
        ({**content["weight_map"], "new": shard}, "says that new is"),
        (None, "has no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(many, sentence)


@pytest.mark.parametrize("name", ["loop", "x" * 5000])
def test_folders_that_cannot_be_looked_into_are_named(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    for use in (GPT.from_pretrained, GPT(small()).save_pretrained, Tokenizer.load, newest):
        with pytest.raises(CheckpointError, match=r"folder .* cannot be read: (Symlink|File name)"):
            use(tmp_path / name)


# ---- writing


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    first, second = random_model(small(), 1), random_model(small(), 2)
    first.save_pretrained(folder, max_shard_bytes=4000)
    monkeypatch.setattr(hf_format, "write_weights", broken)
    with pytest.raises(OSError, match="disk full"):
        second.save_pretrained(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert same(GPT.from_pretrained(folder), first)
    monkeypatch.undo()
    second.save_pretrained(folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]  # no old shards
    assert same(GPT.from_pretrained(folder), second)


def broken(*arguments):
    raise OSError("disk full")


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


def test_a_stop_between_the_two_renames_is_repaired(tmp_path):
    model = random_model(small())
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.old")
    assert same(GPT.from_pretrained(tmp_path / "model"), model)
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / ".tmpa1B2c3").touch()  # killed while safetensors was writing
    model.save_pretrained(tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]


def test_what_is_not_ours_is_never_replaced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds notes\.txt, which is not part of"):
        GPT(small()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"notes\.txt is a file: name a folder"):
        GPT(small()).save_pretrained(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
