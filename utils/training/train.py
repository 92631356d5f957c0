"""The training loop, in one process or in several that split every batch.

    python -m utils.train                                           60 s, then a sample of text
    python -m utils.train --steps 300 --out run --metrics run.jsonl
    python -m utils.train --resume run --steps 600
    torchrun --standalone --nproc-per-node 2 -m utils.train --steps 300
    torchrun --standalone --nproc-per-node 2 -m utils.train --shard 3 --recompute full
    torchrun --standalone --nproc-per-node 8 -m utils.train --dp 2 --pp 2 --tp 2 --micro-batches 4
    python -m utils.train --help

N ranks compute what one rank computes, whatever is split, sharded, recomputed, offloaded or
accumulated: the global batch is the same, and every micro-batch is weighted by its tokens, so a
batch that does not divide evenly changes nothing. From a notebook:

    model, history = train(TrainConfig(steps=100))
"""

import gc
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from tqdm import tqdm

from utils.cli import exit_status
from utils.data import corpus
from utils.memory.precision import autocast, weight_format
from utils.models import hf_format
from utils.models.gpt import GPT
from utils.models.hf_format import CheckpointError
from utils.models.tokenizer import Tokenizer
from utils.parallel.context import own_positions
from utils.parallel.mesh import Mesh, make_mesh
from utils.parallel.parallelize import draw_weights
from utils.ranks.context import MetricsLost, asked_to_stop, freed_memory_kept, metric_lines, world
from utils.ranks.heartbeat import RanksLost
from utils.ranks.supervise import end_with
from utils.shares import share
from utils.training import checkpoint, run_folder
from utils.training.config import TrainConfig, check_ranks, parse
from utils.training.deepspeed import DeepSpeedEngine
from utils.training.optimizer import update_rule
from utils.training.run_folder import RunFolder
from utils.training.step import TrainStep, make_engine

# ---- 1. small parts


def schedule(progress: float, warmup: float = 0.02, cooldown: float = 0.5) -> float:
    """The learning rate as a fraction of its peak, for progress 0..1 through the run: a trapezoid.

    Progress may be steps or seconds, so a run with a time budget also cools down.
    """
    rising = (progress + 1e-3) / warmup if warmup else 1.0  # so that the first step is not lost
    falling = (1 - progress) / cooldown if cooldown else 1.0
    return max(0.0, min(1.0, rising, falling))


def micro_batches(
    x: torch.Tensor, y: torch.Tensor, count: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[(x, y), …]: a rank's rows in `count` micro-batches, whose sizes differ by at most one."""
    shares = [share(len(x), number, count) for number in range(count)]
    return [(x[first:stop], y[first:stop]) for first, stop in shares]


@torch.no_grad()
def evaluate(
    engine: DeepSpeedEngine | TrainStep,
    tokens: torch.Tensor,
    seq: int,
    mesh: Mesh,
    byte_lengths: torch.Tensor | None = None,
) -> tuple[float, float]:
    """The mean loss over the held-out tokens: (nats per token, bits per byte).

    The ranks of dp split the rows, and those of cp the positions. byte_lengths: bytes of each token
    (V,); None: tokens are bytes.
    """
    # sum of losses, tokens; also bytes, if tokens are not bytes
    count = 2 if byte_lengths is None else 3
    total = torch.zeros(count, dtype=torch.float64, device=engine.device)
    mine = corpus.held_out_batches(tokens, seq, rank=mesh.dp.index, world_size=mesh.dp.size)
    most = corpus.held_out_batches(tokens, seq, rank=0, world_size=mesh.dp.size)
    for own, first in zip_longest(mine, most):
        # a rank without rows left runs rank 0's and does not count them: if parameters are
        # sharded, every forward pass needs all ranks
        x, y = (part.to(engine.device) for part in own or first)
        loss_sum = engine.loss_sum(x, y)
        if own and engine.counts:
            y = own_positions(y, mesh.cp)
            total[0] += loss_sum
            total[1] += y.numel()
            if byte_lengths is not None:
                total[2] += byte_lengths[y.cpu()].sum()
    engine.after_evaluation()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item(), (total[0] / total[-1]).item() / math.log(2)


# ---- 2. the start of a run


def _texts(config):
    """(tokens to train on, held-out tokens, tokenizer, fingerprint of the text)."""
    tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else Tokenizer()
    train_tokens, held_out = corpus.load_split(config.text, tokenizer)
    corpus.check_length(train_tokens, config.seq, "the part of the text to train on")
    corpus.check_length(held_out, config.seq, "the held-out part (5 %) of the text")
    return train_tokens, held_out, tokenizer, corpus.fingerprint(config.text)


def _warn_of_another_text(text, before):
    """Warn that the run continues with a different text, which is most likely a mistake."""
    print("utils.train: this is not the text with which the run began", file=sys.stderr)
    pythons = [each.get("python") for each in (before or {}, text)]
    if all(pythons) and pythons[0] != pythons[1]:
        print(
            f"utils.train: it was the library of Python {pythons[0]}, and this is {pythons[1]}",
            file=sys.stderr,
        )


class RunIsOver(ValueError):
    """The run to be continued has nothing left to do."""


class RunStopped(RuntimeError):
    """The run was asked to stop before its end, and should be started again."""


def start(
    config: TrainConfig, device: torch.device, mesh: Mesh
) -> tuple[DeepSpeedEngine | TrainStep, dict]:
    """(engine, run): a new model and optimizer, or those of the resumed checkpoint."""
    torch.manual_seed(config.seed)
    weights = None
    if config.splits_model():  # it may be too large for one rank: use the meta device
        model = GPT.without_memory(config.model_config())
        weights = partial(draw_weights, config.model_config())
        if config.resume:
            weights = partial(checkpoint.hand_out, config.resume)
    else:
        model = GPT(config.model_config())
    model.to(weight_format(config.precision))
    run = {"step": 0, "seconds": 0.0, "skipped": 0, "text": None, "row": None}
    if config.resume:
        run.update(checkpoint.load_weights(config.resume, model, update_rule(config.optimizer)))
        _check_same_step(run["step"], device)
    engine = make_engine(model, config, device, mesh, weights)
    if config.resume:
        engine.load(config.resume, run)
    return engine, run


def _check_not_over(config, folder):
    """Raise RunIsOver for a run at its end, after completing what its last save may have left
    unfinished if the run was killed there."""
    run = checkpoint.read_run(config.resume)
    steps, seconds = config.budget()
    if run["step"] < (steps or math.inf) and run.get("seconds", 0.0) < (seconds or math.inf):
        return
    if [config.resume] == [str(path) for path in folder.found[:1]]:
        metrics = config.metrics if folder.rank == 0 else None
        with folder.opened(run["step"]), metric_lines(metrics, run.get("row"), run["step"]):
            pass
    raise RunIsOver(
        f"{config.resume} is at step {run['step']} after {run.get('seconds', 0.0):.1f} s, the end "
        "of its run: give a larger --steps or --seconds"
    )


def _check_same_step(step, device):
    """Check that all ranks, which each look for the newest undamaged checkpoint, found the same."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        ends = torch.tensor([step, -step], device=device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise CheckpointError(
                f"ranks see checkpoints of step {-ends[1]} and of step {ends[0]}: --resume must "
                "name a folder that is the same for all of them"
            )


def _check_out(config):
    """Raise before the run, not after it, if a checkpoint could not be written."""
    if config.out is None:
        return
    out = hf_format.recover(config.out)
    run_folder.check_own(out)
    if config.resume and run_folder.run_of(hf_format.recover(config.resume)) == out:
        return
    run_folder.check_new(out, config.metrics)
    if run_folder.holds_checkpoint(out):
        raise ValueError(
            f"{config.out} already holds a checkpoint: continue it with --resume "
            f"{config.out}, or choose another --out"
        )


def _check_finite(name, nats, when, folder):
    """Check a loss. A step's own loss belongs to the weights before it, which may be saved."""
    if not math.isfinite(nats):
        found = run_folder.checkpoints(folder.folder) if folder.folder else []
        way = "lower --lr"
        if len(found) > 1:
            way += f"; if {found[0].name} is already ruined, go back: --resume {found[1]}"
        raise FloatingPointError(f"the {name} is {nats} {when}: {way}")


def _progress_bar(config, run, shown):
    steps, seconds = config.budget()
    return tqdm(
        total=steps or seconds,
        initial=run["step"] if steps else run["seconds"],
        disable=not shown,
        unit="step" if steps else "s",
        bar_format="{percentage:3.0f}% {bar} {n:.0f}/{total:.0f} {unit} {postfix}",
    )


# ---- 3. the loop


def train(
    config: TrainConfig, *, on_step: Callable[[dict], None] | None = None
) -> tuple[GPT | None, list[dict]]:
    """Train a model; return (model, history), where history is a list of metric dictionaries.

    A step's row is {"step", "loss" (nats per token), "tokens" (so far), "seconds" (so far),
    "tokens_per_s", "lr", "grad_norm"}. Evaluations add "val_loss" (nats per held-out token) and
    "val_bits" (bits per held-out byte), fp16 adds "loss_scale", and saving adds "save_s" (seconds
    for which training stood still, including those for the previous checkpoint). "grad_norm" is
    None if fp16 skipped the step. `on_step(row)` is called with each row.

    On several ranks, all must call this. The model is whole; if ranks held only parts of it, only
    rank 0 gets it (on the CPU), the others None. Torch's random state, the signal handlers and the
    device are restored afterwards. Raises ValueError for options that do not fit together,
    FloatingPointError if the loss is not finite.
    """
    gpus = range(torch.cuda.device_count())
    with (
        world(config.device, config.needs_group(), config.time_limit) as (rank, world_size, device),
        asked_to_stop() as asked,
        freed_memory_kept(),
        torch.random.fork_rng(devices=gpus),
    ):
        folder = RunFolder(config.out, config.keep, rank, config.save_async)
        _check_out(config)
        check_ranks(config, world_size)
        if config.resume:
            _check_not_over(config, folder)
        train_tokens, held_out, tokenizer, text = _texts(config)
        byte_lengths = tokenizer.byte_lengths() if tokenizer.model else None
        mesh = make_mesh(**config.mesh_sizes(world_size))  # which ranks split what
        engine, run = start(config, device, mesh)
        if config.resume and run["text"] != text and rank == 0:
            _warn_of_another_text(text, run["text"])

        total_steps, total_seconds = config.budget()
        step, seconds, skipped, history = run["step"], run["seconds"], run["skipped"], []
        tokens_per_step = config.batch * config.seq  # over all ranks

        def rows_of(step):
            x, y = corpus.batch(
                train_tokens, step, config.batch, config.seq, config.seed,
                mesh.dp.index, mesh.dp.size,
            )
            return micro_batches(
                x.to(device), y.to(device), config.accumulation_steps()
            )  # (B_local, T) each

        def measure(engine, row, tokens=held_out):
            nats, bits = evaluate(engine, tokens, config.seq, mesh, byte_lengths)
            _check_finite("held-out loss", nats, f"after step {row['step']}", folder)
            row.update(val_loss=nats, val_bits=bits)

        if config.compile or (config.resume and world_size > 1):
            # A discarded pass. Compiling takes long and must not count as training time. And DDP
            # rearranges its buckets after the first backward pass, and with them the order in
            # which gradients are summed: a resumed run must not start with the first order again.
            engine.warm_up(rows_of(step), tokens_per_step)

        bar = _progress_bar(config, run, shown=rank == 0 and sys.stderr.isatty())
        target = config.metrics if rank == 0 else None
        metrics, lost = metric_lines(target, run["row"], step, config.auto_resume), None
        with folder.opened(step if config.resume else -1), bar, metrics as write:
            began, done = time.perf_counter() - seconds, False
            stood = 0.0  # seconds of standstill since the last row that reported them
            while not done:
                step_began = time.perf_counter()
                progress = step / total_steps if total_steps else seconds / total_seconds
                rate = schedule(progress, config.warmup, config.cooldown)
                engine.set_lr(rate)
                loss_sum = engine.backward(rows_of(step), tokens_per_step)
                grad_norm = engine.step(config.clip)  # None: fp16 overflowed, nothing was updated
                skipped += grad_norm is None
                step += 1

                # the ranks agree on the loss, on rank 0's clock, on whether to stop and, in a run
                # that saves, on whether all have written their shard of a checkpoint
                clock = time.perf_counter() - began if rank == 0 else 0.0
                flags = [asked.is_set(), folder.written()] if config.out else [asked.is_set()]
                agreed = torch.tensor([loss_sum, clock, *flags], dtype=torch.float64)
                if world_size > 1:
                    agreed = agreed.to(device)
                    dist.all_reduce(agreed)
                loss = agreed[0].item() / tokens_per_step
                seconds, stop, *written = agreed[1:].tolist()
                if written == [world_size]:
                    saving_began = time.perf_counter()
                    folder.settle()
                    stood += time.perf_counter() - saving_began
                _check_finite("loss", loss, f"at step {step}", folder)
                over = step >= total_steps if total_steps else seconds >= total_seconds
                done = over or stop > 0
                row = {
                    "step": step,
                    "loss": loss,
                    "tokens": step * tokens_per_step,
                    "seconds": round(seconds, 4),
                    "tokens_per_s": round(tokens_per_step / (time.perf_counter() - step_began)),
                    "lr": rate * config.peak_lr(),
                    "grad_norm": grad_norm,
                }
                if config.precision == "fp16":
                    row["loss_scale"] = engine.loss_scale()
                measured = over or step % config.held_out_every == 0
                if measured:
                    measure(engine, row)
                if config.out and (done or step % (config.save_every or math.inf) == 0):
                    if not measured:  # one sequence is enough to detect ruined weights
                        measure(engine, {"step": step}, held_out[: config.seq + 1])
                    run = {
                        "step": step,
                        "seconds": seconds,
                        "skipped": skipped,
                        "text": text,
                        "row": dict(row),  # in case the run dies before writing it
                        "config": {**asdict(config), "resume": None, "auto_resume": False},
                    }
                    saving_began = time.perf_counter()
                    engine.save(folder, run, sharded=config.save_format == "sharded")
                    if done:
                        folder.settle()
                    row["save_s"] = round(stood + time.perf_counter() - saving_began, 4)
                    stood = 0.0
                if done and not measured:  # when asked to stop, save first
                    measure(engine, row)
                history.append(row)
                try:
                    write(row)
                except MetricsLost as error:  # stop and save at the next step
                    write, lost = (lambda row: None), error
                    asked.set()
                if on_step:
                    on_step(row)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update((step if total_steps else min(seconds, total_seconds)) - bar.n)
        model = engine.finished()
        # delete DDP before its process group: as the group's last owner it would wait, holding
        # Python's lock, for threads of the group that may need that lock
        del engine
        if dist.is_initialized() or device.type == "cuda":
            gc.collect()
        mesh.close()
        if lost:
            raise lost
        return model, history


# ---- 4. the command


FAILURES = (ValueError, FloatingPointError, RanksLost, RunStopped)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m utils.train`; return the exit status."""
    if dist.is_torchelastic_launched():
        end_with(os.getppid())  # a killed torchrun could not end its ranks
    rank = os.environ.get("RANK", "0")
    program = "utils.train" if rank == "0" else f"utils.train: rank {rank}"
    return exit_status(program, lambda: run(parse(arguments)), FAILURES, "stopped at once, unsaved")


def run(config: TrainConfig) -> None:
    """Train, and print the outcome on rank 0."""
    try:
        model, history = train(config)
    except RunIsOver as over:
        if not config.auto_resume:
            raise
        print(f"nothing to do: {over}")  # status 0: it need not be started again
        return
    last = history[-1]
    if config.auto_resume and dist.is_torchelastic_launched() and not _is_over(config, last):
        # one node was asked to stop; torchrun would consider the others' ranks finished
        raise RunStopped(f"stopped and saved after step {last['step']}: the same command resumes")
    if os.environ.get("RANK", "0") != "0":
        return
    print(
        f"held-out loss {last['val_loss']:.3f} nats = {last['val_bits']:.3f} bits per byte "
        f"after {last['step']} steps, {last['tokens']:,} tokens, {last['seconds']:.1f} s"
    )
    if config.out:
        print(f"saved in {config.out}; continue with: python -m utils.train --resume {config.out}")
    if config.sample:
        tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else Tokenizer()
        first = "The" if tokenizer.model else "The "  # a tokenizer's words begin with their space
        start = torch.tensor(tokenizer.encode(first), device=next(model.parameters()).device)[
            None
        ]  # (1, T)
        with autocast(config.precision, start.device):
            text = model.generate(start, config.sample, temperature=0.7, seed=config.seed)
        print(f"a sample of its text:\n{tokenizer.decode(text[0][text[0] < tokenizer.size])}")


def _is_over(config, last):
    """Whether the last row is the end of the run, given that its seconds are rounded."""
    steps, seconds = config.budget()
    return last["step"] >= steps if steps else last["seconds"] + 1e-4 >= seconds
