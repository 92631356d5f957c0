"""What the export refuses, with the reason and the fix, leaving nothing behind."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.serving.export_models import BYTES, TIED, hidden, new_model
from utils.models import hf_format
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.prompts.file import save_prompt
from utils.serving.export import ExportError, export


@pytest.fixture
def model(tmp_path):
    return new_model(tmp_path / "model")


def edit_config(model, **changes):
    hf_format.write_json(model / "config.json", {**hf_format.read_config(model), **changes})


def edit_weights(model, **changes):
    """Replace tensors (None: remove them)."""
    tensors = {**load_file(model / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})


def truncated(model):
    os.truncate(model / "model.safetensors", 5000)


def pickled(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def lost_shard(model):
    (model / "model.safetensors").unlink()
    tensors = dict(GPT(BYTES).named_parameters())
    hf_format.write_weights(model, tensors, max_shard_bytes=4000)
    (model / "model-00002-of-00004.safetensors").unlink()


def mixture(model):
    shutil.rmtree(model)
    new_model(model, experts=4)


NORM, WORDS = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (lambda m: shutil.rmtree(m), "checkpoint folder .*model does not exist"),
        (lambda m: (m / "config.json").unlink(), "config.json is missing: is .* a checkpoint"),
        (lambda m: (m / "config.json").write_text("{"), "config.json cannot be read as JSON"),
        (lambda m: edit_config(m, model_type="gpt2"), "type .gpt2. is not supported.*--backend"),
        (lambda m: edit_config(m, model_type="mistral"), "sliding_window 4096 is not supported"),
        (lambda m: edit_config(m, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (
            lambda m: edit_config(m, quantization_config={"quant_method": "gptq"}),
            "quantization_config 'gptq' is not supported: convert the checkpoint to float32",
        ),
        (mixture, "a mixture of 4 experts, which our engine does not serve: --backend vllm"),
        (pickled, "pytorch_model.bin is a pickle checkpoint, which can run code"),
        (truncated, "model.safetensors is not a readable safetensors file"),
        (lost_shard, "names the shard model-00002-of-00004.safetensors, which is missing"),
        (lambda m: edit_weights(m, **{NORM: None}), "model lacks model.norm.weight"),
        (lambda m: edit_weights(m, extra=torch.ones(3)), "holds extra, which this model does not"),
        (
            lambda m: edit_weights(m, **{NORM: torch.ones(15)}),
            r"model.norm.weight has shape \[15\], but the model needs \[16\]",
        ),
        (
            lambda m: edit_weights(m, **{NORM: torch.ones(16, dtype=torch.bfloat16)}),
            "float32 and model.norm.weight as bfloat16: save all tensors in one dtype",
        ),
        (
            lambda m: edit_weights(m, **{WORDS: torch.ones(256, 16, dtype=torch.int8)}),
            "model.embed_tokens.weight is stored as I8, which is not served",
        ),
        (
            lambda m: edit_weights(m, **{WORDS: torch.ones(256, 16, dtype=torch.float64)}),
            "stored as F64, which is not served .*: save the checkpoint as float32",
        ),
        (
            lambda m: (m / "tokenizer.json").write_text("{}"),
            "tokenizer.json is not a tokenizer",
        ),
        (
            lambda m: Tokenizer.train(["the mesh of the ranks"], 260).save(m),
            "tokenizer.json has 260 tokens, but the model has 256: use the tokenizer",
        ),
    ],
)
def test_checkpoints_that_cannot_be_served(tmp_path, model, damage, sentence):
    damage(model)
    with pytest.raises(ValueError, match=sentence) as error:
        export(model, tmp_path / "repo", 1)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "repo").exists()


def test_a_model_without_its_tokenizer(tmp_path):
    model = new_model(tmp_path / "model", TIED)
    (model / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"no tokenizer.json, so its 301 tokens cannot be served"):
        export(model, tmp_path / "repo", 1)


@pytest.mark.parametrize(
    "changes, tp, sentence",
    [
        ({}, 0, "tp 0 is not a number of ranks: give 1 or more"),
        ({}, -2, "tp -2 is not a number of ranks"),
        ({}, 3, "tp 3 does not divide the model's 2 heads and 2 key-value heads: give 1 or 2"),
        ({"heads": 4, "kv_heads": 2}, 4, "tp 4 .* 4 heads and 2 key-value heads: give 1 or 2"),
        ({"heads": 8, "kv_heads": 8}, 16, "tp 16 .*: give 1, 2, 4 or 8"),
        ({"kv_heads": 1}, 2, "2 heads and 1 key-value heads: give 1$"),
        ({"intermediate_size": 1}, 2, "tp 2 is more than the model's 1 columns of the MLP"),
    ],
)
def test_numbers_of_ranks_that_do_not_fit(tmp_path, changes, tp, sentence):
    model = new_model(tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=sentence):
        export(model, tmp_path / "repo", tp)
    assert not (tmp_path / "repo").exists()


def test_places_that_are_not_for_us(tmp_path, model):
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"file is a file: name a folder"):
        export(model, tmp_path / "file", 1)
    with pytest.raises(ExportError, match=r"file/repo cannot be written: .*file is not a writable"):
        export(model, tmp_path / "file" / "repo", 1)
    home = tmp_path / "home"
    (home / "letters").mkdir(parents=True)
    with pytest.raises(ExportError, match="home holds letters, which is not a Triton model: name"):
        export(model, home, 1)
    assert [path.name for path in home.iterdir()] == ["letters"] and hidden(tmp_path) == []
    theirs = tmp_path / "theirs" / "gpt"
    theirs.mkdir(parents=True)
    (theirs / "config.pbtxt").write_text("")
    with pytest.raises(ExportError, match="holds a model gpt that is not ours"):
        export(model, tmp_path / "theirs", 1)
    foreign = tmp_path / "foreign" / "gpt_engine" / "1"
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"holds notes.txt but no manifest.json, so it is not "):
        export(model, tmp_path / "foreign", 1, version=1)
    assert (foreign / "notes.txt").read_text() == "mine"
    for version in (0, -1, "1", 1.5, 2**63):
        with pytest.raises(ExportError, match=f"version {version!r} is invalid: versions are 1, 2"):
            export(model, tmp_path / "repo", 1, version=version)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this machine has no /proc")
def test_a_place_where_nothing_can_be_made(tmp_path, model):
    with pytest.raises(ExportError, match="/proc/models cannot be "):
        export(model, "/proc/models", 1)


def with_prompt(tmp_path, model, name="kind", shape=(3, 16), base=None, value=0.0):
    folder = tmp_path / "prompts"
    folder.mkdir()
    save_prompt(folder / f"{name}.safetensors", torch.full(shape, value), base or model)
    return folder


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"name": "two words"}, "'two words' is not a plain word by which a request"),
        ({"name": "größe"}, "'größe' is not a plain word"),
        ({"name": "-x"}, "'-x' is not a plain word"),
        ({"shape": (3, 8)}, "vectors of 8 elements, but the model's have 16"),
        ({"shape": (0, 16)}, "has 0 virtual tokens"),
        ({"shape": (2048, 16)}, "has 2048 virtual tokens, but the model has 2048 positions"),
        ({"value": float("nan")}, "values that are not finite"),
        ({"base": "0123456789abcdef" * 4}, r"is a prompt for this base \(0123456789ab\), not for"),
    ],
)
def test_prompts_that_do_not_belong(tmp_path, model, changes, sentence):
    folder = with_prompt(tmp_path, model, **changes)
    with pytest.raises(ExportError, match=sentence):
        export(model, tmp_path / "repo", 1, folder)
    assert not (tmp_path / "repo").exists()


def test_prompts_that_are_none(tmp_path, model):
    folder = tmp_path / "prompts"
    for _ in range(2):
        with pytest.raises(ExportError, match="prompts holds no prompts: give a folder"):
            export(model, tmp_path / "repo", 1, folder)
        folder.mkdir(exist_ok=True)
    save_file({"prompt_embeddings": torch.zeros(3, 16)}, folder / "anonymous.safetensors")
    with pytest.raises(ExportError, match="does not say which model it is for: save it with"):
        export(model, tmp_path / "repo", 1, folder)
    save_file({"lora": torch.zeros(3, 16)}, folder / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"adapter.safetensors is not a prompt: it holds lora"):
        export(model, tmp_path / "repo", 1, folder)
