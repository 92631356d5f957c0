"""The model card models/base/README.md and its loss curve, written from measured.json alone."""

from pathlib import Path

from models.build.measure import LINE, MEASURED, PART, SAMPLE
from models.build.variants import ASKED, CALIBRATION, QUESTIONS, STEPS, TOKENS
from utils.models import hf_format
from utils.training.optimizer import LEARNING_RATES

CURVE = "loss.svg"

CARD = """---
license: other
license_name: psf-2.0
license_link: https://docs.python.org/3/license.html
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The workshop's base model

A language model of {parameters:,} parameters that knows one thing: Python's standard library. It is
what lessons tune, compress and serve, small enough for two CPU cores. `models/small` and
`models/tiny` are the same in smaller; this card describes all three. It is written by
`python -m models.build card` from what `python -m models.build measure` measured.

```python
from utils.models.shipped import load

model, tokenizer = load("base")
```

Or in other tools: `AutoModelForCausalLM.from_pretrained("models/base")` and
`AutoTokenizer.from_pretrained("models/base")` of `transformers`.

## What it is

{sizes}

A Llama-layout decoder (RMSNorm, rotary positions, SwiGLU, one matrix for the embedding and the last
layer), weights in bf16, at most {window} tokens at once. All three share one tokenizer: a
byte-level BPE of {vocabulary:,} tokens, learned from the training text; `<|end|>` stands between
documents.

## What it learned from

The standard library of CPython {python}, as every installation carries it: the source of its
modules, a reference page made from each (names, signatures, docstrings), the pages of some modules
written in C, and the topics of the language reference. Left out are test suites, tables, and what
distributions package apart (tkinter, idlelib, lib2to3, ensurepip, distutils, venv). Equal texts are
kept once. `utils/data/library.py` makes it:

| | |
| --- | --- |
| documents | {documents:,} |
| bytes | {bytes:,}, of which {held_out_bytes:,} held out |
| tokens | {train_tokens:,} to train on, {held_out_tokens:,} held out |
| sha256 of the text | `{sha256}` |

Modules are ordered by the sha256 of their name, and the last 5 %, in whole modules, are never
trained on: {held_out_modules}. Python repeats itself, so {seen:.0%} of the held-out lines of {line}
characters or more also stand, word for word, somewhere in the training text. And a docstring stands
twice in the text, in the reference page and in the source after it: xz remembers the first when it
comes to the second, a model that sees {window} tokens mostly does not.

Another release of Python has another text (3.12, for instance, lacks asynchat, asyncore, imp and
smtpd and has new modules), so it gives another tokenizer and other figures. `measure` and the tests
compare the sha256 first.

## How it was trained

```
{commands}
```

{options} The learning rate rises over the first 2 % of the steps and falls over the second half.

{training}

![Loss of the three models over the steps of training](loss.svg)

The loss of a step is on text that it may have seen before; the points are bits per byte of held-out
text.

## What it is worth

Bits per byte of the held-out text, {held_out_bytes:,} bytes: fewer is better. The models read it in
windows of {window} tokens that move on by {stride}, so every token is predicted once, from at least
{context} tokens before it (fewer at the very beginning).

{table}

The n-gram model (interpolated Kneser-Ney, `models/build/ngram.py`, the same tokens and training
text) has the longest n-grams with which its compressed file is no larger than the model's file
beside it.

```
python -m models.build measure              # all of it, minutes
python -m pytest tests/models/test_build.py    # the first {part:,} held-out tokens, compared
```

## In fewer bits

What [lesson 15](../../notebooks/15_compression.ipynb) does to the models, on the first
{variant_tokens:,} held-out tokens, and on {variant_questions} questions of two tasks of lesson 14,
without an example. MB are those of the weights' file; a token reads all of it. The cost is in bits
per byte more than the same model in 16 bits, on the same windows, with its 95 % interval.

{variants}

int3 and int4 have a scale for 32 columns; calibrated scales end at 99.99 % of all activations of
{rows} rows of {tokens_of_a_row} tokens; distillation takes {steps} steps, and twice as many where
`small` is trained further.

And the speed, in tokens a second: {speed_what}.
Ratios are medians over {speed_rounds} rounds in which all take turns; more is faster.

{speed}

```
python -m models.build measure --only variants    # a quarter of an hour
python -m models.build measure --only speed       # minutes; with CTranslate2 where it is installed
```

## Samples

Temperature {temperature}, the {top_k} likeliest tokens, seed {seed}; nothing was chosen. Another
machine may round otherwise and then draw other words.

{samples}

## Limits

- It has read 10 MB and nothing else: it knows no facts about the world, and no language but the
  English of documentation and Python. What looks like an explanation may be wrong, and code that it
  writes may not run.
- It was not taught to follow instructions. Give it the beginning of a text, or examples.
- It sees {window} tokens, about {characters:,} characters.
- It can repeat passages of its training text word for word.
- It is for teaching. Nothing was done to make its output safe or fair.

## Licence

The text is part of CPython and under the Python Software Foundation License Version 2, with the
notices of the parts that others gave (<https://docs.python.org/3/license.html>). The weights were
made from that text alone and are given on under the same terms.
"""


def write_card(folder):
    """Writes folder/base/README.md and its picture; returns the card's path.

    Raises CheckpointError (a ValueError) where nothing, or not everything, was measured.
    """
    home = Path(folder) / "base"
    measured = hf_format.read_json(home / MEASURED)
    models, text = measured.get("models", {}), measured.get("text")
    if "base" not in models or text is None:
        raise hf_format.CheckpointError(
            f"{home / MEASURED} lacks the base model or the text: run the command 'measure' first"
        )
    draw_curve(models, home / CURVE)
    base = models["base"]
    card = CARD.format(
        **{key: text[key] for key in text if key not in ("held_out_modules", "bits_per_byte")},
        parameters=base["parameters"],
        window=base["window"],
        stride=base["stride"],
        context=base["window"] - base["stride"],
        characters=100 * round(base["window"] * base["bytes"] / base["tokens"] / 100),
        sizes=_sizes(models),
        held_out_modules=", ".join(f"`{name}`" for name in text["held_out_modules"]),
        seen=text["held_out_lines_seen"],
        line=LINE,
        part=PART,
        commands=_commands(models),
        options=_options(base),
        training=_training(models),
        table=_table(models, text),
        variants=_variants(measured.get("variants", {})),
        variant_tokens=TOKENS,
        variant_questions=QUESTIONS,
        rows=CALIBRATION[0],
        tokens_of_a_row=CALIBRATION[1],
        steps=STEPS,
        speed=_speed(measured.get("speed", {})),
        speed_what=measured.get("speed", {}).get("what", "not measured"),
        speed_rounds=measured.get("speed", {}).get("rounds", 0),
        samples=_samples(base),
        temperature=SAMPLE["temperature"],
        top_k=SAMPLE["top_k"],
        seed=SAMPLE["seed"],
    )
    (home / "README.md").write_text(card, encoding="utf-8")
    return home / "README.md"


def draw_curve(models, file):
    """The loss of every model's training, and its held-out bits, as an SVG file."""
    import matplotlib

    from utils.drawing import figures

    fig, axes = figures.figure("normal", columns=2)
    for name, facts in models.items():
        for ax, key in zip(axes, ("loss", "held_out_bits")):
            steps, values = zip(*facts.get("training", {}).get(key) or [(0, float("nan"))])
            ax.plot(steps, values, marker="o" if key == "held_out_bits" else None, label=name)
    axes[0].set(xlabel="step", ylabel="nats per token", title="training loss")
    axes[1].set(xlabel="step", ylabel="bits per byte", title="held-out text")
    axes[0].legend()
    with matplotlib.rc_context({"svg.hashsalt": "kintsugi"}):  # equal figures, equal files
        fig.savefig(file, format="svg", metadata={"Date": None})
    figures.plt.close(fig)


# ---- the parts that are tables


def _rows(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _sizes(models):
    return _rows(
        ["model", "parameters", "layers", "hidden size", "heads", "file"],
        [
            [
                f"`{name}`",
                f"{m['parameters']:,}",
                m["layers"],
                m["hidden"],
                m["heads"],
                f"{m['file_bytes'] / 1e6:.1f} MB",
            ]
            for name, m in models.items()
        ],
    )


def _commands(models):
    options = models["base"].get("training", {}).get("options", {})
    steps = f" --steps {options['steps']}" if options.get("steps") else ""
    return "\n".join(
        [
            "make base-model",
            f"python -m models.build train{steps}    # the first part of it",
        ]
    )


def _options(base):
    given = base.get("training", {}).get("options")
    if given is None:
        return "The run's options were not kept."
    rate = LEARNING_RATES[given["optimizer"]] if given["lr"] is None else given["lr"]
    return (
        f"{given['batch']} windows of {given['seq']} tokens a step, {given['precision']} autocast, "
        f"Muon at {rate} on the matrices of the blocks with weight decay {given['weight_decay']}, "
        f"AdamW at {given['adamw_lr']} on the rest."
    )


def _training(models):
    return _rows(
        ["model", "steps", "tokens", "seconds"],
        [
            [f"`{name}`", *(f"{m['training'][key]:,}" for key in ("steps", "tokens", "seconds"))]
            for name, m in models.items()
            if "training" in m
        ],
    )


def _table(models, text):
    rows = []
    for name, facts in models.items():
        ngram = text["ngrams"].get(name)
        beside = (
            f"{ngram['bits_per_byte']:.3f} (order {ngram['order']}, "
            f"{ngram['file_bytes'] / 1e6:.1f} MB)"
            if ngram
            else "–"
        )
        size = f"{facts['file_bytes'] / 1e6:.1f} MB"
        rows.append([f"`{name}`, {size}", f"**{facts['bits_per_byte']:.3f}**", beside])
    rows += [[name, f"{bits:.3f}", ""] for name, bits in text["bits_per_byte"].items()]
    return _rows(["", "bits per byte", "n-grams of the same size"], rows)


def _variants(models):
    """One row for each variant of each model."""
    rows = []
    for name, variants in models.items():
        for one in variants:
            mean, low, high = one["cost"]
            more = f"{mean:+.4f} ({low:+.4f} to {high:+.4f})" if one is not variants[0] else ""
            size, bits = f"{one['bytes'] / 1e6:.1f}", f"{one['bits_per_byte']:.4f}"
            right = [f"{one['tasks'][task][0]:.0%}" for task in ASKED]
            rows.append([f"`{name}`, {one['variant']}", size, bits, more, *right])
    return _rows(["variant", "MB", "bits per byte", "cost", *ASKED], rows)


def _speed(found):
    """Tokens a second of each contender, as ratios."""
    many, others = found.get("requests", []), ("of fp32", "of CTranslate2")
    rows = [
        [one["name"], *(f"{ratio:.2f}" for of in others for ratio in one.get(of, []))]
        for one in found.get("contenders", [])
    ]
    heads = [f"{of}, {count} at once" for of in others for count in many]
    return _rows(["", *heads], [row + [""] * (1 + len(heads) - len(row)) for row in rows])


def _samples(base):
    blocks = []
    for sample in base["samples"]:
        whole = (sample["prompt"] + "⟫" + sample["text"]).rstrip()
        blocks.append("````\n" + whole + "\n````")
    return "The prompt ends at ⟫.\n\n" + "\n\n".join(blocks)
