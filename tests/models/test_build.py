"""The base model is made, measured and described correctly, and the shipped one is as stated."""

import json
import math
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.build import card as model_card
from models.build import measure as measuring
from models.build.__main__ import main
from models.build.train import train
from models.build.variants import TOKENS
from tests.tiers import first
from utils.compression import INT4
from utils.compression.evaluate import cost, held_out
from utils.compression.matrices import quantized, size
from utils.data import corpus
from utils.data import library as library_text
from utils.models.config import GPTConfig
from utils.models.gpt import GPT, cross_entropy
from utils.models.shipped import MODELS, SIZES, load
from utils.models.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = corpus.embedded()[:30_000]


# ---- 1. making


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a small model of this kind, trained for one step."""
    home = tmp_path_factory.mktemp("models")
    text = home / "text"
    text.write_bytes(TEXT)
    small = {
        "text": str(text), "layers": 1, "hidden": 16, "heads": 2, "seq": 32, "batch": 2,
        "compile": False, "device": "cpu",
    }
    runs = str(home / "runs")
    train("tiny", home / "out", runs, ranks=1, steps=1, **small)
    return home


def test_train_writes_a_folder_that_opens_everywhere(made):
    folder = made / "out" / "tiny"
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]
    assert GPT.from_pretrained(folder).lm_head.weight.dtype == torch.bfloat16
    model, tokenizer = load("tiny", made / "out")
    assert model.lm_head.weight.dtype == torch.float32 and not model.training
    assert model.config.max_positions == 512 and model.config.eos_token_id == tokenizer.end
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)("The statement", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == tokenizer.encode("The statement")
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_train_goes_on_where_it_was(made):
    (made / "out" / "tiny" / "README.md").write_text("stays")
    train("tiny", made / "out", str(made / "runs"), ranks=1, steps=2)
    rows = (made / "runs" / "tiny.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
    assert (made / "out" / "tiny" / "README.md").read_text() == "stays"
    with pytest.raises(ValueError, match="training ended with status 2"):  # already finished
        train("tiny", made / "out", str(made / "runs"), ranks=1, steps=2)


def test_wrong_names_are_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="model 'huge' is not one of base, small, tiny"):
        load("huge")
    with pytest.raises(ValueError, match="does not exist"):
        load("base", tmp_path)
    assert main(["card", "--folder", str(tmp_path)]) == 2
    assert "measured.json is missing" in capsys.readouterr().err


# ---- 2. measuring


@pytest.mark.parametrize(("count", "window", "stride"), [(50, 16, 5), (16, 16, 8), (9, 16, 4)])
def test_every_token_is_scored_once_and_with_its_context(count, window, stride):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, hidden_size=16, layers=1, heads=2)).double()
    tokens = torch.randint(0, 256, (count,))
    ours = measuring.held_out_bits(model, Tokenizer(), tokens, window, stride, batch=3)
    assert (ours["tokens"], ours["bytes"]) == (count, count)
    row, total = torch.cat((torch.zeros(1, dtype=torch.long), tokens)), 0.0
    window = min(window, count)
    starts = sorted({*range(0, count - window, stride), count - window})
    for position in range(count):  # scored in the first window that reaches it
        start = next(start for start in starts if position < start + window)
        logits = model(row[None, start : position + 1])[:, -1:]
        total += cross_entropy(logits, row[None, position + 1 : position + 2]).item()
    assert ours["bits_per_byte"] == pytest.approx(total / count / math.log(2), rel=1e-9)


def test_measure_and_card(made, tmp_path, monkeypatch, capsys):
    """From a run to a card, on a short text."""
    whole = TEXT.decode()
    parts = whole[:20_000] + library_text.END, whole[20_000:26_000]
    facts = {"sha256": "0" * 64, "documents": 2, "bytes": 26_007, "python": "3.11"}
    monkeypatch.setattr(library_text, "split", lambda: parts)
    monkeypatch.setattr(library_text, "fingerprint", lambda: facts)
    monkeypatch.setattr(library_text, "held_out_modules", lambda: ["one", "two"])
    monkeypatch.setitem(measuring.SAMPLE, "max_new_tokens", 4)
    monkeypatch.setattr(measuring, "variants", lambda folder: {})  # takes minutes
    monkeypatch.setattr(measuring, "measure_speed", lambda model: {})
    folder = tmp_path / "models"
    for name in SIZES:
        shutil.copytree(made / "out" / "tiny", folder / name)
    runs = tmp_path / "runs"
    shutil.copytree(made / "runs" / "tiny", runs / "base")
    shutil.copy(made / "runs" / "tiny.jsonl", runs / "base.jsonl")
    where = ["--folder", str(folder)]
    assert main(["measure", *where, "--runs", str(runs)]) == 0
    measured = json.loads((folder / "base" / "measured.json").read_text())
    base, text = measured["models"]["base"], measured["text"]
    assert base["bytes"] == text["held_out_bytes"] == len(parts[1].encode())
    assert base["training"]["steps"] == len(base["training"]["loss"])
    assert measured["models"]["tiny"]["bits_per_byte"] == base["bits_per_byte"]
    assert text["bits_per_byte"]["xz -9e after the training text"] < text["bits_per_byte"]["xz -9e"]
    assert text["ngrams"]["base"]["file_bytes"] <= base["file_bytes"]
    assert 1 < text["ngrams"]["base"]["bits_per_byte"] < 8

    assert main(["card", *where]) == 0
    card, curve = ((folder / "base" / name).read_bytes() for name in ("README.md", "loss.svg"))
    assert f"**{base['bits_per_byte']:.3f}**".encode() in card and b"`one`, `two`" in card
    model_card.write_card(folder)
    assert (folder / "base" / "README.md").read_bytes() == card
    assert (folder / "base" / "loss.svg").read_bytes() == curve

    assert main(["measure", "--only", "tiny", *where, "--runs", "no"]) == 0
    again = json.loads((folder / "base" / "measured.json").read_text())
    assert again == measured
    monkeypatch.setattr(library_text, "fingerprint", lambda: {**facts, "python": "3.12"})
    capsys.readouterr()
    assert main(["measure", "--only", "tiny", *where]) == 2
    assert "library of Python 3.11, but this is Python 3.12" in capsys.readouterr().err


# ---- 3. the shipped models


@pytest.fixture(scope="module")
def measured():
    return json.loads((MODELS / "base" / measuring.MEASURED).read_text())


@pytest.mark.parametrize("name", SIZES)
def test_shipped_models_are_as_stated(name, measured):
    facts = measured["models"][name]
    model, tokenizer = load(name)
    file = MODELS / name / "model.safetensors"
    assert file.stat().st_size == facts["file_bytes"] <= 16_000_000
    assert model.parameter_count() == facts["parameters"]
    assert tokenizer.size == model.config.vocab_size == measured["text"]["vocabulary"] == 4096
    first = MODELS / "base" / "tokenizer.json"
    assert (MODELS / name / "tokenizer.json").read_bytes() == first.read_bytes()


@pytest.mark.parametrize(("name",), first(1, [(name,) for name in reversed(SIZES)]))
def test_shipped_models_predict_as_well_as_stated(name, measured):
    text = library_text.fingerprint()
    if any(measured["text"][key] != value for key, value in text.items()):
        pytest.skip(f"measured on Python {measured['text']['python']}, this is {text['python']}")
    model, tokenizer = load(name)
    text_ids = torch.tensor(tokenizer.encode(library_text.split()[1]))
    assert len(text_ids) == measured["text"]["held_out_tokens"]
    stated = measured["models"][name]["part"]
    ours = measuring.held_out_bits(model, tokenizer, text_ids[: measuring.PART])
    assert ours == pytest.approx(stated, rel=1e-3)


@pytest.mark.thorough
def test_shipped_variants_are_as_stated(measured):
    if library_text.fingerprint()["sha256"] != measured["text"]["sha256"]:
        pytest.skip("measured on another Python's library")
    rows = {one["variant"]: one for one in measured["variants"]["tiny"]}
    model, tokenizer = load("tiny")
    assert rows["16 bits"]["bytes"] == size(model) and rows["int4"]["bytes"] == size(model, INT4)
    text = corpus.load_split("library", tokenizer)[1][:TOKENS]
    score = held_out(quantized(model, INT4), tokenizer, text)
    assert score.bits_per_byte == pytest.approx(rows["int4"]["bits_per_byte"], rel=1e-3)
    found = cost(score, held_out(model, tokenizer, text))
    assert found.mean == pytest.approx(rows["int4"]["cost"][0], abs=2e-4)


def test_the_card_is_that_of_the_figures(tmp_path):
    """README.md is what `card` makes of measured.json."""
    shipped = MODELS / "base"
    (tmp_path / "base").mkdir()
    shutil.copy(shipped / measuring.MEASURED, tmp_path / "base")
    card = model_card.write_card(tmp_path)
    assert card.read_text() == (shipped / "README.md").read_text()


def test_larger_is_better_than_smaller_and_than_what_it_is_held_to(measured):
    bits = {name: facts["bits_per_byte"] for name, facts in measured["models"].items()}
    assert bits["base"] < bits["small"] < bits["tiny"]
    assert bits["base"] < measured["text"]["ngrams"]["base"]["bits_per_byte"]
    assert bits["base"] < min(measured["text"]["bits_per_byte"].values())
