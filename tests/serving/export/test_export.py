"""The export: each rank's weights, versions, prompts, the shipped code, the command."""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.serving.export_models import (
    BYTES,
    ODD,
    ROOT,
    TIED,
    check_whole,
    new_model,
    parsed_config,
)
from utils.models import hf_format
from utils.models.fingerprint import fingerprint
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.parallel.mesh import Axis
from utils.parallel.tensor import tensor_parallel
from utils.prompts.file import save_prompt
from utils.serving import export as export_module
from utils.serving import repository, shard
from utils.serving.checkpoint import byte_tokenizer
from utils.serving.engine.version import LoadError, Version
from utils.serving.export import ExportError, export, rebuild
from utils.serving.install import ServerError, models_of


@pytest.fixture
def model(tmp_path):
    return new_model(tmp_path / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """(model, folder of two prompts for it)."""
    folder = tmp_path_factory.mktemp("prompted")
    base = new_model(folder / "base")
    (folder / "prompts").mkdir()
    for name, length in (("kind", 3), ("module-names", 5)):
        prompt = torch.randn(length, 16, generator=torch.Generator().manual_seed(length))
        save_prompt(folder / "prompts" / f"{name}.safetensors", prompt, base, task=f"the {name}")
    return base, folder / "prompts"


# ---- 1. each rank's weights


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("config", [ODD, TIED], ids=["odd", "tied"])
def test_each_rank_gets_what_tensor_parallelism_gives_it(tmp_path, config, tp):
    source = new_model(tmp_path / "model", config)
    folder = export(source, tmp_path / "repo", tp)
    for rank in range(tp):
        part = tensor_parallel(
            GPT.from_pretrained(source), Axis("tp", tuple(range(tp)), rank, None)
        )
        expected = {name: parameter.detach() for name, parameter in part.named_parameters()}
        if rank:  # added only once, to the sum
            for name in [n for n in expected if n.endswith(("o_proj.bias", "down_proj.bias"))]:
                del expected[name]
        found = load_file(folder / f"rank-{rank}-of-{tp}.safetensors")
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        assert set(Version.read(folder).weights(rank)) == set(expected)  # as the engine reads it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rebuild_is_the_source_to_the_byte(tmp_path, tp, dtype):
    config = TIED if dtype == torch.float16 else ODD
    source = new_model(tmp_path / "model", config, dtype)
    folder = export(source, tmp_path / "repo", tp)
    again = rebuild(folder, tmp_path / "again")
    assert {file.name for file in again.iterdir()} == {file.name for file in source.iterdir()}
    for file in source.iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["dtype"] == str(dtype).removeprefix("torch.")
    assert manifest["parameters"] == config.parameter_count()
    assert manifest["fingerprint"] == fingerprint(source) and manifest["name"] == "model"
    assert (manifest["tp"], manifest["format"], manifest["prompts"]) == (tp, 1, {})
    code = (".py", ".cpp")
    written = {str(f.relative_to(folder)) for f in folder.rglob("*.*") if f.suffix not in code}
    assert set(manifest["files"]) == written - {"manifest.json"}
    for name, facts in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert facts == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("size", [1, 4000, 20_000])
def test_a_large_model_has_several_files_for_each_rank(tmp_path, monkeypatch, size):
    """Each has at most `size` bytes or a single tensor."""
    source = new_model(tmp_path / "model", ODD, torch.bfloat16)
    whole = Version.read(export(source, tmp_path / "whole", 2))
    monkeypatch.setattr(shard, "FILE_BYTES", size)
    folder = export(source, tmp_path / "repo", 2)
    version, names = Version.read(folder), set()
    for rank in range(2):
        expected, found = whole.weights(rank), version.weights(rank)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        files = version.shards(rank)
        names.update(files)
        assert 1 < len(files) <= len(expected)
        assert files[0] == f"rank-{rank}-of-2-00001-of-{len(files):05d}.safetensors"
        for file in files:
            sizes = [tensor.nbytes for tensor in load_file(folder / file).values()]
            assert len(sizes) == 1 or sum(sizes) <= size
    assert names == {file.name for file in folder.glob("rank-*")}
    again = rebuild(folder, tmp_path / "again")
    assert len(list(again.glob("model-*-of-*.safetensors"))) > 1
    assert fingerprint(again) == fingerprint(source)
    assert export(source, tmp_path / "repo", 2) == folder  # it already exists


def test_a_version_that_lacks_one_of_several_files_is_refused(tmp_path, monkeypatch, model):
    monkeypatch.setattr(shard, "FILE_BYTES", 1)
    folder = export(model, tmp_path / "repo", 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][Version.read(folder).shards(1)[1]]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert len(Version.read(folder).weights(0)) > 1
    with pytest.raises(LoadError, match=r"1 lacks .* of rank 1: export it again"):
        Version.read(folder).weights(1)


def test_a_checkpoint_in_shards_and_with_more_than_it_needs(tmp_path):
    source = new_model(tmp_path / "one", TIED)
    model = GPT.from_pretrained(source)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    shards = shutil.copytree(source, tmp_path / "shards")
    (shards / "model.safetensors").unlink()
    hf_format.write_weights(shards, tensors, max_shard_bytes=4000)
    assert len(list(shards.glob("*.safetensors"))) > 2
    one, other = export(source, tmp_path / "a", 2), export(shards, tmp_path / "b", 2)
    for name in ("rank-0-of-2.safetensors", "rank-1-of-2.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_the_header_of_a_shard_is_what_safetensors_reads(tmp_path, model):
    folder = export(model, tmp_path / "repo", 2)
    with safe_open(str(folder / "rank-0-of-2.safetensors"), framework="pt") as data:
        assert data.metadata() == {"format": "pt"}
        assert data.get_slice("model.layers.0.mlp.down_proj.weight").get_shape() == [16, 7]


def test_shards_that_were_changed_are_not_joined(tmp_path, model):
    folder = export(model, tmp_path / "repo", 2)
    file = folder / "rank-1-of-2.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(LoadError, match=r"rank-1-of-2.safetensors is not what the manifest lists"):
        rebuild(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


# ---- 2. versions


def test_versions_in_their_order(tmp_path, model):
    out = tmp_path / "repo"
    assert export(model, out, 1) == out / "gpt_engine" / "1"
    before = (out / "gpt_engine" / "1" / "manifest.json").stat()
    assert export(model, out, 1) == out / "gpt_engine" / "1"  # holds it already
    assert export(model, out, 1, version=3) == out / "gpt_engine" / "3"
    assert export(model, out, 2) == out / "gpt_engine" / "4"  # above the highest
    assert export(model, out, 2) == out / "gpt_engine" / "4"  # the newest holds it
    (out / "gpt_engine" / "4").rename(out / "gpt_engine" / "withdrawn-4")  # a rollback
    assert export(model, out, 1) == out / "gpt_engine" / "3"
    better = new_model(tmp_path / "better", seed=1)
    assert export(better, out, 1) == out / "gpt_engine" / "5"  # 4 is not used again
    for version in (1, 3):
        with pytest.raises(ExportError, match=f"version {version} .* already exists: .* as 6"):
            export(model, out, 1, version=version)
    (out / "gpt_engine" / "7").mkdir()  # as a killed export may leave it
    assert export(model, out, 2) == out / "gpt_engine" / "6"
    after = (out / "gpt_engine" / "1" / "manifest.json").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)
    assert sorted(path.name for path in (out / "gpt_engine").glob("[0-9]*")) == list("13567")


def test_a_version_with_other_code_is_another_one(tmp_path, model):
    out = tmp_path / "repo"
    first = export(model, out, 1)
    (first / "utils" / "serving" / "engine" / "engine.py").write_text("# of last year\n")
    assert export(model, out, 1).name == "2"
    (out / "gpt_engine" / "2" / repository.STEP).write_text("// of last year\n")
    assert export(model, out, 1).name == "3"


def test_what_was_edited_in_a_repository_stays(tmp_path, model, capsys):
    out = tmp_path / "repo"
    export(model, out, 1)
    (out / "gpt" / "config.pbtxt").write_text("# edited\n")
    (out / "gpt_tokenize" / "1" / "tokenizer.json").unlink()
    words = ["--model", str(model), "--out", str(out), "--version", "2"]
    assert export_module.main(words) == 0
    printed = capsys.readouterr().out
    assert f"kept, although the workshop's differs: {out / 'gpt' / 'config.pbtxt'}" in printed
    assert printed.count("kept") == 1
    assert (out / "gpt" / "config.pbtxt").read_text() == "# edited\n"
    assert (out / "gpt_tokenize" / "1" / "tokenizer.json").exists()


def test_a_version_with_another_tokenizer(tmp_path, model):
    other = new_model(tmp_path / "other", TIED)
    export(other, tmp_path / "repo", 1)
    with pytest.raises(ExportError, match=r"version 1 of .* a different tokenizer.*another --out"):
        export(model, tmp_path / "repo", 1)
    assert sorted(path.name for path in (tmp_path / "repo" / "gpt_engine").glob("[0-9]*")) == ["1"]


def test_models_of_others_stay_in_the_repository(tmp_path, model):
    theirs = tmp_path / "repo" / "resnet"
    theirs.mkdir(parents=True)
    (theirs / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    export(model, tmp_path / "repo", 1)
    assert (theirs / "config.pbtxt").read_text() == 'backend: "onnxruntime"\n'
    check_whole(tmp_path / "repo" / "gpt_engine" / "1")


# ---- 3. text and prompts


def test_a_model_on_bytes_gets_a_tokenizer_of_bytes(tmp_path, model):
    folder = export(model, tmp_path / "repo", 1)
    tokenizer = Tokenizer.load(folder)
    text = 'def naïve():\n\treturn "🙂 \x00\x7f"  # ÿ' + "".join(map(chr, range(256)))
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xF0, 0x9F]) == bytes([0xF0, 0x9F]).decode(errors="replace")
    vocabulary = byte_tokenizer().get_vocab()
    assert sorted(vocabulary.values()) == list(range(256))
    for model_name in ("gpt_tokenize", "gpt_detokenize"):
        copy = tmp_path / "repo" / model_name / "1" / "tokenizer.json"
        assert copy.read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_prompts_go_along(tmp_path, prompts):
    model, folder = prompts
    version = Version.read(export(model, tmp_path / "repo", 2, folder))
    assert version.prompts == {"kind": 3, "module-names": 5}
    assert version.manifest["prompts"]["kind"]["task"] == "the kind"
    for name, tensor in version.prompt_tensors().items():
        stored = load_file(folder / f"{name}.safetensors")["prompt_embeddings"]
        assert torch.equal(tensor, stored)
    assert export(model, tmp_path / "repo", 2, folder).name == "1"  # the same
    assert export(model, tmp_path / "repo", 2).name == "2"  # without prompts it differs


# ---- 4. the shipped code


NEEDS = ("torch", "numpy", "safetensors", "tokenizers")  # and Python's own modules


def test_what_a_version_ships_needs_four_packages():
    files = repository.shipped()
    assert "utils/serving/engine/engine.py" in files and "utils/serving/export.py" not in files
    allowed = {*NEEDS, *sys.stdlib_module_names, "utils", "triton_python_backend_utils"}
    allowed.add("triton")  # kernels of ranks on a GPU, if installed, as with torch
    for file in [
        ROOT / "triton_model_repo" / "gpt_engine" / "model.py",
        *map(ROOT.joinpath, files),
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert {name.partition(".")[0] for name in names} <= allowed, (file, names)


def test_the_files_to_ship_are_found_from_imports(tmp_path):
    texts = {
        "utils/a/__init__.py": "from utils.a.face import nobody_ships_me",
        "utils/a/start.py": "import torch.nn\nfrom .near import x\nfrom utils.b import far, file",
        "utils/a/near.py": "def later():\n    import utils.b.deep.late",
        "utils/b/far.py": "from utils.a.start import x",
        "utils/b/file.py": "from ..a import near",
        "utils/b/deep/late.py": "",
        "utils/b/other.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    expected = ["a/near", "a/start", "b/deep/late", "b/far", "b/file"]
    assert repository.shipped(tmp_path, "utils/a") == [f"utils/{name}.py" for name in expected]
    (tmp_path / "utils/b/far.py").write_text("from utils.a import name_of_the_room")
    with pytest.raises(
        ExportError, match=r"utils/b/far.py imports utils.a.name_of_the_room, which"
    ):
        repository.shipped(tmp_path, "utils/a")


ISOLATED = """
import importlib, sys
ours, names = sys.argv[1], sys.argv[2].split()
sys.path.insert(0, ours)
from utils.serving.engine.engine import Engine
assert not [name for name in sys.modules if name.startswith("torch")]
for name in names:
    module = importlib.import_module(name)
    assert module.__file__.startswith(ours), module.__file__
with Engine(ours) as engine:
    print(engine.version.model.vocab_size, len(engine.complete([7, 9]).tokens) > 0)
    for pid in engine.pids:
        words = open(f"/proc/{pid}/cmdline").read().split("\\0")
        assert ours in words, words
print(sorted({m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "utils"
              and not m.__file__.startswith(ours)}))
"""


def test_a_version_runs_without_the_workshop(tmp_path, model):
    """Its process, without torch, and its ranks run its own files, not the workshop's, which
    PYTHONPATH offers."""
    folder = export(model, tmp_path / "repo", 2)
    code = {str(file.relative_to(folder)) for file in folder.rglob("*.py")}
    shipped = set(repository.shipped())
    assert code - shipped - {"model.py"} == {name for name in code if name.endswith("__init__.py")}
    assert shipped <= code
    source = ROOT / "triton_model_repo" / "gpt_engine" / "model.py"
    assert (folder / "model.py").read_bytes() == source.read_bytes()
    assert (folder / repository.STEP).read_bytes() == (ROOT / repository.STEP).read_bytes()
    names = " ".join(name.removesuffix(".py").replace("/", ".") for name in sorted(shipped))
    done = subprocess.run(
        [sys.executable, "-c", ISOLATED, str(folder), names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "256 True\n[]\n"), done.stderr


def test_a_version_from_before_the_engine_came_along(tmp_path, model):
    """An update has removed its files that git tracked: the server says what to do, the export
    works, and its weights are still readable."""
    out = tmp_path / "repo"
    old = export(model, out, 1)
    (old / "model.py").unlink()
    shutil.rmtree(old / "utils")
    with pytest.raises(ServerError, match=r"gpt_engine/1 was exported when .*: export it again"):
        models_of(out, None, {"python"})
    assert Version.read(old).weights(0)
    assert export(model, out, 1) == out / "gpt_engine" / "2"
    assert "gpt_engine" in models_of(out, None, {"python"})[0]


def test_gpt_has_the_file_of_traces_and_gets_a_new_one(tmp_path, model):
    out = tmp_path / "repo"
    export(model, out, 1)
    there = out / "gpt" / "1" / repository.TRACE
    assert there.read_bytes() == (ROOT / repository.TRACE).read_bytes()
    there.write_text("# of an older workshop\n")
    export(model, out, 1, version=2)
    assert there.read_bytes() == (ROOT / repository.TRACE).read_bytes()


def test_every_config_of_the_repository_is_one_for_the_server():
    files = sorted((ROOT / "triton_model_repo").glob("*/config.pbtxt"))
    assert len(files) >= 4
    for file in files:
        assert parsed_config(file).name in ("", file.parent.name)


# ---- 5. the command


def test_the_command_says_what_it_wrote(tmp_path, prompts, capsys):
    model, folder = prompts
    out = tmp_path / "repo"
    arguments = ["--model", model, "--tp", 2, "--prompts", folder, "--out", out]
    assert export_module.main([str(word) for word in arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"written: {out / 'gpt_engine' / '1'}"
    for name in ("rank-1-of-2.safetensors", "config.json", "prompts/kind.safetensors"):
        size = (out / "gpt_engine" / "1" / name).stat().st_size
        assert f"{size:>15,} bytes  {name}" in lines
    count = f"{BYTES.parameter_count():,}"
    assert lines[-4] == f"base: {count} parameters as float32 on 2 ranks, 2 prompts"
    assert lines[-3] == "a rank holds 0.0 MiB of weights, 2.0 MiB of keys and values, float32"
    assert lines[-2] == "requests that run together: 16, of at most 2,048 positions"
    assert lines[-1] == f"next: python -m utils.serving.server --repo {out}"
    assert export_module.main([str(word) for word in arguments]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line == f"{out / 'gpt_engine' / '1'} holds this already: nothing was written"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ([], "--model is missing"),
        (["--model", "MODEL", "--tp", "3"], "tp 3 does not divide"),
        (["--model", "MODEL", "--tp", "0"], "tp 0 is not a number of ranks"),
        (["--model", "nowhere"], "nowhere does not exist"),
        (["--model", "MODEL", "--out", "MODEL"], "holds config.json, which is not a Triton model"),
        (["--model", "MODEL", "--version", "0"], "version 0 is invalid"),
        (["--model", "MODEL", "--prompts", "MODEL/none"], "none holds no prompts"),
        (["--model", "MODEL", "--backend", "vllm", "--prompts", "x"], "so it cannot use --prompts"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, model, capsys, arguments, sentence):
    words = [word.replace("MODEL", str(model)) for word in arguments]
    if arguments and "--out" not in words:
        words += ["--out", str(tmp_path / "repo")]
    assert export_module.main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("utils.serving.export: ") and sentence in captured.err
