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

import json
import math
import os
import signal
import sys
import threading
import time
import zlib
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from utils import checkpoint, corpus, hf_format
from utils.gpt import GPT, cross_entropy
from utils.optimizer import make_optimizer
from utils.train_config import TrainConfig, flag, parse, resumed  # noqa: F401

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


# ---- 2. the surroundings: ranks, signals, metrics

@contextmanager
def world(device="auto"):
    """Yields (rank, world size, device): of the process group that is open, else of the one that
    torchrun's environment describes, else 0, 1."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; use --device cpu or auto")
    on_gpu = device != "cpu" and torch.cuda.is_available()
    gpus = torch.cuda.device_count() if on_gpu else 0
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    started = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if started:
        enough = on_gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
        dist.init_process_group("nccl" if enough else "gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if on_gpu and size > 1:
        where = torch.device("cuda", (local_rank if started else rank) % gpus)
    else:
        where = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    try:
        with torch.cuda.device(where) if on_gpu else nullcontext():
            yield rank, size, where
    finally:
        if started:
            dist.destroy_process_group()


@contextmanager
def asked_to_stop():
    """Yields an Event that Ctrl-C (SIGINT) or SIGTERM sets; a second Ctrl-C stops at once."""
    asked, before = threading.Event(), {}

    def ask(number, frame):
        asked.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def metric_lines(target, first_step):
    """Yields write(dictionary): one JSON line to standard output ("-"), a file, or nowhere (None).

    A resumed run goes on with its file, after the lines of steps that are now run again are cut.
    """
    if target is None:
        yield lambda row: None
        return
    if target == "-":
        yield lambda row: print(json.dumps(row), flush=True)
        return
    path = Path(target)
    try:
        lines = path.read_text().splitlines() if first_step and path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= first_step]
        beside = path.with_name(path.name + ".partial")
        beside.write_text("".join(line + "\n" for line in kept))
        beside.replace(path)
        file = path.open("a", buffering=1)
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError):
        raise ValueError(f"--metrics {target} does not hold metric lines: name another") from None
    except OSError as error:
        raise ValueError(f"--metrics {target} cannot be written: {error.strerror}") from None
    with file:
        yield lambda row: file.write(json.dumps(row) + "\n")


# ---- 3. the loop

def train(config, *, on_step=None):
    """Trains a model; returns (model, history), history being the list of metric dictionaries.

    One step is {"step", "loss" (nats per token), "tokens" (so far), "seconds" (so far),
    "tokens_per_s", "lr", "grad_norm"}, now and then with "held_out" and "held_out_bits" (nats and
    bits per byte). `on_step(row)` is called with each. On several ranks all of them must call this.
    """
    precision = {"fp64": torch.float64}.get(config.precision, torch.float32)
    gpus = range(torch.cuda.device_count())
    with world(config.device) as (rank, world_size, device), asked_to_stop() as asked, \
            torch.random.fork_rng(devices=gpus):
        _check_folders(config)
        tokens = corpus.load(config.text)
        train_tokens, held_out = corpus.split(tokens)
        corpus.check_length(train_tokens, config.seq, "the part of the text to train on")
        corpus.check_length(held_out, config.seq, "the held-out part (5 %) of the text")
        corpus.share_of_batch(config.batch, rank, world_size)  # every rank has a row

        torch.manual_seed(config.seed)
        model = GPT(config.model_config()).to(device, precision)
        optimizer = make_optimizer(model, config.optimizer, config.lr, config.adamw_lr,
                                   config.weight_decay)
        fingerprint = {"bytes": len(tokens), "crc32": zlib.crc32(tokens.numpy())}
        run = {"step": 0, "tokens": 0, "seconds": 0.0, "text": fingerprint}
        if config.resume:
            run.update(checkpoint.load(config.resume, model, optimizer))
            if run["text"] != fingerprint and rank == 0:
                print("utils.train: the text is not the one that this run began with",
                      file=sys.stderr)
        autocast = (torch.autocast(device.type, torch.bfloat16) if config.precision == "bf16"
                    else FULL_PRECISION)
        parallel = model
        if world_size > 1:
            parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if config.compile:
            parallel = torch.compile(parallel)

        def rows_of(step):
            x, y = corpus.batch(train_tokens, step, config.batch, config.seq, config.seed,
                                rank, world_size)
            return x.to(device), y.to(device)

        global_tokens = config.batch * config.seq
        if config.resume and world_size > 1:
            # DDP rearranges its buckets after the first backward pass, and so the order in which
            # gradients are summed; a run that goes on must not start with the first order again
            backward(parallel, *rows_of(run["step"]), global_tokens, world_size, autocast)
            optimizer.zero_grad()
        total_steps, total_seconds = config.budget()
        step, seconds, history = run["step"], run["seconds"], []

        def progress():
            return step / total_steps if total_steps else seconds / total_seconds

        if progress() >= 1:
            raise ValueError(f"{config.resume} is at step {step} after {seconds:.0f} s, the end of "
                             "its run: give a larger --steps or --seconds")

        def save():
            if rank == 0:
                options = {**asdict(config), "resume": None}
                checkpoint.save(config.out, model, optimizer, {
                    "step": step, "tokens": step * global_tokens, "seconds": seconds,
                    "text": fingerprint, "config": options})

        shown = rank == 0 and sys.stderr.isatty()
        bar = tqdm(total=total_steps or total_seconds, initial=step if total_steps else seconds,
                   disable=not shown, unit="step" if total_steps else "s",
                   bar_format="{percentage:3.0f}% {bar} {n:.0f}/{total:.0f} {unit} {postfix}")
        with metric_lines(config.metrics if rank == 0 else None, step) as write, bar:
            began, done = time.perf_counter() - seconds, False
            while not done:
                step_began = time.perf_counter()
                rate = schedule(progress(), config.warmup, config.cooldown)
                x, y = rows_of(step)  # (B_local, T)
                loss_sum = backward(parallel, x, y, global_tokens, world_size, autocast)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(),
                                                           config.clip or math.inf)
                optimizer.set_rate(rate)
                optimizer.step()
                optimizer.zero_grad()
                step += 1

                # the ranks agree: on the loss, on rank 0's clock, and whether anyone shall stop
                clock = time.perf_counter() - began if rank == 0 else 0.0
                agreed = torch.tensor([loss_sum, clock, asked.is_set()], dtype=torch.float64)
                if world_size > 1:
                    agreed = agreed.to(device)
                    dist.all_reduce(agreed)
                loss, seconds, stop = agreed[0].item() / global_tokens, agreed[1].item(), agreed[2]
                if not math.isfinite(loss):
                    raise RuntimeError(f"the loss is {loss} at step {step}: try a lower --lr")
                done = progress() >= 1 or bool(stop)
                row = {"step": step, "loss": loss, "tokens": step * global_tokens,
                       "seconds": round(seconds, 4),
                       "tokens_per_s": round(global_tokens / (time.perf_counter() - step_began)),
                       "lr": optimizer.param_groups[0]["lr"], "grad_norm": grad_norm.item()}
                if done or step % config.held_out_every == 0:
                    nats = evaluate(model, held_out, config.seq, rank, world_size, autocast)
                    row.update(held_out=nats, held_out_bits=nats / math.log(2))
                history.append(row)
                write(row)
                if on_step:
                    on_step(row)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update(min(progress(), 1) * bar.total - bar.n)
                if config.out and (done or step % (config.save_every or math.inf) == 0):
                    save()
        return model, history


def _check_folders(config):
    """Says before the run, not after it, when the checkpoint could not be written."""
    if config.out is None:
        return
    out = hf_format.recover(config.out)
    hf_format.check_replaceable(out)
    continued = config.resume and hf_format.recover(config.resume) == out
    if (out / hf_format.CONFIG).exists() and not continued:
        raise ValueError(f"{config.out} holds a checkpoint already: continue it with --resume "
                         f"{config.out}, or choose another --out")


# ---- 4. the command

def main(arguments=None):
    """What `python -m utils.train` does; returns the exit status."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        config = parse(arguments)
        model, history = train(config)
    except (ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "loss is" not in str(error):
            raise  # not a wrong option: the traceback is wanted
        if first:
            print(f"utils.train: {error}", file=sys.stderr)
        return 2
    if not first:
        return 0
    last = history[-1]
    print(f"held-out loss {last['held_out']:.3f} nats = {last['held_out_bits']:.3f} bits per byte "
          f"after {last['step']} steps, {last['tokens']:,} tokens, {last['seconds']:.1f} s")
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
