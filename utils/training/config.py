"""The options of a training run: a frozen dataclass, and the command line made from it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from utils.choices import OFFLOADS, RECOMPUTE
from utils.cli import check_options, option, parse_flags
from utils.data import corpus
from utils.memory.precision import PRECISIONS
from utils.models import tokenizer
from utils.models.config import GPTConfig
from utils.parallel import schedules
from utils.parallel.context import WAYS
from utils.training import checkpoint
from utils.training.optimizer import LEARNING_RATES
from utils.training.run_folder import holds_checkpoint, newest, run_of


@dataclass(frozen=True)
class TrainConfig:
    """The options of `python -m utils.train`, each with a flag of the same name. Raises ValueError
    with one sentence for invalid values."""

    # the model
    layers: int = option(4, "blocks of the model", least=1)
    hidden: int = option(128, "hidden size", least=1)
    heads: int = option(4, "attention heads; must divide the hidden size", least=1)
    kv_heads: int | None = option(
        None, "key-value heads (grouped-query attention); default: heads", least=1
    )
    vocab: int = option(
        256, "size of the vocabulary; at least the number of tokens: 256, or the tokenizer's"
    )
    tie: bool = option(False, "one matrix for the embedding and the last layer")
    experts: int | None = option(
        None,
        "experts in every block, of which each token uses a few; default: one MLP per block",
        least=1,
    )
    experts_per_token: int = option(2, "experts that compute each token", least=1)
    balance: float = option(
        0.01,
        "weight of the loss that balances the router's use of the experts; it is not reported",
        least=0,
    )
    # the data
    text: str | None = option(
        None,
        "file or folder to learn from, or 'library' for Python's standard library; default: the "
        "Python language reference",
        None,
        "PATH",
    )
    tokenizer: str | None = option(
        None,
        "folder with a Hugging Face tokenizer.json; default: tokens are bytes",
        None,
        "FOLDER",
    )
    batch: int = option(16, "sequences per step, over all ranks together", least=1, most=2**24)
    seq: int = option(128, "tokens per sequence", least=1)
    seed: int = option(
        0, "seed of the initial weights and of the order of the data", least=0, most=2**63 - 1
    )
    # how long
    steps: int | None = option(None, "stop after this many steps in total", least=1)
    seconds: float | None = option(
        None, "stop after this many seconds in total; default: 60, unless --steps is given", above=0
    )
    # the optimizer
    optimizer: str = option(
        "muon",
        "muon: Muon on the matrices of the blocks, AdamW on the rest; adamw: AdamW on everything; "
        "adamw-triton: the same in one kernel of the course, on a GPU",
        tuple(LEARNING_RATES),
    )
    lr: float | None = option(
        None, "peak learning rate; default: 0.02 for muon, 0.003 for AdamW", above=0, most=1e38
    )
    adamw_lr: float = option(6e-3, "peak learning rate of AdamW's parameters under muon", above=0)
    warmup: float = option(0.02, "fraction of the run in which the learning rate rises from 0")
    cooldown: float = option(0.5, "fraction of the run in which the learning rate falls to 0")
    weight_decay: float = option(0.0, "weight decay of the matrices", least=0)
    clip: float = option(1.0, "largest norm of the gradient; 0: no clipping", least=0)
    # how it is computed
    device: str = option("auto", "auto: a GPU if there is one", ("auto", "cpu", "cuda"))
    precision: str = option(
        "fp32",
        "bf16: passes in 16 bits, with a copy of the fp32 weights; fp16: matmuls in 16 bits, with "
        "a scaled loss; fp64: to compare runs",
        PRECISIONS,
    )
    compile: bool = option(False, "use torch.compile")
    # how it fits into memory
    accumulate: int = option(
        1,
        "micro-batches into which every rank splits its rows of a step",
        least=1,
    )
    recompute: str = option(
        "none",
        "activations that the backward pass recomputes; full: all inside a block; selective: all "
        "except the outputs of matmuls and attention",
        RECOMPUTE,
    )
    offload: str = option(
        "none",
        "what leaves the device between its uses: activations, optimizer, parameters (with "
        "--shard 3), or several with commas; it goes to host memory, or to files if the CPU is "
        "the device (parameters then stay)",
        None,
        "WHAT",
    )
    shard: str = option(
        "none",
        "shard over the data-parallel ranks; 1: the optimizer's state; 2: also gradients; 3: also "
        "parameters (ZeRO 1, 2, 3)",
        ("none", "1", "2", "3"),
    )
    engine: str = option("torch", "library that computes a step", ("torch", "deepspeed"))
    # how the model is split over ranks
    dp: int | None = option(
        None,
        "data-parallel ranks, which split the rows; default: all that --pp, --cp and --tp leave",
        least=1,
    )
    pp: int = option(1, "pipeline-parallel ranks, which split the layers", least=1)
    cp: int = option(
        1, "context-parallel ranks, which split the positions of every sequence", least=1
    )
    context: str = option(
        "ring",
        "how attention sees the positions of --cp's other ranks; ring: keys and values travel from "
        "rank to rank; ulysses: an all-to-all trades positions for heads; gather: all keys and "
        "values on every rank",
        tuple(WAYS),
    )
    tp: int = option(1, "tensor-parallel ranks, which split every matrix", least=1, most=2**20)
    ep: int = option(1, "expert-parallel ranks, which split the experts; must divide --dp", least=1)
    sequence_parallel: bool = option(
        False, "the ranks of --tp also split the positions, wherever they do not split a matrix"
    )
    schedule: str = option("1f1b", "order of the pipeline's work", schedules.NAMES)
    chunks: int | None = option(
        None,
        "stages of the model on each rank of the pipeline; default: 2 with --schedule interleaved, "
        "else 1",
        least=1,
    )
    micro_batches: int | None = option(
        None,
        "micro-batches that pass through the pipeline in a step; the same as --accumulate",
        least=1,
    )
    time_limit: float = option(
        600.0, "seconds that a rank started by torchrun waits for the others", above=0
    )
    # what it leaves behind
    out: str | None = option(
        None,
        "folder for checkpoints, written at the end and on Ctrl-C; transformers can open it",
        None,
        "FOLDER",
    )
    save_every: int | None = option(None, "also write a checkpoint every N steps", least=1)
    keep: int = option(2, "number of checkpoints kept in --out, the newest ones", least=1)
    save_format: str = option(
        "whole",
        "whole: one file of whole tensors, gathered on rank 0; sharded: each rank writes a file "
        "with its shards, and nothing is sent",
        ("whole", "sharded"),
    )
    save_async: bool = option(False, "copy the state, and write it while training continues")
    resume: str | None = option(
        None,
        "continue the run in this folder, with its options; those given here take precedence",
        None,
        "FOLDER",
    )
    auto_resume: bool = option(
        False,
        "continue from the newest checkpoint in --out, or begin if there is none: the same command "
        "starts a run and resumes it after a fault",
    )
    metrics: str | None = option(
        None, "write one JSON line per step to this file, or - for standard output", None, "FILE"
    )
    held_out_every: int = option(100, "steps between measurements on the held-out text", least=1)
    sample: int = option(300, "tokens of text to write at the end; 0: none", least=0)

    def __post_init__(self):
        if type(self.shard) is int:  # in a notebook shard=3 is natural
            object.__setattr__(self, "shard", str(self.shard))
        check_options(self)
        for name in ("warmup", "cooldown"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name} {getattr(self, name)} is not between 0 and 1")
        if self.warmup + self.cooldown > 1:
            raise ValueError(
                f"--warmup {self.warmup} and --cooldown {self.cooldown} add up to more than 1"
            )
        if self.steps is not None and self.seconds is not None:
            raise ValueError("give --steps or --seconds, not both")
        if self.vocab < corpus.VOCAB_SIZE:
            raise ValueError(
                f"--vocab {self.vocab} is too small: tokens are bytes, so it must be "
                f"{corpus.VOCAB_SIZE} or more"
            )
        for name in ("save_every", "save_async", "auto_resume"):
            if getattr(self, name) and self.out is None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs --out FOLDER, where the checkpoint goes")
        _check_together(self)
        self.model_config()  # checks that the model's sizes fit together

    def offloads(self) -> tuple[str, ...]:
        """The names of what is offloaded, as a tuple."""
        return tuple(name for name in self.offload.split(",") if name != "none")

    def zero_stage(self) -> int:
        """The ZeRO stage, from 0 (nothing is sharded) to 3."""
        return 0 if self.shard == "none" else int(self.shard)

    def accumulation_steps(self) -> int:
        """The number of micro-batches into which every rank splits its rows of a step."""
        return self.micro_batches or self.accumulate

    def splits_model(self) -> bool:
        """Whether a rank computes with only a part of the model."""
        return self.pp * self.tp * self.ep > 1

    def mesh_sizes(self, world_size: int) -> dict[str, int]:
        """{"dp", "pp", "cp", "tp", "ep"}: the number of ranks in each direction of the mesh."""
        rest = max(1, world_size // (self.pp * self.cp * self.tp))
        sizes = {name: getattr(self, name) for name in ("pp", "cp", "tp", "ep")}
        return {"dp": self.dp or rest, **sizes}

    def stages_per_rank(self) -> int:
        """The number of pipeline stages on each rank."""
        return self.chunks or (2 if self.schedule == "interleaved" and self.pp > 1 else 1)

    def needs_group(self) -> bool:
        """Whether even a single rank needs a process group."""
        return self.zero_stage() > 0 or self.engine == "deepspeed"

    def peak_lr(self) -> float:
        """The peak learning rate, or that of Muon's matrices."""
        return LEARNING_RATES[self.optimizer] if self.lr is None else self.lr

    def budget(self) -> tuple[int | None, float | None]:
        """(steps, seconds): the limit that ends the run, and None for the other."""
        if self.steps is None and self.seconds is None:
            return None, 60.0
        return self.steps, self.seconds

    def model_config(self) -> GPTConfig:
        """The model's GPTConfig; it can generate up to 2048 tokens, or seq if that is more."""
        tokens, end = tokenizer.facts(self.tokenizer) if self.tokenizer else (256, None)
        return GPTConfig(
            vocab_size=max(self.vocab, tokens),
            hidden_size=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            tie_embeddings=self.tie,
            experts=self.experts,
            experts_per_token=self.experts_per_token,
            max_positions=max(2048, self.seq),
            eos_token_id=end,
        )


# ---- excluded combinations, each with its reason and a way out; all others are allowed


def _check_together(config):
    """Check the combinations that do not depend on where the run takes place."""
    offloads = config.offloads()
    unknown = [name for name in offloads if name not in OFFLOADS]
    if unknown or ("none" in config.offload.split(",") and offloads):
        raise ValueError(
            f"--offload {config.offload} must be none, or one or more of {', '.join(OFFLOADS)}, "
            "separated by commas"
        )
    if "parameters" in offloads and config.shard != "3":
        raise ValueError(
            "--offload parameters fetches the weights block by block, as --shard 3 does: add "
            "--shard 3 (one rank is enough)"
        )
    if config.compile and "activations" in offloads:
        raise ValueError(
            "--compile itself decides what is kept for the backward pass, so it does not work with "
            "--offload activations: leave one of them out"
        )
    splits_matrices = config.engine == "torch" and config.zero_stage() >= 2
    if config.optimizer == "muon" and splits_matrices and {"optimizer", "parameters"} & {*offloads}:
        raise ValueError(
            f"--optimizer muon needs whole matrices, which --shard {config.shard} with --offload "
            f"{config.offload} never assembles: take --optimizer adamw or --shard 1"
        )
    if config.optimizer == "adamw-triton":
        _check_kernel(config, offloads)
    if config.engine == "deepspeed":
        _check_deepspeed(config, offloads)
    _check_split(config)


def _check_kernel(config, offloads):
    if config.engine == "deepspeed":
        raise ValueError(
            "--engine deepspeed flattens and updates the parameters itself: take --optimizer adamw"
        )
    if config.precision == "fp64":
        raise ValueError(
            "--optimizer adamw-triton computes in fp32: take --optimizer adamw with --precision "
            "fp64"
        )
    if {"optimizer", "parameters"} & {*offloads}:
        raise ValueError(
            f"--offload {config.offload} updates the weights outside the GPU, where --optimizer "
            "adamw-triton cannot run: take --optimizer adamw"
        )


def _check_deepspeed(config, offloads):
    if config.save_format == "sharded":
        raise ValueError(
            "--engine deepspeed saves only whole tensors: take --save-format whole or --engine "
            "torch"
        )
    if config.splits_model() or config.cp > 1:
        raise ValueError(
            "--engine deepspeed splits only the rows: take --engine torch with --pp, --cp, --tp or "
            "--ep"
        )
    if config.optimizer == "muon":
        raise ValueError(
            "--engine deepspeed flattens the parameters, but Muon needs matrices: add --optimizer "
            "adamw"
        )
    if config.precision == "fp64":
        raise ValueError(
            "--engine deepspeed keeps its weights in fp32: take --precision fp32 or bf16"
        )
    if config.precision == "fp16":
        # seen with 0.19.8 and torch_autocast: a norm of 78861 at scale 65536 instead of 1.203
        raise ValueError(
            "--engine deepspeed clips gradients while they are still multiplied by fp16's loss "
            "scale: take --precision bf16 or --engine torch"
        )
    if config.compile:
        raise ValueError("--compile is for --engine torch: leave one of them out")
    if "optimizer" in offloads and config.shard == "none":
        raise ValueError(
            "--engine deepspeed offloads only the optimizer of ZeRO: add --shard 1, 2 or 3"
        )


def _check_split(config):
    """Check how the model is split."""
    if config.micro_batches not in (None, config.accumulate) and config.accumulate > 1:
        raise ValueError(
            f"--accumulate {config.accumulate} and --micro-batches {config.micro_batches} are two "
            "names for one thing: give one of them"
        )
    if config.compile and (config.splits_model() or config.cp > 1):
        raise ValueError(
            "--compile is for whole models and whole sequences: leave it out with --pp, --cp, --tp "
            "or --ep"
        )
    if config.cp > config.seq:
        raise ValueError(
            f"--cp {config.cp} splits the positions of a sequence, but --seq {config.seq} is "
            f"fewer: take --cp {config.seq} or less, or longer sequences"
        )
    heads = max(1, config.heads // config.tp)  # on the rank with the fewest
    if config.context == "ulysses" and heads < config.cp:
        raise ValueError(
            f"--context ulysses splits the attention heads of a rank, but --cp {config.cp} is "
            f"more than {heads}: take --context ring or gather"
        )
    if config.sequence_parallel and config.tp == 1:
        raise ValueError("--sequence-parallel splits the positions over --tp's ranks: add --tp 2")
    if config.ep > (config.experts or 1):
        raise ValueError(
            f"--ep {config.ep} splits the experts, and there are {config.experts or 'none'}: give "
            f"--experts {config.ep} or more"
        )
    if config.chunks and config.chunks > 1:
        if config.pp == 1:
            raise ValueError(f"--chunks {config.chunks} are stages of a pipeline: add --pp 2")
        if config.schedule not in ("interleaved", "gpipe"):
            raise ValueError(
                f"--schedule {config.schedule} has one stage on each rank: take interleaved with "
                f"--chunks {config.chunks}"
            )
    chunks = config.stages_per_rank()
    if config.layers < config.pp * chunks:
        raise ValueError(
            f"--layers {config.layers} cannot be split into {config.pp * chunks} stages, "
            f"{chunks} on each of {config.pp} ranks: give more layers, or smaller --pp "
            "or --chunks"
        )
    if config.ep > 1 and config.recompute == "selective" and config.zero_stage() >= 2:
        raise ValueError(
            f"--recompute selective does not work with --ep and --shard {config.shard}, which "
            "gathers the experts inside a block: use --recompute full or --shard 1"
        )
    if config.pp > 1 and config.schedule == "zero-bubble" and config.zero_stage() >= 2:
        raise ValueError(
            f"--schedule zero-bubble computes the weights' gradients after --shard {config.shard} "
            "has already sent them: take --shard 1 or --schedule 1f1b"
        )


def check_ranks(config: TrainConfig, world_size: int) -> None:
    """Check what depends on the number of ranks."""
    ranks = config.mesh_sizes(world_size)["dp"]
    corpus.share_of_batch(config.batch, 0, ranks)
    least = config.batch // ranks  # rows of the rank with the fewest
    steps = config.accumulation_steps()
    if least < steps:
        asked = "--micro-batches" if config.micro_batches else "--accumulate"
        raise ValueError(
            f"{asked} {steps} leaves micro-batches empty, because some "
            f"ranks have {least} of the {config.batch} rows: raise --batch to "
            f"{steps * ranks} or more"
        )


# ---- where a configuration comes from


def resumed(folder: str, **changes: Any) -> TrainConfig:
    """The TrainConfig to continue the run saved in `folder`, with some options changed.

    folder   of a run, whose newest undamaged checkpoint is used, or of one checkpoint
    """
    taken = newest(folder)
    run_folder = run_of(taken)
    run = checkpoint.read_run(taken)
    saved = run.get("config", {})
    unknown = set(saved) - {entry.name for entry in fields(TrainConfig)}
    if unknown:
        raise checkpoint.CheckpointError(
            f"{folder} was saved with the option {min(unknown)}, which this version does not have"
        )
    _check_files(folder, {**saved, **dict.fromkeys(changes)}, run.get("text"))
    if saved.get("tokenizer") is not None:
        saved["tokenizer"] = str(run_folder)  # the checkpoint carries it
        given = changes.get("tokenizer")
        if given is not None and not tokenizer.same(given, folder):
            raise ValueError(
                f"--tokenizer {given} is not the tokenizer of the run in {folder}: leave it out"
            )
    elif changes.get("tokenizer") is not None:
        raise ValueError(f"the run in {folder} is on bytes: leave out --tokenizer")
    if "steps" in changes or "seconds" in changes:
        saved.update(steps=None, seconds=None)
    return TrainConfig(**{**saved, "out": str(run_folder), **changes, "resume": str(taken)})


def _check_files(folder, saved, text):
    """Check the files named by a checkpoint, which may come from anyone: they are used only if they
    are that run's own; otherwise they must be given again."""
    metrics, path = saved.get("metrics"), saved.get("text")
    if metrics not in (None, "-") and not Path(metrics).expanduser().is_file():
        raise checkpoint.CheckpointError(
            f"the metrics of the run in {folder}, {metrics}, are missing: give --metrics FILE"
        )
    if path and not corpus.is_library(path) and corpus.fingerprint(path) != text:
        raise checkpoint.CheckpointError(
            f"{path} is not the text of the run in {folder}: give --text PATH to continue it"
        )


def parse(arguments: Sequence[str] | None = None) -> TrainConfig:
    """A TrainConfig from command-line arguments (default: those of this process)."""
    given = parse_flags(
        TrainConfig,
        arguments,
        prog="python -m utils.train",
        description="Train a small language model, in one process or in several:",
        epilog="Examples:  python -m utils.train --seconds 60 --out run   ·   "
        "python -m utils.train --resume run --seconds 120   ·   "
        "torchrun --standalone --nproc-per-node 2 -m utils.train --steps 100   ·   "
        "torchrun --standalone --nproc-per-node 8 -m utils.train --dp 2 --pp 2 --tp 2",
    )
    if given.get("auto_resume") and "out" in given and holds_checkpoint(given["out"]):
        given.setdefault("resume", given["out"])
    if "resume" in given:
        return resumed(given.pop("resume"), **given)
    return TrainConfig(**given)
