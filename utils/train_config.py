"""What a training run is asked to do: one frozen dataclass, and the command line made from it."""

import argparse
import math
from dataclasses import dataclass, field, fields

from utils import checkpoint, corpus
from utils.gpt_config import GPTConfig
from utils.optimizer import LEARNING_RATES

PRECISIONS = ("fp32", "bf16", "fp64")


def option(default, help, choices=None, metavar=None):
    return field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar})


@dataclass(frozen=True)
class TrainConfig:
    """Options of `python -m utils.train`; every one is a flag of the same name. Raises ValueError
    with one sentence for values that make no sense."""

    # the model
    layers: int = option(4, "blocks of the model")
    hidden: int = option(128, "hidden size")
    heads: int = option(4, "attention heads; must divide the hidden size")
    kv_heads: int | None = option(None, "key-value heads (grouped-query attention); default: heads")
    vocab: int = option(256, "size of the vocabulary; tokens are bytes, so 256 or more")
    tie: bool = option(False, "one matrix for the embedding and the last layer")
    # the data
    text: str | None = option(
        None,
        "file or folder to learn from, or 'stdlib' for Python's own "
        "source; default: the Python language reference",
        None,
        "PATH",
    )
    batch: int = option(16, "sequences per step, over all ranks together")
    seq: int = option(128, "tokens per sequence")
    seed: int = option(0, "of the initial weights and of the order of the data")
    # how long
    steps: int | None = option(None, "stop after this many steps in all")
    seconds: float | None = option(
        None, "stop after this many seconds in all; default: 60, unless --steps is given"
    )
    # the optimizer
    optimizer: str = option(
        "muon",
        "muon: Muon on the matrices of the blocks, AdamW on the rest; adamw: AdamW on everything",
        tuple(LEARNING_RATES),
    )
    lr: float | None = option(None, "peak learning rate; default: 0.02 for muon, 0.003 for adamw")
    adamw_lr: float = option(6e-3, "peak learning rate of what muon leaves to AdamW")
    warmup: float = option(0.02, "part of the run in which the learning rate rises from 0")
    cooldown: float = option(0.5, "part of the run in which the learning rate falls to 0")
    weight_decay: float = option(0.0, "weight decay of the matrices")
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping")
    # how it is computed
    device: str = option("auto", "auto: a GPU when there is one", ("auto", "cpu", "cuda"))
    precision: str = option(
        "fp32", "bf16: matmuls in bfloat16 by autocast; fp64: to compare runs", PRECISIONS
    )
    compile: bool = option(False, "use torch.compile")
    # what it leaves behind
    out: str | None = option(
        None,
        "checkpoint folder, written at the end and on Ctrl-C; transformers opens it too",
        None,
        "FOLDER",
    )
    save_every: int | None = option(None, "write the checkpoint every so many steps too")
    resume: str | None = option(
        None,
        "continue the run in this folder, with its options; those given here go first",
        None,
        "FOLDER",
    )
    metrics: str | None = option(
        None, "write one JSON line per step to this file, or - for standard output", None, "FILE"
    )
    held_out_every: int = option(100, "steps between measurements on the held-out text")
    sample: int = option(300, "bytes of text to write at the end; 0: none")

    def __post_init__(self):
        for entry in fields(self):
            self._check_type(entry)
        self._check_counts()
        for name in ("warmup", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)} is not a part between 0 and 1")
        if self.warmup + self.cooldown > 1:
            raise ValueError(
                f"--warmup {self.warmup} and --cooldown {self.cooldown} are more than the whole run"
            )
        if self.steps is not None and self.seconds is not None:
            raise ValueError("give --steps or --seconds, not both")
        if self.vocab < corpus.VOCAB_SIZE:
            raise ValueError(
                f"--vocab {self.vocab} is too small: tokens are bytes, so it takes "
                f"{corpus.VOCAB_SIZE} or more"
            )
        if self.save_every is not None and self.out is None:
            raise ValueError("--save-every needs --out FOLDER, where the checkpoint goes")
        self.model_config()  # checks that the model's sizes fit together

    def _check_type(self, entry):
        value = getattr(self, entry.name)
        kind, optional = _kind(entry)
        if value is None and optional:
            return
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (kind is float and not math.isfinite(value)):
            words = {
                int: "a whole number",
                float: "a finite number",
                str: "text",
                bool: "True or False",
            }
            raise ValueError(f"{flag(entry.name)} {value!r} is not {words[kind]}")
        choices = entry.metadata["choices"]
        if choices and value not in choices:
            raise ValueError(f"{flag(entry.name)} {value!r} is not one of {', '.join(choices)}")

    def _check_counts(self):
        least = dict.fromkeys(
            (
                "layers",
                "hidden",
                "heads",
                "kv_heads",
                "batch",
                "seq",
                "steps",
                "save_every",
                "held_out_every",
            ),
            1,
        )
        least.update(seed=0, sample=0, weight_decay=0, clip=0)
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise ValueError(f"{flag(name)} {value} is too small: it takes {smallest} or more")
        for name in ("seconds", "lr", "adamw_lr"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{flag(name)} {value} must be above 0")

    def budget(self):
        """(steps, seconds): the one that ends the run, and None for the other."""
        if self.steps is None and self.seconds is None:
            return None, 60.0
        return self.steps, self.seconds

    def model_config(self):
        """The model's GPTConfig; it can generate up to 2048 tokens, or seq if that is more."""
        return GPTConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            tie_embeddings=self.tie,
            max_positions=max(2048, self.seq),
        )


def resumed(folder, **changes):
    """The TrainConfig to continue the run saved in `folder`, with some options changed."""
    saved = checkpoint.read_run(folder).get("config", {})
    unknown = set(saved) - {entry.name for entry in fields(TrainConfig)}
    if unknown:
        raise checkpoint.CheckpointError(
            f"{folder} was saved with the option {min(unknown)}, which this version does not have"
        )
    if "steps" in changes or "seconds" in changes:
        saved.update(steps=None, seconds=None)
    return TrainConfig(**{**saved, "out": str(folder), **changes, "resume": str(folder)})


# ---- the command line


def parse(arguments=None):
    """A TrainConfig from command-line arguments (default: those of this process)."""
    parser = _Parser(
        prog="python -m utils.train",
        allow_abbrev=False,
        description="Train a small language model, on one process or on several:",
        epilog="Examples:  python -m utils.train --seconds 60 --out run   ·   "
        "python -m utils.train --resume run --seconds 120   ·   "
        "torchrun --standalone --nproc-per-node 2 -m utils.train --steps 100",
    )
    for entry in fields(TrainConfig):
        kind, optional = _kind(entry)
        shown = "" if optional or kind is bool else f" (default: {entry.default})"
        keywords = {"help": entry.metadata["help"] + shown, "default": argparse.SUPPRESS}
        if kind is bool:
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords.update(
                type=kind,
                choices=entry.metadata["choices"],
                metavar=entry.metadata["metavar"] or _metavar(entry, kind),
            )
        parser.add_argument(flag(entry.name), **keywords)
    given = vars(parser.parse_args(arguments))
    if "resume" in given:
        return resumed(given.pop("resume"), **given)
    return TrainConfig(**given)


class _Parser(argparse.ArgumentParser):
    def error(self, message):  # one sentence, without the long list of flags
        self.exit(2, f"utils.train: {message}; see python -m utils.train --help\n")


def flag(name):
    """The command-line flag of an option: held_out_every -> --held-out-every."""
    return "--" + name.replace("_", "-")


def _kind(entry):
    """(type, may it be None?) of a field, from its annotation."""
    members = getattr(entry.type, "__args__", (entry.type,))
    return members[0], len(members) > 1


def _metavar(entry, kind):
    return None if entry.metadata["choices"] else {int: "N", float: "X", str: "TEXT"}[kind]
