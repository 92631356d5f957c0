"""The options of a training run: each is a flag, and a wrong one is named in one sentence."""

from dataclasses import fields

import pytest
import torch

from utils.train import TrainConfig, main, train
from utils.train_config import flag, parse

TINY = {"layers": 1, "hidden": 8, "heads": 2, "batch": 2, "seq": 8, "device": "cpu", "sample": 0}


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--steps 5 --seconds 5", "give --steps or --seconds, not both"),
        ("--steps 0", "--steps 0 is too small: it takes 1 or more"),
        ("--seconds nan", "--seconds nan is not a finite number"),
        ("--seconds -1", "--seconds -1.0 must be above 0"),
        ("--layers two", "argument --layers: invalid int value: 'two'"),
        ("--hidden 30", "heads 4 does not divide hidden_size 30"),
        ("--kv-heads 3", "kv_heads 3 does not divide heads 4"),
        ("--vocab 200", "--vocab 200 is too small: tokens are bytes, so it takes 256 or more"),
        ("--warmup 0.7 --cooldown 0.7", "are more than the whole run"),
        ("--optimizer sgd", "argument --optimizer: invalid choice: 'sgd'"),
        ("--lr 0", "--lr 0.0 must be above 0"),
        ("--save-every 5", "--save-every needs --out FOLDER"),
        ("--text nowhere", "text nowhere does not exist"),
        ("--seq 30000", "the held-out part (5 %) of the text has"),
        ("--resume nowhere", "nowhere does not exist"),
        ("--metrics no/where", "--metrics no/where cannot be written: No such file"),
        ("--metrics README.md --resume {run} --steps 5", "README.md does not hold metric lines"),
        ("--out README.md", "README.md is a file: name a folder"),
        ("--out utils", "which is not part of a checkpoint and would be lost"),
        ("--step 5", "unrecognized arguments: --step 5"),
    ],
)
def test_wrong_options_are_named(arguments, sentence, capsys, tmp_path):
    arguments = arguments.replace("{run}", str(tmp_path / "run"))
    if "--resume" in arguments and "nowhere" not in arguments:
        train(TrainConfig(**TINY, out=str(tmp_path / "run"), steps=1))
    try:
        status = main(arguments.split())
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err.strip()
    assert status == 2 and sentence in error and error.count("\n") == 0
    assert error.startswith("utils.train: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_missing_gpu_is_named(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "torch sees no GPU here; use --device cpu or auto" in capsys.readouterr().err


def test_options_of_the_wrong_type_are_named():
    for changes, sentence in (
        ({"layers": 2.0}, "--layers 2.0 is not a whole number"),
        ({"layers": True}, "--layers True is not a whole number"),
        ({"compile": 1}, "--compile 1 is not True or False"),
        ({"optimizer": "sgd"}, "--optimizer 'sgd' is not one of muon, adamw"),
        ({"precision": "fp8"}, "--precision 'fp8' is not one of fp32, bf16, fp64"),
        ({"held_out_every": 0}, "--held-out-every 0 is too small"),
    ):
        with pytest.raises(ValueError, match=sentence):
            TrainConfig(**changes)


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert all(f"{flag(entry.name)}" in text for entry in fields(TrainConfig))
    assert parse([]) == TrainConfig() and parse(["--tie", "--lr", "1e-3"]).lr == 1e-3
