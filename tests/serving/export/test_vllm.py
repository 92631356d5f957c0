"""The variant for Triton's vLLM backend. Not run: it needs the backend and a GPU."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.serving.export_models import ODD, new_model, parsed_config
from utils.models import hf_format
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.serving import export as export_module
from utils.serving.export import ExportError, export


@pytest.fixture
def model(tmp_path):
    return new_model(tmp_path / "model")


def test_the_vllm_variant(tmp_path, capsys):
    import transformers

    source = new_model(tmp_path / "model", ODD, torch.bfloat16)
    out = tmp_path / "repo"
    words = ["--model", source, "--tp", 2, "--out", out, "--backend", "vllm"]
    assert export_module.main([str(word) for word in words]) == 0
    printed = capsys.readouterr().out
    assert "model/model.safetensors" in printed and f"-v {out}:/models" in printed
    config = parsed_config(out / "gpt_vllm" / "config.pbtxt")
    assert config.backend == "vllm" and config.max_batch_size == 0
    assert config.model_transaction_policy.decoupled
    [group] = config.instance_group
    assert (group.count, group.kind) == (1, group.KIND_MODEL)
    assert [tensor.name for tensor in config.input if not tensor.optional] == ["text_input"]
    assert config.output[0].name == "text_output"
    folder = out / "gpt_vllm" / "1"
    assert json.loads((folder / "model.json").read_text()) == {
        "model": "/models/gpt_vllm/1/model",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
    }
    for file in source.iterdir():
        assert (folder / "model" / file.name).read_bytes() == file.read_bytes()
    tokens = torch.tensor([[5, 17, 300, 0, 42]])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    ours = GPT.from_pretrained(source, torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    text = "the ranks of the mesh"
    assert tokenizer(text).input_ids == Tokenizer.load(source).encode(text)


def test_the_vllm_variant_of_other_models(tmp_path, model):
    from utils.serving.vllm import export_vllm

    out = tmp_path / "repo"
    gpt2 = tmp_path / "gpt2"
    sizes = GPT2Config(n_embd=16, n_layer=1, n_head=4, vocab_size=301)
    GPT2LMHeadModel(sizes).half().save_pretrained(gpt2)
    with pytest.raises(ExportError, match=r"gpt2 has no tokenizer.json: copy the model's into it"):
        export_vllm(gpt2, out, 2)
    (gpt2 / "vocab.json").write_text("{}")
    (gpt2 / "code.py").write_text("")
    assert export_vllm(gpt2, out, 2) == out / "gpt_vllm" / "1"
    assert export_vllm(model, out, 2, mount="/srv") == out / "gpt_vllm" / "2"  # a model on bytes
    facts = json.loads((out / "gpt_vllm" / "1" / "model.json").read_text())
    assert facts["dtype"] == "float16"
    copied = {file.name for file in (out / "gpt_vllm" / "1" / "model").iterdir()}
    assert copied == {file.name for file in gpt2.iterdir()} - {"code.py"}
    facts = json.loads((out / "gpt_vllm" / "2" / "model.json").read_text())
    assert facts["model"] == "/srv/gpt_vllm/2/model"
    assert (out / "gpt_vllm" / "2" / "model" / "tokenizer.json").exists()
    export(model, out, 2)  # in the same repository
    with pytest.raises(ExportError, match="tp 3 does not divide the model's 2 heads"):
        export_vllm(model, out, 3)
    hf_format.write_json(gpt2 / "config.json", {"model_type": "gpt2"})
    with pytest.raises(ExportError, match=r"config.json names no architectures, by which vLLM"):
        export_vllm(gpt2, out, 2)
    with pytest.raises(ExportError, match="--mount here is not an absolute path"):
        export_vllm(model, out, 2, mount="here")
    with pytest.raises(ExportError, match=r"version 1 .* already exists"):
        export_vllm(model, out, 2, version=1)
