"""Training options: each is a flag, and an invalid one is named in one sentence."""

from dataclasses import fields

import pytest
import torch

from utils.cli import flag
from utils.training.config import parse
from utils.training.train import TrainConfig, main, train

PATHS = ("out", "metrics", "resume", "tokenizer", "text")
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
        ("--vocab 200", "--vocab 200 is too small: tokens are bytes, so it must be 256 or more"),
        ("--warmup 0.7 --cooldown 0.7", "add up to more than 1"),
        ("--optimizer sgd", "argument --optimizer: invalid choice: 'sgd'"),
        ("--lr 0", "--lr 0.0 must be above 0"),
        ("--save-every 5", "--save-every needs --out FOLDER"),
        ("--auto-resume", "--auto-resume needs --out FOLDER"),
        ("--save-format sharded --engine deepspeed --optimizer adamw", "saves only whole tensors"),
        ("--layers 2147483648", "layers 2147483648 is more than any model has: at most 10,000"),
        ("--seed 9223372036854775808", "--seed 9223372036854775808"),
        ("--out /", "which is not part of a checkpoint and would be lost"),
        ("--text nowhere", "text nowhere does not exist"),
        ("--seq 30000", "the held-out part (5 %) of the text has"),
        ("--resume nowhere", "nowhere does not exist"),
        ("--metrics no/where", "--metrics no/where cannot be written: No such file"),
        ("--metrics README.md --resume {run} --steps 5", "README.md does not hold metric lines"),
        ("--out README.md", "README.md is a file: name a folder"),
        ("--out README.md/x", "README.md/x cannot be written: "),
        ("--out ~no-such-user/x", "argument --out: ~no-such-user/x: Could not"),
        *((f"--{name} {'x' * 300}", f"argument --{name}: xxx") for name in PATHS),
        (f"--out {'x' * 300} --auto-resume", "argument --out: xxx"),
        ("--hidden 2147483648", "hidden_size 2147483648 is more than any model has"),
        ("--hidden 1" + 5000 * "0", "argument --hidden: invalid int value"),
        ("--metrics README.md/x", "--metrics README.md/x cannot be written: Not a directory"),
        ("--out utils", "which is not part of a checkpoint and would be lost"),
        ("--step 5", "unrecognized arguments: --step 5"),
        ("--resume=--", "--resume=-- gives no value"),
        # invalid combinations
        ("--accumulate 0", "--accumulate 0 is too small: it takes 1 or more"),
        ("--accumulate 9 --batch 8", "some ranks have 8 of the 8 rows: raise --batch to 9 or more"),
        ("--shard 4", "argument --shard: invalid choice: '4'"),
        ("--recompute some", "argument --recompute: invalid choice: 'some'"),
        ("--offload weights", "must be none, or one or more of activations, optimizer"),
        ("--offload none,optimizer", "--offload none,optimizer must be none, or one or more of"),
        ("--offload parameters", "add --shard 3 (one rank is enough)"),
        ("--offload parameters --shard 2", "add --shard 3 (one rank is enough)"),
        ("--offload parameters --shard 3", "take --optimizer adamw or --shard 1"),
        ("--offload optimizer --shard 2", "--shard 2 with --offload optimizer never assembles"),
        ("--offload activations --compile", "does not work with --offload activations"),
        ("--engine deepspeed", "flattens the parameters, but Muon needs matrices: add --optimizer"),
        ("--engine deepspeed --optimizer adamw --precision fp64", "keeps its weights in fp32"),
        ("--engine deepspeed --optimizer adamw --compile", "--compile is for --engine torch"),
        ("--engine deepspeed --optimizer adamw --offload optimizer", "add --shard 1, 2 or 3"),
        (
            "--engine deepspeed --optimizer adamw --precision fp16 --shard 1",
            "multiplied by fp16's loss scale: take --precision bf16 or --engine torch",
        ),
        # kinds of parallelism
        ("--tp 2", "world size 1 is not dp·tp·pp = 1·2·1 = 2: start 2 ranks, or change the sizes"),
        ("--ep 2 --experts 4", "ep 2 does not divide dp 1"),
        ("--ep 2", "--ep 2 splits the experts, and there are none: give --experts 2 or more"),
        ("--experts 2 --experts-per-token 3", "experts_per_token 3 is more than the number"),
        ("--layers 3 --pp 4", "--layers 3 cannot be split into 4 stages, 1 on each of 4 ranks"),
        ("--layers 3 --pp 2 --schedule interleaved", "split into 4 stages, 2 on each of 2 ranks"),
        ("--chunks 2", "--chunks 2 are stages of a pipeline: add --pp 2"),
        ("--pp 2 --chunks 2", "--schedule 1f1b has one stage on each rank: take interleaved"),
        ("--pp 2 --schedule fifo", "argument --schedule: invalid choice: 'fifo'"),
        ("--pp 2 --schedule zero-bubble --shard 3", "take --shard 1 or --schedule 1f1b"),
        ("--accumulate 2 --micro-batches 3", "are two names for one thing: give one of them"),
        ("--sequence-parallel", "splits the positions over --tp's ranks: add --tp 2"),
        ("--tp 2 --compile", "--compile is for whole models and whole sequences"),
        (
            "--ep 2 --experts 4 --recompute selective --shard 2",
            "gathers the experts inside a block: use --recompute full or --shard 1",
        ),
        ("--engine deepspeed --optimizer adamw --tp 2", "splits only the rows: take --engine"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_named(capsys):
    assert main(["--device", "cuda"]) == 2
    assert "torch sees no GPU here; use --device cpu or auto" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_an_environment_that_is_not_torchruns_is_named(name, monkeypatch):
    monkeypatch.setenv(name, "two")
    with pytest.raises(ValueError, match=f"{name}=two is not a number: unset it or use torchrun"):
        train(TrainConfig(**TINY, steps=1))


def test_options_of_the_wrong_type_are_named():
    for changes, sentence in (
        ({"layers": 2.0}, "--layers 2.0 is not an integer"),
        ({"layers": True}, "--layers True is not an integer"),
        ({"compile": 1}, "--compile 1 is not True or False"),
        ({"optimizer": "sgd"}, "--optimizer 'sgd' is not one of muon, adamw"),
        ({"precision": "fp8"}, "--precision 'fp8' is not one of fp32, bf16, fp16, fp64"),
        ({"held_out_every": 0}, "--held-out-every 0 is too small"),
        ({"shard": 4}, "--shard '4' is not one of none, 1, 2, 3"),
        ({"offload": ""}, "--offload  must be none, or one or more of"),
    ):
        with pytest.raises(ValueError, match=sentence):
            TrainConfig(**changes)


def test_too_little_memory_is_said(capsys):
    assert main(["--device", "cpu", "--steps", "1", "--hidden", str(2**30)]) == 2  # 1 TiB
    error = capsys.readouterr().err
    assert error == "utils.train: no memory for 1099511627776 bytes: choose smaller sizes\n"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert all(f"{flag(entry.name)}" in text for entry in fields(TrainConfig))
    assert TrainConfig(shard=3) == TrainConfig(shard="3") == parse(["--shard", "3"])
    assert parse([]) == TrainConfig() and parse(["--tie", "--lr", "1e-3"]).lr == 1e-3
