"""Any value in config.json and training.json: one sentence, no traceback."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.models.small_models import random_model, small
from tests.training.train_combinations import PLAIN
from utils.models.gpt import GPT
from utils.models.hf_format import CheckpointError
from utils.training.config import resumed
from utils.training.rank_files import RankFiles, write
from utils.training.train import train

WRONG = ["x", "", None, True, [], [1], {}, {"a": 1}, -1, 1.5, 1e308, 2**70]
WRONG += [{"rope_type": ["linear"]}, {"scale": "x"}, {"text": 1, "metrics": []}, {"step": [[{}]]}]
DEEP = '{"a": ' * 100_000
RECORD = (
    "step", "skipped", "seconds", "optimizer", "rng", "config", "scaler", "text", "row", "format"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(replace(PLAIN, steps=1, out=str(folder / "run")))
    shutil.copytree(folder / "run" / "checkpoint-1", folder / "one")
    (folder / "one" / "SHA256SUMS").unlink()
    return folder / "one"


@pytest.mark.parametrize("key", RECORD)
def test_training_json(checkpoint, key):
    file = checkpoint / "training.json"
    good = file.read_text()
    try:
        for value in WRONG:
            file.write_text(json.dumps({**json.loads(good), key: value}))
            try:  # a plausible value lets the run resume
                train(resumed(checkpoint, out=None, steps=2))
            except ValueError as error:
                assert "\n" not in str(error)
    finally:
        file.write_text(good)


@pytest.mark.parametrize("key, flag", [("metrics", "--metrics FILE"), ("text", "--text PATH")])
def test_training_json_does_not_choose_what_is_read_and_written(checkpoint, tmp_path, key, flag):
    folder, file = tmp_path / "one", tmp_path / "file"
    shutil.copytree(checkpoint, folder)
    if key == "text":
        file.write_text("secret " * 1000)
    record = json.loads((folder / "training.json").read_text())
    record["config"][key] = str(file)
    (folder / "training.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=f"{file}.*give {flag}"):
        resumed(folder)
    assert file.exists() == (key == "text")
    resumed(folder, **{key: str(file)})


def test_config_json(tmp_path):
    random_model(small()).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    good = json.loads(file.read_text())
    file.write_text(DEEP)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read as JSON: .*too deeply"):
        GPT.from_pretrained(tmp_path / "model")
    for key in [*good, "quantization_config", "rope_scaling"]:
        for value in WRONG:
            file.write_text(json.dumps({**good, key: value}))
            try:
                GPT.from_pretrained(tmp_path / "model")
            except CheckpointError as error:
                assert "\n" not in str(error)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_weights_that_are_no_fractions(tmp_path, dtype):
    random_model(small()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.norm.weight": torch.ones(24).to(dtype)}, file)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight is {kind}, not a floating"):
        GPT.from_pretrained(tmp_path)


@pytest.mark.parametrize("stem", ["model", "optimizer"])
@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_run_does_not_go_on_from_whole_numbers(tmp_path, stem, form):
    train(replace(PLAIN, steps=1, out=str(tmp_path / "run"), save_format=form))
    one = tmp_path / "run" / "checkpoint-1"
    (one / "SHA256SUMS").unlink()
    one = one.rename(tmp_path / "one")
    file = next(one.glob(f"{stem}*.safetensors"))
    with safe_open(file, "pt") as data:
        metadata = data.metadata()
    tensors = load_file(file)
    save_file({name: t.long() for name, t in tensors.items()}, file, metadata=metadata)
    with pytest.raises(CheckpointError, match=r"is int64, not a floating-point tensor"):
        train(resumed(one, out=None, steps=2))


@pytest.mark.parametrize(
    "header", ["[", "[]", '{"w": 1}', '{"v": {"saved_offsets": [0, 0]}}', DEEP]
    + [f'{{"w": {{"saved_offsets": {o}}}}}' for o in ('"x"', "{}", "[0]", "[0.5, 0]", "[-2, 0]")]
    + ['{"w": {"saved_offsets": [0, 1]}}', f'{{"w": {{"saved_offsets": [{2**70}, 0]}}}}'],
)
def test_pieces_whose_places_make_no_sense(tmp_path, header):
    metadata = {"DCP_SHARDING_INFO": header}
    save_file({"w": torch.ones(2, 3)}, tmp_path / RankFiles.name("model", 0), metadata)
    with pytest.raises(CheckpointError, match=r"does not say where|lacks a part of w"):
        RankFiles(tmp_path, "model")


def test_pieces_that_overlap_do_not_hide_a_hole(tmp_path):
    """Its values would be uninitialized memory."""
    for rank, first in enumerate((0, 0, 4)):
        pieces = {"w": (torch.ones(2, 3), (first, 0))}
        write(tmp_path / RankFiles.name("model", rank), pieces)
    with pytest.raises(CheckpointError, match=r"lacks a part of w: copy every rank's file"):
        RankFiles(tmp_path, "model")


def test_a_tied_model_does_not_drop_another_head(tmp_path):
    random_model(small(tie_embeddings=True)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    GPT.from_pretrained(tmp_path)
    save_file({**tensors, "lm_head.weight": head + 1}, file)
    with pytest.raises(CheckpointError, match=r"differs from the embedding, although config"):
        GPT.from_pretrained(tmp_path)
