"""The training loop, on one process or on several that share every batch (data parallel, DDP).

    python -m utils.train                                           60 s, then a sample of text
    python -m utils.train --steps 300 --out run --metrics run.jsonl
    python -m utils.train --resume run --steps 600
    torchrun --standalone --nproc-per-node 2 -m utils.train --steps 300
    python -m utils.train --help

N ranks compute what one rank computes: the global batch is the same, and every rank's loss counts
by its tokens, so a batch that does not divide evenly changes nothing either. From a notebook:

    model, history = train(TrainConfig(steps=100))
"""

import math
import os
import sys
import time
import zlib
from contextlib import nullcontext
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from utils import checkpoint, corpus, hf_format
from utils.gpt import GPT, cross_entropy
from utils.optimizer import make_optimizer
from utils.run_context import asked_to_stop, freed_memory_kept, metric_lines, world
from utils.train_config import TrainConfig, parse, resumed  # noqa: F401

FULL_PRECISION = nullcontext()  # instead of autocast

# ---- 1. small parts


def schedule(progress, warmup=0.02, cooldown=0.5):
    """The learning rate as a part of its peak, for progress 0..1 through the run: a trapezoid.

    Progress may be steps or seconds, so a run with a time budget cools down just the same.
    """
    rising = (progress + 1e-3) / warmup if warmup else 1.0  # the first step is not lost
    falling = (1 - progress) / cooldown if cooldown else 1.0
    return max(0.0, min(1.0, rising, falling))


def backward(model, x, y, global_tokens, world_size=1, autocast=FULL_PRECISION):
    """One forward and backward pass of a rank's rows; returns the sum of their losses, in nats.

    DDP averages gradients over ranks. A rank with fewer rows must count less, so each rank hands
    over (its sum / all tokens of the step) times the world size: the average is then the gradient
    of the mean over all tokens, as on one rank.
    """
    with autocast:
        logits = model(x)  # (B_local, T, V)
    loss = cross_entropy(logits, y, reduction="sum")
    (loss * (world_size / global_tokens)).backward()
    return loss.detach()


@torch.no_grad()
def evaluate(model, tokens, seq, rank=0, world_size=1, autocast=FULL_PRECISION):
    """The mean loss in nats per token over the held-out tokens, shared out over the ranks."""
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum of losses, tokens
    for x, y in corpus.held_out_batches(tokens, seq, rank=rank, world_size=world_size):
        x, y = x.to(device), y.to(device)
        with autocast:
            logits = model(x)
        total[0] += cross_entropy(logits, y, reduction="sum")
        total[1] += y.numel()
    if world_size > 1:
        dist.all_reduce(total)
    return (total[0] / total[1]).item()


# ---- 2. what a run begins with


def _texts(config):
    """(tokens to train on, held-out tokens, fingerprint of the text)."""
    tokens = corpus.load(config.text)
    train_tokens, held_out = corpus.split(tokens)
    corpus.check_length(train_tokens, config.seq, "the part of the text to train on")
    corpus.check_length(held_out, config.seq, "the held-out part (5 %) of the text")
    return train_tokens, held_out, {"bytes": len(tokens), "crc32": zlib.crc32(tokens.numpy())}


def _start(config, device):
    """(model, optimizer, run): new ones, or those of the checkpoint that is resumed."""
    torch.manual_seed(config.seed)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    model = GPT(config.model_config()).to(device, dtype)
    optimizer = make_optimizer(
        model, config.optimizer, config.lr, config.adamw_lr, config.weight_decay
    )
    run = {"step": 0, "seconds": 0.0, "text": None}
    if config.resume:
        run = checkpoint.load(config.resume, model, optimizer)
        steps, seconds = config.budget()
        if run["step"] >= (steps or math.inf) or run["seconds"] >= (seconds or math.inf):
            raise ValueError(
                f"{config.resume} is at step {run['step']} after {run['seconds']:.1f} s, the end "
                "of its run: give a larger --steps or --seconds"
            )
    return model, optimizer, run


def _check_out(config):
    """Says before the run, not after it, when the checkpoint could not be written."""
    if config.out is None:
        return
    out = hf_format.recover(config.out)
    hf_format.check_replaceable(out)
    continued = config.resume and hf_format.recover(config.resume) == out
    if (out / hf_format.CONFIG).exists() and not continued:
        raise ValueError(
            f"{config.out} holds a checkpoint already: continue it with --resume "
            f"{config.out}, or choose another --out"
        )


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


def train(config, *, on_step=None):
    """Trains a model; returns (model, history), history being the list of metric dictionaries.

    One step is {"step", "loss" (nats per token), "tokens" (so far), "seconds" (so far),
    "tokens_per_s", "lr", "grad_norm"}, now and then with "held_out" and "held_out_bits" (nats and
    bits per byte). `on_step(row)` is called with each. On several ranks all of them must call this.
    Torch's random numbers, the signal handlers and the device are afterwards what they were.
    Raises ValueError for options that do not fit, FloatingPointError when the loss is not finite.
    """
    gpus = range(torch.cuda.device_count())
    with (
        world(config.device) as (rank, world_size, device),
        asked_to_stop() as asked,
        freed_memory_kept(),
        torch.random.fork_rng(devices=gpus),
    ):
        _check_out(config)
        corpus.share_of_batch(config.batch, rank, world_size)  # raises if a rank has no row
        train_tokens, held_out, text = _texts(config)
        model, optimizer, run = _start(config, device)
        if config.resume and run["text"] != text and rank == 0:
            print("utils.train: this is not the text that the run began with", file=sys.stderr)

        parallel = model
        if world_size > 1:
            parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if config.compile:
            parallel = torch.compile(parallel)
        autocast = FULL_PRECISION
        if config.precision == "bf16":
            autocast = torch.autocast(device.type, torch.bfloat16)
        total_steps, total_seconds = config.budget()
        step, seconds, history = run["step"], run["seconds"], []
        tokens_per_step = config.batch * config.seq  # over all ranks

        def rows_of(step):
            x, y = corpus.batch(
                train_tokens, step, config.batch, config.seq, config.seed, rank, world_size
            )
            return x.to(device), y.to(device)  # (B_local, T) each

        if config.compile or (config.resume and world_size > 1):
            # One pass for nothing. Compiling takes long, which is not the training's time. And DDP
            # rearranges its buckets after the first backward pass, and so the order in which
            # gradients are summed: a run that goes on must not start with the first order again.
            backward(parallel, *rows_of(step), tokens_per_step, world_size, autocast)
            optimizer.zero_grad()

        bar = _progress_bar(config, run, shown=rank == 0 and sys.stderr.isatty())
        with bar, metric_lines(config.metrics if rank == 0 else None, step) as write:
            began, done = time.perf_counter() - seconds, False
            while not done:
                step_began = time.perf_counter()
                progress = step / total_steps if total_steps else seconds / total_seconds
                optimizer.set_rate(schedule(progress, config.warmup, config.cooldown))
                x, y = rows_of(step)
                loss_sum = backward(parallel, x, y, tokens_per_step, world_size, autocast)
                grad_norm = clip_grad_norm_(model.parameters(), config.clip or math.inf)
                optimizer.step()
                optimizer.zero_grad()
                step += 1

                # the ranks agree: on the loss, on rank 0's clock, and whether anyone shall stop
                clock = time.perf_counter() - began if rank == 0 else 0.0
                agreed = torch.tensor([loss_sum, clock, asked.is_set()], dtype=torch.float64)
                if world_size > 1:
                    agreed = agreed.to(device)
                    dist.all_reduce(agreed)
                loss, seconds, stop = agreed[0].item() / tokens_per_step, *agreed[1:].tolist()
                if not math.isfinite(loss):
                    raise FloatingPointError(f"the loss is {loss} at step {step}: lower --lr")

                over = step >= total_steps if total_steps else seconds >= total_seconds
                done = over or stop > 0
                row = {
                    "step": step,
                    "loss": loss,
                    "tokens": step * tokens_per_step,
                    "seconds": round(seconds, 4),
                    "tokens_per_s": round(tokens_per_step / (time.perf_counter() - step_began)),
                    "lr": optimizer.param_groups[0]["lr"],
                    "grad_norm": grad_norm.item(),
                }
                if config.out and (done or step % (config.save_every or math.inf) == 0):
                    options = {**asdict(config), "resume": None}
                    run = {"step": step, "seconds": seconds, "text": text, "config": options}
                    if rank == 0:
                        checkpoint.save(config.out, model, optimizer, run)
                if done or step % config.held_out_every == 0:
                    nats = evaluate(model, held_out, config.seq, rank, world_size, autocast)
                    row.update(held_out=nats, held_out_bits=nats / math.log(2))
                history.append(row)
                write(row)
                if on_step:
                    on_step(row)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update((step if total_steps else min(seconds, total_seconds)) - bar.n)
        return model, history


# ---- 4. the command


def main(arguments=None):
    """What `python -m utils.train` does; returns the exit status."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = parse(arguments)
        model, history = train(config)
    except (ValueError, FloatingPointError) as error:
        where = "" if first else f"rank {os.environ['RANK']}: "
        print(f"utils.train: {where}{error}", file=sys.stderr)
        return 2
    if not first:
        return 0
    last = history[-1]
    print(
        f"held-out loss {last['held_out']:.3f} nats = {last['held_out_bits']:.3f} bits per byte "
        f"after {last['step']} steps, {last['tokens']:,} tokens, {last['seconds']:.1f} s"
    )
    if config.out:
        print(f"saved in {config.out}; go on with: python -m utils.train --resume {config.out}")
    if config.sample:
        start = corpus.encode("The ")[None].to(next(model.parameters()).device)  # (1, 4)
        with torch.autocast(start.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            text = model.generate(start, config.sample, temperature=0.7, seed=config.seed)
        print(f"a sample of its text:\n{corpus.decode(text[0][text[0] < corpus.VOCAB_SIZE])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
