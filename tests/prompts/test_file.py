"""A prompt's file, and the fingerprint that ties it to its model."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from utils.models.fingerprint import fingerprint
from utils.models.gpt import GPT, GPTConfig
from utils.prompts import file as prompt_file
from utils.prompts.embedding import prompted
from utils.prompts.file import load_prompt, prompt_facts, read_peft, save_prompt

CONFIG = GPTConfig(vocab_size=61, hidden_size=16, layers=2, heads=2)


def new_model(seed=0, **changes):
    torch.manual_seed(seed)
    return GPT(GPTConfig(**{**vars(CONFIG), **changes}))


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "first-base"
    new_model().bfloat16().save_pretrained(folder)
    return folder


# ---- fingerprints


@pytest.mark.parametrize("tied", [False, True])
def test_the_same_weights_in_any_form(tmp_path, tied):
    model = new_model(tie_embeddings=tied).bfloat16()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "shards", max_shard_bytes=3000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    expected = fingerprint(tmp_path / "one")
    assert len(expected) == 64 and int(expected, 16)
    assert fingerprint(str(tmp_path / "shards")) == expected
    for dtype in (None, torch.float32, torch.float64):
        assert fingerprint(GPT.from_pretrained(tmp_path / "one", dtype)) == expected


def test_a_tied_matrix_that_is_stored_twice_counts_once(tmp_path):
    from utils.models import hf_format

    model = new_model(tie_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    hf_format.write_weights(tmp_path / "base", tensors)
    assert fingerprint(tmp_path / "base") == fingerprint(model)


def test_any_change_of_the_weights_changes_it():
    model = new_model()
    seen = {fingerprint(model)}
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1e-4
    seen.add(fingerprint(model))
    seen.add(fingerprint(model.bfloat16()))  # rounded: another model
    model = new_model()
    layer = model.model.layers[0]
    layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj
    seen.add(fingerprint(model))
    assert len(seen) == 4


def test_shapes_and_names_count():
    def one(name, tensor):
        module = torch.nn.Module()
        module.register_parameter(name, torch.nn.Parameter(tensor))
        return fingerprint(module)

    assert (
        len({one("a", torch.zeros(6)), one("b", torch.zeros(6)), one("a", torch.zeros(2, 3))}) == 3
    )


def test_a_part_of_a_model_has_none():
    model = new_model()
    model.lm_head.weight.tp_split = "a note of tensor parallelism"
    with pytest.raises(ValueError, match=r"lm_head.weight is a slice of a matrix"):
        fingerprint(model)
    model = new_model()
    with prompted(model, torch.zeros(2, 16)), pytest.raises(ValueError, match="has a prompt in fr"):
        fingerprint(model)


# ---- files


def test_written_and_read(tmp_path, base):
    prompt = torch.randn(5, 16)
    file = tmp_path / "task.safetensors"
    save_prompt(file, prompt, base, task="colors", steps=3)
    assert torch.equal(load_prompt(file), prompt)
    assert torch.equal(load_prompt(file, base), prompt)
    model = GPT.from_pretrained(base, torch.float32)
    assert torch.equal(load_prompt(file, model), prompt)
    assert torch.equal(load_prompt(str(file), fingerprint(base)), prompt)
    assert prompt_facts(file) == {
        "format": "pt", "task": "colors", "steps": "3", "base_name": "first-base",
        "base_fingerprint": fingerprint(model), "length": "5", "hidden_size": "16",
    }
    assert [path.name for path in tmp_path.iterdir() if path != base] == ["task.safetensors"]
    with safe_open(str(file), framework="pt") as data:
        assert list(data.keys()) == ["prompt_embeddings"]


def test_another_base_is_refused_by_name(tmp_path, base):
    file = tmp_path / "task.safetensors"
    save_prompt(file, torch.zeros(2, 16), base)
    other = tmp_path / "other-base"
    new_model(seed=1).save_pretrained(other)
    first, second = fingerprint(base)[:12], fingerprint(other)[:12]
    message = rf"is a prompt for first-base \({first}\), not for other-base \({second}\)"
    with pytest.raises(ValueError, match=message):
        load_prompt(file, other)
    with pytest.raises(ValueError, match=r"is a prompt for first-base .* not for this model"):
        load_prompt(file, GPT.from_pretrained(other))
    shutil.rmtree(other)
    shutil.copytree(base, other)  # the name does not matter
    assert load_prompt(file, other).shape == (2, 16)


def test_files_that_are_no_prompts(tmp_path, base):
    file = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"x.safetensors cannot be read as a safetensors file"):
        load_prompt(file)
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"x.safetensors cannot be read as a safetensors file"):
        load_prompt(file)
    save_file({"weight": torch.zeros(3)}, str(file))
    with pytest.raises(ValueError, match="is not a prompt: it holds weight, not prompt_embeddings"):
        load_prompt(file)
    save_file({"prompt_embeddings": torch.zeros(3)}, str(file))
    with pytest.raises(ValueError, match="is not a prompt"):
        load_prompt(file)
    save_file({"prompt_embeddings": torch.zeros(3, 16)}, str(file))
    with pytest.raises(ValueError, match="does not say which model it is for"):
        load_prompt(file, base)
    assert load_prompt(file).shape == (3, 16)
    with pytest.raises(ValueError, match=r"a prompt of shape \[2, 3, 16\] is not \(P, C\)"):
        save_prompt(file, torch.zeros(2, 3, 16), base)


def test_a_file_appears_whole_or_not_at_all(tmp_path, base, monkeypatch):
    file = tmp_path / "task.safetensors"
    save_prompt(file, torch.ones(2, 16), base)

    def full(tensors, path, metadata):
        with open(path, "wb") as half:
            half.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prompt_file, "save_file", full)
    with pytest.raises(ValueError, match=r"cannot be written: .*No space left"):
        save_prompt(file, torch.zeros(2, 16), base)
    assert [path.name for path in tmp_path.iterdir() if path != base] == ["task.safetensors"]
    assert torch.equal(load_prompt(file), torch.ones(2, 16))  # the old one is still there


def test_an_adapter_of_another_kind_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match="holds a LORA adapter, not PROMPT_TUNING"):
        read_peft(tmp_path)
