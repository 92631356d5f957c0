"""Tokens per second of one training step: ours, nanoGPT, transformers and litgpt.

    python -m tests.bench.bench_train
    python -m tests.bench.bench_train --nanogpt ~/nanoGPT --litgpt ~/site-packages-with-litgpt
    python -m tests.bench.bench_train --no-compile --hidden 384 --heads 6

One step is forward, backward and optimizer on one process: the same layers, width, heads, batch,
sequence, vocabulary, loss (mean cross-entropy) and fused AdamW for all; dropout 0. nanoGPT has
GPT-2's layout (GELU, learned positions, tied embeddings) with as many matrix parameters per block.
Each contender has its own process, which keeps freed memory as our training loop does
(utils.ranks.context). They take turns, in a new order each round, and ratios are taken within a
round, so other load affects all alike. A missing peer is named as absent.

On a CPU every contender runs twice, eager and under torch.compile, and the ratio that counts
compares our best with their best. Eager, nanoGPT has less to do outside its matrix products: no
rotation of queries and keys, and a fused LayerNorm. Compiled, those costs vanish in fused loops.

On a GPU the step runs in bfloat16 (--bf16: autocast; ours computes with copies of the weights, as
`utils.train` does) and compiled only. If the peak is known, the fraction of it in use (MFU, by
GPTConfig.flops_per_token) is printed.
"""

import argparse
import importlib
import itertools
import multiprocessing
import random
import statistics
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from utils.data import corpus
from utils.memory.precision import weights_in
from utils.models.gpt import GPT, GPTConfig, keep_from_compiling
from utils.ranks.context import freed_memory_kept
from utils.training.optimizer import make_optimizer
from utils.training.step import backward

PEAKS = {  # dense bf16 FLOP/s, from the makers' data sheets
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "V100": 125e12,
    "T4": 65e12,
    "MI300X": 1307e12,
    "MI250": 383e12,
}


def peak_of(device):
    """Dense bf16 FLOP/s of a device by its name, or None if it is not in `PEAKS`."""
    return next((flops for name, flops in PEAKS.items() if name in device), None)


# ---- the contenders: each is a function sizes -> (model, logits_of)


def our_config(sizes):
    return GPTConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        layers=sizes.layers,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        max_positions=sizes.seq,
    )


def ours(sizes):
    return GPT(our_config(sizes))


def transformers_llama(sizes):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**our_config(sizes).to_hf(), "use_cache": False}))


def litgpt(sizes):
    from litgpt.model import GPT as LitGPT
    from litgpt.model import Config

    config = our_config(sizes)
    return LitGPT(
        Config(
            block_size=sizes.seq,
            padded_vocab_size=sizes.vocab,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_query_groups=config.key_value_heads,
            n_embd=sizes.hidden,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=config.mlp_size,
        )
    )


def nanogpt(sizes):
    module = importlib.import_module("model")  # nanoGPT's model.py, found by --nanogpt
    return module.GPT(
        module.GPTConfig(
            block_size=sizes.seq,
            vocab_size=sizes.vocab,
            n_layer=sizes.layers,
            n_head=sizes.heads,
            n_embd=sizes.hidden,
            dropout=0.0,
            bias=False,
        )
    )


BUILDERS = {
    "utils.train": ours,
    "nanoGPT": nanogpt,
    "transformers": transformers_llama,
    "litgpt": litgpt,
}


def step_of(name, model, compiled, autocast):
    """Return a function (x, y) -> None that takes one training step of a contender."""
    if compiled and name == "utils.train":
        keep_from_compiling(model)
    compiled = torch.compile(model) if compiled else model
    if name == "utils.train":
        optimizer = make_optimizer(model, "adamw", 1e-3, weight_decay=0.1)
        copies = nullcontext
        if isinstance(autocast, torch.autocast):  # ours computes with copies instead
            copies = partial(weights_in, torch.bfloat16, [model])

        def step(x, y):
            with copies():
                backward(compiled, x, y, y.numel())
            optimizer.step()
            optimizer.zero_grad()

        return step

    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(x, y):
        with autocast:
            if name == "nanoGPT":
                loss = compiled(x, y)[1]
            else:
                output = compiled(x)
                logits = output.logits if name == "transformers" else output
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---- the measurement


def contend(name, compiled, sizes, pipe):
    """Run the process of one contender: build its model, then time a round on each request.

    Send its number of parameters, or a sentence if it is absent; then seconds per step. Each has
    its own process, as a separate program would: how memory is reused is part of the speed.
    """
    sys.path += [str(path.expanduser()) for path in (sizes.nanogpt, sizes.litgpt) if path]
    if sizes.threads:
        torch.set_num_threads(sizes.threads)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    autocast = torch.autocast(device.type, torch.bfloat16) if sizes.bf16 else nullcontext()
    try:
        model = BUILDERS[name](sizes).to(device).train()
    except ImportError as error:
        pipe.send(f"absent: {error}")
        return
    step = step_of(name, model, compiled, autocast)
    tokens = corpus.load()
    batches = [
        tuple(part.to(device) for part in corpus.batch(tokens, number, sizes.batch, sizes.seq))
        for number in range(sizes.steps)
    ]
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    clock = time.process_time if sizes.cpu_time else time.perf_counter
    pipe.send(sum(parameter.numel() for parameter in model.parameters()))
    with freed_memory_kept():  # as in our loop; the peers get it too
        while pipe.recv():
            synchronize()
            began = clock()
            for x, y in batches:
                step(x, y)
            synchronize()
            pipe.send((clock() - began) / sizes.steps)


def contenders(sizes):
    """Start what can be built, name what cannot; return {(name, compiled): (pipe, parameters)}."""
    started, context = {}, multiprocessing.get_context("spawn")
    modes = (False, True) if sizes.compile is None else (sizes.compile,)
    for name, compiled in itertools.product(BUILDERS, modes):
        if name == "nanoGPT" and sizes.kv_heads not in (None, sizes.heads):
            print("nanoGPT        absent: it has no grouped-query attention")
            continue
        pipe, its_end = context.Pipe()
        context.Process(target=contend, args=(name, compiled, sizes, its_end), daemon=True).start()
        its_end.close()
        answer = pipe.recv()
        if isinstance(answer, str):
            print(f"{name:14} {answer}")
        else:
            started[name, compiled] = (pipe, answer)
    return started


def measure(started, rounds):
    """Return {contender: [seconds per step of each round]}; each round has a new random order."""
    seconds = {name: [] for name in started}
    for round_number in range(rounds + 1):  # the first one only warms up
        names = list(started)
        random.Random(round_number).shuffle(names)
        for name in names:
            pipe = started[name][0]
            pipe.send(True)
            time_of_step = pipe.recv()
            if round_number:
                seconds[name].append(time_of_step)
    for pipe, _ in started.values():
        pipe.send(False)
    return seconds


def best(seconds, name):
    """The contender (name, compiled) with the smaller median, or None if it is absent."""
    both = [contender for contender in seconds if contender[0] == name]
    return min(both, key=lambda contender: statistics.median(seconds[contender]), default=None)


def ratio(seconds, mine, theirs):
    """Our speed over theirs, round by round, as text: median (quartiles)."""
    ratios = [their / our for their, our in zip(seconds[theirs], seconds[mine])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}, {high:.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    gpu = torch.cuda.is_available()
    sizes = (
        {"layers": 12, "hidden": 1024, "heads": 16, "batch": 16, "seq": 1024, "vocab": 32768}
        if gpu
        else {"layers": 4, "hidden": 128, "heads": 4, "batch": 32, "seq": 128, "vocab": 256}
    )
    for name, default in {**sizes, "rounds": 15, "steps": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the process's CPU seconds, "
        "not the clock's: for a machine that is busy; use it with --threads 1",
    )
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=gpu)
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=gpu or None,
        help="only compiled, or only not; default: both on a CPU, compiled on a GPU",
    )
    parser.add_argument("--peak", type=float, help="the device's bf16 FLOP/s, for MFU")
    parser.add_argument("--nanogpt", type=Path, help="a clone of github.com/karpathy/nanoGPT")
    parser.add_argument("--litgpt", type=Path, help="a folder in which litgpt is installed")
    sizes = parser.parse_args()
    started = contenders(sizes)
    seconds = measure(started, sizes.rounds)

    threads = sizes.threads or torch.get_num_threads()
    where = torch.cuda.get_device_name() if gpu else f"CPU, {threads} threads"
    print(
        f"\n{where}; {'bf16' if sizes.bf16 else 'fp32'}; layers {sizes.layers}, "
        f"hidden {sizes.hidden}, heads {sizes.heads}, batch {sizes.batch} x {sizes.seq}, "
        f"vocabulary {sizes.vocab}; {sizes.rounds} rounds"
    )
    print(f"{'':24} {'parameters':>11} {'tokens/s':>10}   speed of ours/theirs, the same way")
    for (name, compiled), times in seconds.items():
        rate = sizes.batch * sizes.seq / statistics.median(times)
        label = name + (", compiled" if compiled else "")
        compared = ratio(seconds, ("utils.train", compiled), (name, compiled))
        print(f"{label:24} {started[name, compiled][1]:11,} {rate:10,.0f}   {compared}")
    mine = best(seconds, "utils.train")
    print("our best/their best, median of the rounds (quartiles):")
    for name in BUILDERS:
        theirs = best(seconds, name)
        if theirs and theirs != mine:
            print(f"{name:24} {ratio(seconds, mine, theirs)}")
    peak = sizes.peak or peak_of(where)
    if peak:
        rate = sizes.batch * sizes.seq / statistics.median(seconds[mine])
        flops = our_config(sizes).flops_per_token(sizes.seq)
        print(f"MFU of utils.train: {rate * flops / peak:.1%} of {peak / 1e12:,.1f} TFLOP/s")


if __name__ == "__main__":
    main()
