"""Writes the model card models/base/README.md and its loss curve, only from measured.json."""

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

A language model of {parameters:,} parameters that knows one thing: Python's standard library. The
lessons tune, compress and serve it; it is small enough for two CPU cores. `models/small` and
`models/tiny` are smaller versions; this card describes all three. `python -m models.build card`
writes it from the results of `python -m models.build measure`.

```python
from utils.models.shipped import load

model, tokenizer = load("base")
```

Or with `transformers`: `AutoModelForCausalLM.from_pretrained("models/base")` and
`AutoTokenizer.from_pretrained("models/base")`.

## What it is

{sizes}

A decoder in Llama's layout (RMSNorm, rotary positions, SwiGLU, one matrix for the embedding and the
output layer), with weights in bf16 and a context of at most {window} tokens. All three share one
tokenizer: a byte-level BPE of {vocabulary:,} tokens, trained on the training text; `<|end|>`
separates documents.

## What it learned from

The standard library of CPython {python}, as included in every installation: the source of its
modules, a reference page generated from each (names, signatures, docstrings), pages of some modules
written in C, and the topics of the language reference. Test suites, tables, and packages that some
distributions ship separately (tkinter, idlelib, lib2to3, ensurepip, distutils, venv) are left out.
Identical texts are kept once. `utils/data/library.py` collects it:

| | |
| --- | --- |
| documents | {documents:,} |
| bytes | {bytes:,}, of which {held_out_bytes:,} held out |
| tokens | {train_tokens:,} to train on, {held_out_tokens:,} held out |
| sha256 of the text | `{sha256}` |

Modules are ordered by the sha256 of their name, and the last 5 %, in whole modules, are never
trained on: {held_out_modules}. Python repeats itself, so {seen:.0%} of the held-out lines of at
least {line} characters also occur verbatim somewhere in the training text. In addition, a docstring
occurs twice in the text, in the reference page and in the source that follows: xz still remembers
the first occurrence at the second, but a model that sees {window} tokens mostly does not.

Another release of Python has a different text (3.12, for instance, lacks asynchat, asyncore, imp
and smtpd and has new modules), so it gives another tokenizer and other figures. `measure` and the
tests compare the sha256 first.

## How it was trained

```
{commands}
```

{options} The learning rate rises over the first 2 % of the steps and falls over the second half.

{training}

![Loss of the three models during training](loss.svg)

The training loss is on text that the model may have seen before; the points are bits per byte of
held-out text.

## How good it is

Bits per byte of the held-out text, {held_out_bytes:,} bytes: lower is better. The models read it in
windows of {window} tokens with a stride of {stride}, so every token is predicted once, from at
least {context} tokens before it (fewer at the very beginning).

{table}

The n-gram model (interpolated Kneser-Ney, `models/build/ngram.py`, the same tokens and training
text) has the highest order for which its compressed file is no larger than the model's file in the
same row.

```
python -m models.build measure              # all of it, minutes
python -m pytest tests/models/test_build.py    # the first {part:,} held-out tokens, compared
```

## In fewer bits

The methods of [lesson 15](../../notebooks/15_compression.ipynb) applied to the models, on the first
{variant_tokens:,} held-out tokens, and on {variant_questions} questions of two tasks of lesson 14,
without examples. MB is the size of the weights' file, all of which each token reads. The cost is
the increase in bits per byte over the same model in 16 bits, on the same windows, with its 95 %
interval.

{variants}

int3 and int4 have one scale per 32 columns; calibrated scales cover 99.99 % of all activations of
{rows} rows of {tokens_of_a_row} tokens; distillation takes {steps} steps, and twice as many when
`small` is trained further.

And the speed, in tokens per second: {speed_what}.
Ratios are medians over {speed_rounds} rounds in which all take turns; higher is faster.

{speed}

```
python -m models.build measure --only variants    # a quarter of an hour
python -m models.build measure --only speed       # minutes; with CTranslate2 if it is installed
```

## Samples

Temperature {temperature}, the {top_k} likeliest tokens, seed {seed}; the samples were not selected.
Another machine may round differently and then draw other tokens.

{samples}

## Limits

- It has read only 10 MB: it knows no facts about the world, and no languages except Python and the
  English of its documentation. Apparent explanations may be wrong, and its code may not run.
- It was not trained to follow instructions. Give it the beginning of a text, or examples.
- It sees {window} tokens, about {characters:,} characters.
- It can repeat passages of its training text word for word.
- It is for teaching only. Nothing was done to make its output safe or fair.

## Licence

The text is part of CPython and under the Python Software Foundation License Version 2, with the
notices for the parts contributed by others (<https://docs.python.org/3/license.html>). The weights
were trained only on that text and are distributed under the same terms.
"""


def write_card(folder):
    """Writes folder/base/README.md and its figure; returns the card's path.

    Raises CheckpointError (a ValueError) if a measurement is missing.
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
    """Draws every model's training loss and held-out bits into an SVG file."""
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
        return "The run's options were not recorded."
    rate = LEARNING_RATES[given["optimizer"]] if given["lr"] is None else given["lr"]
    return (
        f"{given['batch']} windows of {given['seq']} tokens per step, "
        f"{given['precision']} autocast, Muon at {rate} on the matrices of the blocks with weight "
        f"decay {given['weight_decay']}, AdamW at {given['adamw_lr']} on the rest."
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
    """One row per variant of each model."""
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
    """Tokens per second of each contender, as ratios."""
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
