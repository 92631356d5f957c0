"""The workshop's own language models: `base`, and two smaller ones to compare it with.

    model, tokenizer = load("base")               # GPT in fp32, Tokenizer; also "small", "tiny"

    python -m utils.models.base_model train        # pretrain all three on the standard library
    python -m utils.models.base_model train --only tiny --seconds 60 --folder scratch/models
    python -m utils.models.base_model measure      # held-out bits, gzip, xz, n-grams, samples
    python -m utils.models.base_model card         # models/base/README.md from what was measured

`train` makes the tokenizer, runs `utils.train` on all ranks that the machine has, and writes the
weights in bf16 to models/NAME. Stopped, it goes on where it was when it is called again: its runs
are in runs/base_model. With --seconds the learning rate cools down by the clock instead.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from utils.data import corpus
from utils.data import library as library_text
from utils.models import base_card, base_measure, hf_format
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.paths import ROOT
from utils.training.config import flag

MODELS = ROOT / "models"
VOCABULARY = 4096
POSITIONS = 512  # tokens in a window, in training and afterwards
SIZES = {  # 900 steps of 16 windows are 2.8 times through the text
    "base": {"layers": 8, "hidden": 256, "heads": 4, "steps": 900},
    "small": {"layers": 5, "hidden": 128, "heads": 2, "steps": 900},
    "tiny": {"layers": 3, "hidden": 64, "heads": 1, "steps": 900},
}
COMMON = {
    "tie": True,
    "weight_decay": 0.1,
    "batch": 16,
    "seq": POSITIONS,
    "precision": "bf16",
    "compile": True,
    "save_every": 100,
    "held_out_every": 200,
    "sample": 0,
}


def load(name="base", folder=MODELS):
    """(model, tokenizer): one of the shipped models, its weights in fp32.

    Raises CheckpointError (a ValueError) where there is no such model.
    """
    if name not in SIZES:
        raise ValueError(f"model {name!r} is not one of {', '.join(SIZES)}")
    folder = Path(folder) / name
    return GPT.from_pretrained(folder, dtype=torch.float32).eval(), Tokenizer.load(folder)


# ---- 1. training


def train(name, folder=MODELS, runs="runs/base_model", ranks=None, text="library", **changes):
    """Pretrains one model, or goes on with it, and writes it to folder/name.

    ranks     processes; default: one for every GPU, or for every core up to two
    changes   options of utils.train, such as steps, seconds, batch
    """
    runs = Path(runs)
    out = hf_format.recover(runs / name)
    options = {**SIZES[name], **COMMON, "text": text, "tokenizer": str(runs / "tokenizer")}
    if "seconds" in changes:
        options.pop("steps")
    options.update(changes, metrics=str(runs / f"{name}.jsonl"))
    if (out / hf_format.CONFIG).exists():
        ends = {key: options[key] for key in ("steps", "seconds") if key in options}
        options = {"resume": str(out), **ends}
    else:
        make_tokenizer(runs / "tokenizer", text)
        options["out"] = str(out)
    _run(_command(options, ranks or _ranks()))
    export(out, Path(folder) / name)


def make_tokenizer(folder, text="library", size=VOCABULARY):
    """Learns the tokenizer from the part of the text that is trained on."""
    if corpus.is_library(text):
        documents = library_text.split()[0].split(library_text.END)
    else:
        documents = [corpus.split(corpus.load(text))[0].numpy().tobytes().decode("utf-8", "ignore")]
    tokenizer = Tokenizer.train(documents, size)
    with hf_format.replacing(folder) as beside:
        tokenizer.save(beside)


def export(run, folder):
    """Writes the model of a training run to `folder`: bf16, with tokenizer, without the rest."""
    model = GPT.from_pretrained(run, dtype=torch.bfloat16)
    model.config = replace(model.config, max_positions=POSITIONS)  # more was never trained
    folder = Path(folder)
    beside = folder / ".partial"
    beside.mkdir(parents=True, exist_ok=True)
    model.write_pretrained(beside)
    hf_format.copy_tokenizer(run, beside)
    for file in sorted(beside.iterdir()):  # the model card beside them stays
        file.chmod(0o644)
        file.replace(folder / file.name)
    beside.rmdir()


def _command(options, ranks):
    start = [sys.executable, "-m"]
    if ranks > 1:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    flags = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(flag(name) if value else flag(f"no_{name}"))
        else:
            flags += [flag(name), str(value)]
    return [*start, "utils.train", *flags]


def _ranks():
    return torch.cuda.device_count() or min(2, os.cpu_count() or 1)


def _run(command):
    print(" ".join(["python", *command[1:]]), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # ranks share the cores
    done = subprocess.run(command, env=environment)
    if done.returncode:
        raise ValueError(
            f"training ended with status {done.returncode}: see above; the same command goes on"
        )


# ---- 2. the command


def main(arguments=None):
    """What `python -m utils.models.base_model` does; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "train":
            names = list(SIZES) if options.only is None else [options.only]
            changes = {
                key: getattr(options, key)
                for key in ("steps", "seconds")
                if getattr(options, key) is not None
            }
            for name in names:
                train(name, options.folder, options.runs, options.ranks, options.text, **changes)
        elif options.command == "measure":
            names = [*SIZES, "text"] if options.only is None else [options.only]
            base_measure.measure(names, options.folder, options.runs)
        else:
            print(f"written: {base_card.write_card(options.folder)}")
    except ValueError as error:
        print(f"utils.models.base_model: {error}", file=sys.stderr)
        return 2
    return 0


def _parser():
    parser = argparse.ArgumentParser(
        prog="python -m utils.models.base_model",
        description="Pretrain and measure the workshop's models.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="pretrain the models, or go on with it")
    training.add_argument("--steps", type=int, help="steps in all; default: those of the model")
    training.add_argument("--seconds", type=float, help="train for this long instead")
    training.add_argument("--ranks", type=int, help="processes; default: GPUs, or cores up to two")
    training.add_argument("--text", default="library", help="as utils.train takes it")
    training.add_argument("--only", choices=SIZES, help="one model; default: all")
    measuring = commands.add_parser("measure", help="write models/base/measured.json")
    measuring.add_argument("--only", choices=[*SIZES, "text"], help="one part; default: all")
    card = commands.add_parser("card", help="write models/base/README.md from it")
    for command in (training, measuring):
        command.add_argument("--runs", default="runs/base_model", help="where the checkpoints are")
    for command in (training, measuring, card):
        command.add_argument("--folder", default=MODELS, type=Path, help="where the models are")
    return parser


if __name__ == "__main__":
    sys.exit(main())
