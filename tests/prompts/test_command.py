"""`python -m utils.prompt_tuning`: what it writes, what it refuses, what Ctrl-C leaves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from utils.models.gpt import GPT, GPTConfig
from utils.models.tokenizer import Tokenizer
from utils.prompts import Example, PromptConfig, tune
from utils.prompts import command as prompt_command
from utils.prompts.command import main, split
from utils.prompts.file import load_prompt, prompt_facts

ANSWERS = {"one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny checkpoint without a tokenizer: tokens are bytes."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    torch.manual_seed(0)
    GPT(GPTConfig(hidden_size=16, layers=2, heads=2, max_positions=40)).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "data.jsonl"
    lines = [{"input": f"{word} = ", "output": digit} for word, digit in ANSWERS.items()]
    file.write_text("\n".join(map(json.dumps, lines * 2)))
    return file


def command(base, data, out, *more):
    return ["--model", str(base), "--data", str(data), "--out", str(out), *map(str, more)]


def test_a_prompt_from_the_shell_equals_one_from_python(base, data, tmp_path, capsys):
    out = tmp_path / "prompt.safetensors"
    options = (
        "--length",
        3,
        "--steps",
        4,
        "--batch",
        2,
        "--lr",
        0.1,
        "--seed",
        5,
        "--held-out",
        0.4,
    )
    assert main(command(base, data, out, *options)) == 0
    shown = capsys.readouterr()
    assert "48 values tuned on 6 examples in 4 steps: loss 5." in shown.out
    assert "right on 4 held-out examples: 0 without the prompt, 0 with it" in shown.out
    assert "step 4 of 4: loss 5." in shown.err

    model, tokenizer = GPT.from_pretrained(base), Tokenizer.load(base)
    examples = [Example(f"{word} = ", digit) for word, digit in ANSWERS.items()] * 2
    learned, _ = split(examples, 0.4, seed=5)
    config = PromptConfig(length=3, steps=4, batch=2, lr=0.1, seed=5)
    prompt, history = tune(model, tokenizer, learned, config)
    assert torch.equal(load_prompt(out, base), prompt)
    facts = prompt_facts(out)
    assert (facts["base_name"], facts["steps"], facts["lr"]) == ("tiny", "4", "0.1")
    assert float(facts["loss"]) == history[-1]["loss"]


def test_the_tokenizer_of_the_checkpoint_is_used(data, tmp_path, capsys):
    folder, out = tmp_path / "bpe", tmp_path / "prompt.safetensors"
    tokenizer = Tokenizer.train([data.read_text()] * 3, size=300)
    config = GPTConfig(
        vocab_size=tokenizer.size, hidden_size=16, layers=2, heads=4, kv_heads=2, max_positions=12
    )
    GPT(config).bfloat16().save_pretrained(folder, max_shard_bytes=9000)  # several files
    tokenizer.save(folder)
    assert main(command(folder, data, out, "--length", 5, "--steps", 2, "--words", "one two")) == 0
    assert "no tokenizer.json" not in capsys.readouterr().err
    assert load_prompt(out, folder).shape == (5, 16)
    assert prompt_facts(out)["words"] == "one two"


def test_random_first_prompt_in_bf16(base, data, tmp_path):
    out = tmp_path / "prompt.safetensors"
    options = ("--init", "random", "--precision", "bf16", "--steps", 2, "--held-out", 0)
    assert main(command(base, data, out, *options)) == 0
    assert load_prompt(out, base).dtype == torch.float32


def test_questions_are_held_out_with_all_their_answers():
    examples = [Example(f"q{n % 10}", f"a{n}") for n in range(30)]
    learned, held_out = split(examples, 0.2, seed=0)
    assert (len(learned), len(held_out)) == (24, 6)
    assert not {e.input for e in learned} & {e.input for e in held_out}
    assert split(examples, 0.2, seed=0) == (learned, held_out) != split(examples, 0.2, seed=1)
    assert split(examples, 0, seed=0) == (examples, [])
    with pytest.raises(ValueError, match="leaves nothing to learn from"):
        split(examples[::10], 0.5, seed=0)


def refused(arguments, capsys):
    """Run a command that must fail; return its one-line message."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def test_what_is_refused_before_anything_is_done(base, data, tmp_path, capsys):
    out = tmp_path / "prompt.safetensors"
    assert "--data is missing" in refused(["--model", str(base), "--out", str(out)], capsys)
    assert "--held-out 1.5 is not a fraction" in refused(
        command(base, data, out, "--held-out", 1.5), capsys
    )
    words = os.fsdecode(b"\xff")
    assert "is not UTF-8 text" in refused(command(base, data, out, "--words", words), capsys)
    assert "does not exist" in refused(command(tmp_path / "no", data, out), capsys)
    assert "no.jsonl cannot be read" in refused(command(base, tmp_path / "no.jsonl", out), capsys)
    nowhere = tmp_path / "no" / "prompt.safetensors"
    assert "is not a writable folder" in refused(command(base, data, nowhere), capsys)
    assert "exists already" in refused(command(base, data, data), capsys)
    assert "--length 40 leaves no room" in refused(command(base, data, out, "--length", 40), capsys)
    with pytest.raises(SystemExit) as stopped:
        main(command(base, data, out, "--steps", "many"))
    assert stopped.value.code == 2
    assert not out.exists()


def test_bad_lines_and_long_ones_are_named(base, data, tmp_path, capsys):
    out = tmp_path / "prompt.safetensors"
    good = data.read_text()
    data.write_text(good + '\n{"input": "x"}\n\n[1]\n')
    message = refused(command(base, data, out), capsys)
    assert 'has 2 bad lines: line 11: no "output"; line 13: a JSON list, not an object' in message
    data.write_text(good + "\n" + json.dumps({"input": "x" * 30, "output": "y"}))
    message = refused(command(base, data, out, "--length", 10), capsys)
    assert "examples of at most 30 tokens fit: line 11: 31 tokens" in message
    assert not out.exists()


def test_a_loss_that_is_no_number_ends_the_run(data, tmp_path, capsys):
    out = tmp_path / "prompt.safetensors"
    model = GPT(GPTConfig(hidden_size=16, layers=1, heads=2, max_positions=40))
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    model.save_pretrained(tmp_path / "broken")
    message = refused(command(tmp_path / "broken", data, out), capsys)
    assert "the loss is nan at step 1: the model's weights" in message
    assert not out.exists()


def test_ctrl_c_keeps_what_was_learned(base, data, tmp_path, capsys, monkeypatch):
    """A single one, in the middle of step 3 of 1000."""
    out, loss = tmp_path / "prompt.safetensors", prompt_command.Progress.__call__
    before = signal.getsignal(signal.SIGINT)  # ignored in a shell's background

    def interrupted(self, row):
        loss(self, row)
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(prompt_command.Progress, "__call__", interrupted)
    assert main(command(base, data, out, "--steps", 1000)) == 0
    assert "in 3 steps" in capsys.readouterr().out
    assert load_prompt(out, base).shape == (16, 16)
    assert prompt_facts(out)["steps"] == "3"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_leaves_nothing(base, data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "prompt.safetensors"

    def interrupted(self, row):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)  # the second one arrives here at the latest

    monkeypatch.setattr(prompt_command.Progress, "__call__", interrupted)
    assert main(command(base, data, out)) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl"]


@pytest.mark.thorough
def test_from_a_real_shell(base, data, tmp_path):
    out = tmp_path / "prompt.safetensors"
    line = [sys.executable, "-m", "utils.prompt_tuning", *command(base, data, out, "--steps", 2)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, out.exists()) == (0, True), done.stderr
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("utils.prompt_tuning: --out") and done.stderr.count("\n") == 1
