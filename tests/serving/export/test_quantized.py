"""Quantized versions: the contents of their files, the weights of a rank, refusals."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from tests.serving.export_models import ODD, new_model
from utils.compression.quantize import quantize, unpack
from utils.compression.scheme import SCHEMES
from utils.models.gpt import GPT
from utils.models.tp_plan import tp_cuts
from utils.serving import export as export_module
from utils.serving import shard
from utils.serving.engine.config import EngineConfig
from utils.serving.engine.stored import PACKED, SCALE, is_matrix
from utils.serving.engine.version import LoadError, Version
from utils.serving.export import ExportError, export, rebuild


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """On 4 ranks, shards have 12 and 9 columns, which split int4's groups of 32."""
    return new_model(tmp_path_factory.mktemp("odd") / "model", ODD)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_ranks_hold_the_numbers_of_the_whole(tmp_path, model, monkeypatch, dtype, tp):
    """Split into several files, and quantized a few rows at a time."""
    monkeypatch.setattr(shard, "FILE_BYTES", 4000)
    monkeypatch.setattr(shard, "NUMBERS", 100)
    version = Version.read(export(model, tmp_path / "repo", tp, dtype=dtype))
    plain = Version.read(export(model, tmp_path / "plain", tp))
    assert (version.manifest["format"], version.compute, version.stored) == (2, dtype, "float32")
    assert (plain.manifest["format"], plain.compute) == (1, "auto")
    cuts, weights = tp_cuts(ODD, tp), GPT.from_pretrained(model).state_dict()
    for rank in range(tp):
        found, rest = version.weights(rank), plain.weights(rank)
        assert len(version.shards(rank)) > 1
        for name, tensor in rest.items():
            if not is_matrix(name):
                assert torch.equal(found.pop(name), tensor)
                continue
            cut, (rows, columns) = cuts[name], tensor.shape
            start = sum(cut.sizes[:rank])
            stop = start + cut.sizes[rank]
            if cut.dim == 0:  # each row has its own scale
                part = quantize(weights[name][start:stop], SCHEMES[dtype])
            else:
                part = quantize(weights[name], SCHEMES[dtype]).columns(start, stop)
            assert torch.equal(found.pop(name + SCALE), part.scale)
            if dtype == "int8":
                assert torch.equal(found.pop(name), part.values)
                continue
            packed = found.pop(name + PACKED)
            stored = unpack(packed, 2 * packed.shape[1])
            after = stored.shape[1] - part.offset - columns
            assert stored.shape == (rows, 32 * part.scale.shape[1]) and 0 <= after < 32
            assert torch.equal(stored, F.pad(part.values, (part.offset, after)))
        assert not found


def test_a_format_is_a_version_of_its_own(tmp_path, model):
    """Nothing is written if the newest version is the same; the repository's options stay."""
    out, numbers = tmp_path / "repo", []
    for dtype in ("auto", "int8", "int8", "bf16", "bfloat16", "int4", "auto"):
        numbers.append(export(model, out, 1, dtype=dtype).name)
    assert numbers == ["1", "2", "2", "3", "3", "4", "5"]
    computed = [Version.read(out / "gpt_engine" / number).compute for number in "12345"]
    assert computed == ["auto", "int8", "bfloat16", "int4", "auto"]
    config = EngineConfig()
    assert config.dtypes("float32", True, "bfloat16") == ("bfloat16", "bfloat16")
    assert config.dtypes("bfloat16", True, "int8") == ("float32", "float32")
    assert EngineConfig(dtype="float16").dtypes("float32", True, "bfloat16")[0] == "float16"


# ---- damaged versions


def other(folder, change):
    """Apply `change` to the rank's tensors, and list the new file in the manifest."""
    file = folder / "rank-0-of-1.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    manifest, data = json.loads((folder / "manifest.json").read_text()), file.read_bytes()
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["files"][file.name] = facts
    (folder / "manifest.json").write_text(json.dumps(manifest))


NAME = "model.layers.0.mlp.down_proj.weight_scale"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop(NAME), f"lacks {NAME} of rank 0: export it again"),
        (lambda t: t.update({NAME: t[NAME].double()}), f"{NAME} is float64, not float32"),
        (lambda t: t.update({NAME: t[NAME][1:]}), rf"{NAME} has shape \[23, 1\], but rank 0"),
    ],
)
def test_scales_that_are_not_right_are_named(tmp_path, model, change, why):
    folder = export(model, tmp_path / "repo", 1, dtype="int8")
    other(folder, change)
    with pytest.raises(LoadError, match=why) as refused:
        Version.read(folder).weights(0)
    assert "\n" not in str(refused.value)


def test_a_format_that_the_engine_does_not_know(tmp_path, model):
    folder = export(model, tmp_path / "repo", 1, dtype="int8")
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"int8"', '"int2"'))
    with pytest.raises(LoadError, match=r"has compute 'int2', but this engine supports auto"):
        Version.read(folder)


# ---- refusals and the command


def test_a_matrix_of_what_no_whole_number_stands_for(tmp_path):
    checkpoint = new_model(tmp_path / "model")
    weights = load_file(checkpoint / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name][3, 4] = torch.inf
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=f"{name} holds values that are not finite, which int"):
        export(checkpoint, tmp_path / "repo", 1, dtype="int4")
    assert not (tmp_path / "repo").exists()


def test_a_checkpoint_does_not_come_back_from_whole_numbers(tmp_path, model):
    folder = export(model, tmp_path / "repo", 1, dtype="int8")
    with pytest.raises(
        ExportError, match=r"repo/gpt_engine/1 holds int8 values, from which model"
    ):
        rebuild(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_options_that_would_overrule_a_version(tmp_path, model):
    out = tmp_path / "repo"
    export(model, out, 1, options={"dtype": "float16"})
    with pytest.raises(
        ExportError, match=r'pbtxt has dtype float16, which .*bfloat16: set it to "a'
    ):
        export(model, out, 1, version=2, dtype="bf16")
    assert export(model, out, 1, version=2, dtype="int8").name == "2"  # the rest is in float16
    with pytest.raises(ExportError, match="dtype 'int3' is not known: give one of auto, float32"):
        export(model, out, 1, dtype="int3")


@pytest.mark.parametrize(
    ("flags", "said", "computed"),
    [
        ("--dtype int8", "parameters as int8 and float32 on 1 rank", "int8 and float32"),
        ("--dtype bf16 --kv-cache-dtype int8", "parameters as float32 on", "bfloat16 and int8"),
    ],
)
def test_the_command_says_the_format(tmp_path, model, capsys, flags, said, computed):
    words = f"--model {model} --out {tmp_path / 'repo'} {flags}".split()
    assert export_module.main(words) == 0
    printed = capsys.readouterr().out
    assert said in printed and f"of keys and values, {computed}\n" in printed


def test_the_command_refuses_whole_numbers_for_vllm(tmp_path, model, capsys):
    words = f"--model {model} --out {tmp_path / 'repo'} --backend vllm --dtype int8".split()
    assert export_module.main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "--dtype is for our engine, not for --backend vllm" in line
