"""The command `python -m utils.prompt_tuning`: tunes a prompt for a checkpoint on some examples.

    python -m utils.prompt_tuning --model models/base --data task.jsonl --out task.safetensors

Each line of the data is {"input": "...", "output": "..."}. Some of the examples are held out, and
the right answers to them are counted at the end, without and with the prompt. Ctrl-C ends the
tuning early and saves the prompt learned so far; a second Ctrl-C stops at once and writes nothing.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from tqdm import tqdm

from utils.cli import exit_status, option, parse_flags
from utils.memory.precision import weight_format
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.prompts.answers import matches
from utils.prompts.data import Example, read_examples
from utils.prompts.file import save_prompt
from utils.prompts.tuning import PromptConfig, encode_all, tune
from utils.ranks.context import asked_to_stop, world

PROGRAM = "utils.prompt_tuning"


@dataclass(frozen=True)
class Files:
    """The files that are read and written."""

    model: str | None = option(None, "checkpoint folder in Llama's layout", None, "FOLDER")
    data: str | None = option(None, "examples, one JSON object per line", None, "FILE")
    out: str | None = option(None, "safetensors file for the prompt", None, "FILE")
    held_out: float = option(0.1, "fraction of the examples to measure accuracy on, from 0 to 0.9")
    device: str = option("auto", "auto: a GPU if there is one", ("auto", "cpu", "cuda"))


@dataclass(frozen=True)
class CommandConfig(PromptConfig, Files):
    """All options of the command."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("model", "data", "out"):
            if getattr(self, name) is None:
                raise ValueError(f"--{name} is missing: give --model FOLDER --data FILE --out FILE")
        if not 0 <= self.held_out <= 0.9:
            raise ValueError(f"--held-out {self.held_out} is not a fraction from 0 to 0.9")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses, runs and reports errors; returns the exit status."""
    texts = {
        "prog": f"python -m {PROGRAM}",
        "description": "Tune a prompt: virtual tokens that teach a frozen model one task.",
        "epilog": "A line of the data: "
        '{"input": "what the model reads", "output": "what it should answer"}',
    }
    return exit_status(
        PROGRAM,
        lambda: run(CommandConfig(**parse_flags(CommandConfig, arguments, **texts))),
        (ValueError, FloatingPointError),
        "stopped, nothing was written",
    )


def run(config: CommandConfig) -> None:
    """Read and check everything first, then tune, write and measure."""
    check_out(config.out)
    examples = read_examples(config.data)
    with world(config.device) as (_, ranks, device):
        if ranks > 1:
            raise ValueError(
                f"this command runs in one process, not {ranks}: start it without torchrun"
            )
        model = GPT.from_pretrained(config.model, weight_format(config.precision), device)
        tokenizer = Tokenizer.load(config.model)
        if tokenizer.end is None and model.config.vocab_size != tokenizer.size:
            print(
                f"{PROGRAM}: {config.model} has no tokenizer.json, so tokens are bytes, although "
                f"the model has {model.config.vocab_size} tokens",
                file=sys.stderr,
            )
        encode_all(model, tokenizer, examples, config)  # held-out ones must fit too
        learned, held_out = split(examples, config.held_out, config.seed)
        with asked_to_stop() as asked, Progress(config.steps) as progress:
            prompt, history = tune(
                model, tokenizer, learned, config,
                on_step=lambda row: progress(row) or asked.is_set(),
            )
            facts = {entry.name: getattr(config, entry.name) for entry in fields(PromptConfig)}
            facts |= {"steps": len(history), "loss": history[-1]["loss"], "examples": len(learned)}
            del facts["length"]  # save_prompt adds it
            name = Path(config.model).resolve().name
            save_prompt(config.out, prompt, model, name, **facts)
        print(
            f"{prompt.numel():,} values tuned on {len(learned):,} examples in {len(history)} "
            f"steps: loss {history[0]['loss']:.3f} to {history[-1]['loss']:.3f}"
        )
        print(f"saved in {config.out}")
        if held_out:
            before = sum(matches(model, tokenizer, held_out))
            after = sum(matches(model, tokenizer, held_out, prompt))
            print(
                f"right on {len(held_out)} held-out examples: {before} without the prompt, "
                f"{after} with it"
            )


def split(examples: list[Example], part: float, seed: int) -> tuple[list[Example], list[Example]]:
    """(to learn from, held out): the latter are about `part` of the questions, with all answers."""
    if not part:
        return examples, []
    questions = list(dict.fromkeys(example.input for example in examples))
    count = max(1, round(part * len(questions)))
    if count == len(questions):
        raise ValueError(
            f"--held-out {part} leaves nothing to learn from: there is only one question, so give "
            "--held-out 0"
        )
    order = torch.randperm(len(questions), generator=torch.Generator().manual_seed(seed))
    kept_back = {questions[number] for number in order[:count]}
    learned = [example for example in examples if example.input not in kept_back]
    return learned, [example for example in examples if example.input in kept_back]


def check_out(file: Path | str) -> None:
    """Refuse before the run, not after it, a file that cannot be written."""
    path = Path(file).expanduser()
    folder = path.absolute().parent
    if path.exists():
        raise ValueError(f"--out {file} exists already: choose another file, or remove it first")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"--out {file} cannot be written: {folder} is not a writable folder")


class Progress:
    """Progress on stderr: a bar in a terminal, about ten lines elsewhere."""

    def __init__(self, steps: int):
        self.steps, self.lines = steps, not sys.stderr.isatty()
        self.bar = tqdm(total=steps, unit="step", disable=self.lines)

    def __call__(self, row: dict) -> None:
        self.bar.set_postfix_str(f"loss {row['loss']:.3f}", refresh=False)
        self.bar.update()
        if self.lines and (row["step"] * 10 // self.steps > (row["step"] - 1) * 10 // self.steps):
            print(f"step {row['step']} of {self.steps}: loss {row['loss']:.3f}", file=sys.stderr)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.bar.close()
