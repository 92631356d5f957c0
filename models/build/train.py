"""Pretrains the workshop's models on the standard library, and writes them to models/NAME.

It makes the tokenizer, runs `utils.train` on one rank per GPU (or up to two cores), and writes the
weights in bf16. If stopped, it resumes when it is called again: its runs are in runs/base_model.
With seconds instead of steps, the learning rate decays by the clock.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from utils.cli import flag
from utils.data import corpus
from utils.data import library as library_text
from utils.models import hf_format
from utils.models.gpt import GPT
from utils.models.shipped import MODELS, SIZES
from utils.models.tokenizer import Tokenizer

VOCABULARY = 4096
RUNS = "runs/base_model"  # the checkpoints of training
POSITIONS = 512  # tokens in a window, in training and afterwards
COMMON = {
    "steps": 900,  # of 16 windows: 2.8 epochs
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


def train(name, folder=MODELS, runs=RUNS, ranks=None, text="library", **changes):
    """Pretrains one model, or resumes it, and writes it to folder/name.

    ranks     processes; default: one per GPU, or one per core up to two
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
        options.update(out=str(out), auto_resume=True)
    _run(_command(options, ranks or _ranks()))
    export(out, Path(folder) / name)


def make_tokenizer(folder, text="library", size=VOCABULARY):
    """Trains the tokenizer on the training part of the text."""
    if corpus.is_library(text):
        documents = library_text.split()[0].split(library_text.END)
    else:
        documents = [corpus.split(corpus.load(text))[0].numpy().tobytes().decode("utf-8", "ignore")]
    tokenizer = Tokenizer.train(documents, size)
    with hf_format.replacing(folder) as beside:
        tokenizer.save(beside)


def export(run, folder):
    """Writes the model of a training run to `folder`: bf16 weights and the tokenizer only."""
    model = GPT.from_pretrained(run, dtype=torch.bfloat16)
    model.config = replace(model.config, max_positions=POSITIONS)  # longer was never trained
    folder = Path(folder)
    beside = folder / ".partial"
    beside.mkdir(parents=True, exist_ok=True)
    model.write_pretrained(beside)
    hf_format.copy_tokenizer(run, beside)
    for file in sorted(beside.iterdir()):  # the model card in `folder` stays
        file.chmod(0o644)
        file.replace(folder / file.name)
    beside.rmdir()
    _share_tokenizer(folder)


def _share_tokenizer(folder):
    """Replaces the tokenizer file by a link to base's, if that is equal."""
    own, shared = folder / hf_format.TOKENIZER, folder.parent / "base" / hf_format.TOKENIZER
    if folder.name == "base" or not shared.exists() or own.read_bytes() != shared.read_bytes():
        return
    link = folder / ".link"
    link.symlink_to(Path("..", "base", hf_format.TOKENIZER))
    link.replace(own)


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
            f"training ended with status {done.returncode}: see above; the same command resumes it"
        )
