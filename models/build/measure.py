"""Measures the models: models/base/measured.json.

    python -m models.build measure              everything, for all models
    python -m models.build measure --only base  one model; text: the baselines; variants: compressed
                                                models; speed: how fast they are served

The measure is bits per byte of the held-out text: the mean number of bits that an arithmetic coder
with the model's predictions needs for one byte of text that the model has never seen. So it can be
compared with gzip, xz and n-grams, whatever the tokens are.
"""

import gzip
import json
import lzma
import math
from pathlib import Path

import torch

from models.build.ngram import largest
from models.build.variants import variants
from utils.compression.evaluate import held_out
from utils.data import corpus
from utils.data import library as library_text
from utils.models import hf_format
from utils.models.shipped import SIZES, load

MEASURED = "measured.json"
EVERYTHING = [*SIZES, "text", "variants", "speed"]
WINDOW, STRIDE = 512, 384  # tokens
PART = 8192  # tokens at the beginning of the held-out text, for a quick check
LINE = 40  # minimum characters of a line that counts
SAMPLE = {"max_new_tokens": 80, "temperature": 0.6, "top_k": 40, "seed": 0}
PROMPTS = (
    "The ``with`` statement",
    "import os\n\n\ndef read_lines(path):\n    ",
    "class Stack:\n    ",
    "module queue\n\n",
)


# ---- 1. the models


def held_out_bits(model, tokenizer, tokens, window=WINDOW, stride=STRIDE, batch=8):
    """{"bits_per_byte", "nats_per_token", "tokens", "bytes"} over all tokens (T,), each scored
    once, by `held_out`."""
    score = held_out(model, tokenizer, tokens, window, stride, batch)
    return {
        "bits_per_byte": score.bits_per_byte,
        "nats_per_token": score.bits.sum().item() * math.log(2) / score.tokens,
        "tokens": score.tokens,
        "bytes": int(score.bytes.sum()),
    }


def samples(model, tokenizer, prompts=PROMPTS):
    """[{"prompt", "text"}]: the model's continuations, up to the end of the document."""
    found = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        row = model.generate(torch.tensor(ids)[None], **SAMPLE)[0, len(ids) :].tolist()
        stop = row.index(tokenizer.end) if tokenizer.end in row else len(row)
        found.append({"prompt": prompt, "text": tokenizer.decode(row[:stop])})
    return found


def measure_model(name, folder, runs):
    """The facts about one model, with its training if the run's files exist."""
    model, tokenizer = load(name, folder)
    _, held_out = corpus.load_split("library", tokenizer)
    config = model.config
    result = {
        "layers": config.layers,
        "hidden": config.hidden_size,
        "heads": config.heads,
        "parameters": config.parameter_count(),
        "file_bytes": (Path(folder) / name / hf_format.WEIGHTS).stat().st_size,
        "window": WINDOW,
        "stride": STRIDE,
        **held_out_bits(model, tokenizer, held_out),
        "part": held_out_bits(model, tokenizer, held_out[:PART]),
        "samples": samples(model, tokenizer),
    }
    if training := _training(name, Path(runs)):
        result["training"] = training
    return result


def _training(name, runs):
    """Options, length and loss curve of a run of utils.train; None if its files are gone."""
    record, metrics = runs / name / "training.json", runs / f"{name}.jsonl"
    if not (record.exists() and metrics.exists()):
        return None
    config = hf_format.read_json(record)["config"]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    every = max(1, len(rows) // 100)
    blocks = [rows[at : at + every] for at in range(0, len(rows), every)]
    chosen = ("batch", "seq", "optimizer", "weight_decay", "precision", "lr", "adamw_lr", "steps")
    return {
        "options": {key: config[key] for key in chosen},
        "steps": rows[-1]["step"],
        "tokens": rows[-1]["tokens"],
        "seconds": round(rows[-1]["seconds"]),
        "loss": [
            [b[-1]["step"], round(sum(r["loss"] for r in b) / len(b), 4)] for b in blocks
        ],  # mean nats per token of the steps up to here
        "held_out_bits": [
            [r["step"], round(bits, 4)]
            for r in rows
            if (bits := r.get("val_bits", r.get("held_out_bits")))  # its name in older runs
        ],
    }


# ---- 2. the baselines


def measure_text(tokenizer, limits):
    """The text, and the bits per byte of gzip, xz and n-grams on its held-out part.

    limits   {name of a model: most bytes for the n-gram model compared with it}
    """
    train, held_out = (part.encode("utf-8") for part in library_text.split())
    train_ids, held_out_ids = corpus.load_split("library", tokenizer)
    bits = {
        "gzip -9": 8 * len(gzip.compress(held_out, 9)) / len(held_out),
        "xz -9e": 8 * len(_xz(held_out)) / len(held_out),
        "xz -9e after the training text": (
            8 * (len(_xz(train + held_out)) - len(_xz(train))) / len(held_out)
        ),
    }
    return {
        **library_text.fingerprint(),
        "train_bytes": len(train),
        "train_tokens": len(train_ids),
        "held_out_bytes": len(held_out),
        "held_out_tokens": len(held_out_ids),
        "held_out_modules": library_text.held_out_modules(),
        "held_out_lines_seen": _lines_seen(train.decode(), held_out.decode()),
        "vocabulary": tokenizer.size,
        "bits_per_byte": bits,
        "ngrams": {
            name: _ngram(train_ids.numpy(), held_out_ids.numpy(), tokenizer, limit, len(held_out))
            for name, limit in limits.items()
        },
    }


def _xz(data):
    return lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)


def _ngram(train, held_out, tokenizer, limit, size):
    model, stored = largest(train, tokenizer.size, limit)
    return {
        "order": model.order,
        "file_bytes": stored,
        "limit": limit,
        "bits_per_byte": float(model.bits(held_out).sum()) / size,
    }


def _lines_seen(train, held_out):
    """The fraction of held-out lines of at least LINE characters that are also in the training
    text."""
    known = set(train.split("\n"))
    lines = [line for line in held_out.split("\n") if len(line.strip()) >= LINE]
    return sum(line in known for line in lines) / len(lines)


# ---- 3. how fast


def measure_speed(model):
    """The results of the format and compiler benchmarks for a checkpoint folder."""
    from tests.bench import bench_compile, bench_formats

    return bench_formats.measure(model) | {"compiled": bench_compile.measure(model)}


# ---- 4. the file


def measure(names, folder, runs):
    """Measures the named models, or other parts of EVERYTHING, and updates
    folder/base/measured.json. Returns its content."""
    file = Path(folder) / "base" / MEASURED
    measured = hf_format.read_json(file) if file.exists() else {}
    text = library_text.fingerprint()
    before = measured.get("text", text)
    if names != EVERYTHING and any(before[key] != value for key, value in text.items()):
        raise ValueError(
            f"{file} was measured on the library of Python {before['python']}, but this is Python "
            f"{text['python']} with another text: leave --only out to measure everything again"
        )
    for name in names:
        if name == "text":
            files = {each: Path(folder) / each / hf_format.WEIGHTS for each in SIZES}
            limits = {each: file.stat().st_size for each, file in files.items() if file.exists()}
            measured["text"] = measure_text(load("base", folder)[1], limits)
        elif name == "variants":
            measured["variants"] = variants(folder)
        elif name == "speed":
            measured["speed"] = measure_speed(Path(folder) / "base")
        else:
            old = measured.setdefault("models", {}).get(name, {})
            new = measure_model(name, folder, runs)
            if "training" in old:
                new.setdefault("training", old["training"])
            measured["models"][name] = new
            print(f"{name}: {new['bits_per_byte']:.4f} bits per byte", flush=True)
        beside = file.with_name(f".{file.name}.partial")
        hf_format.write_json(beside, measured)
        beside.replace(file)
    return measured
