"""Measures compressed variants of the models: the table of the model card and of lesson 15.

    python -m models.build measure --only variants

Every variant reads the same held-out windows and answers the same questions. Bytes are those of the
weights' file; each token reads all of them, because the embedding is also the output matrix.
"""

from contextlib import nullcontext

import torch

from utils.compression import INT4, INT8, Scheme, prune
from utils.compression.calibrate import gptq, observe, static_scales
from utils.compression.distill import DistillConfig, distill
from utils.compression.evaluate import cost, held_out
from utils.compression.matrices import (
    first_reader,
    matrices,
    quantized,
    rounded,
    rounded_inputs,
    size,
)
from utils.data import corpus
from utils.models.shipped import SIZES, load
from utils.prompts.in_context import curve
from utils.prompts.tasks import TASKS

TOKENS = 16_384  # of the held-out text
QUESTIONS, ASKED = 128, ("except", "guard")
CALIBRATION = 32, 256  # rows of the training text, and their tokens
STEPS = 60  # of distillation


def variants(folder) -> dict[str, list[dict]]:
    """{model: [facts of a variant]} of all models in a folder, first of the unchanged model."""
    return {
        name: [{"variant": label} | facts for label, facts in _rows(name, folder)] for name in SIZES
    }


def _rows(name, folder):
    model, tokenizer = load(name, folder)
    train, text = corpus.load_split("library", tokenizer)
    text = text[:TOKENS]
    starts = torch.linspace(0, len(train) - CALIBRATION[1] - 1, CALIBRATION[0]).long()
    rows = torch.stack([train[start : start + CALIBRATION[1]].long() for start in starts])
    seen = observe(model, rows)
    before = held_out(model, tokenizer, text)

    def facts(one, stored, inputs=None):
        with inputs or nullcontext():
            score = held_out(one, tokenizer, text)
            right = {task: curve(one, tokenizer, TASKS[task], (0,), QUESTIONS)[0] for task in ASKED}
        more = cost(score, before)
        print(f"{name}: {score.bits_per_byte:.4f} bits per byte, {more}", flush=True)
        return {
            "bytes": stored,
            "bits_per_byte": round(score.bits_per_byte, 5),
            "cost": [round(bits, 5) for bits in (more.mean, more.low, more.high)],
            "tasks": {task: [one.mean, one.low, one.high] for task, one in right.items()},
        }

    yield "16 bits", facts(model, size(model))
    for label, scheme in (("int8", INT8), ("int4", INT4), ("int3", Scheme(3, "group", 32))):
        yield label, facts(quantized(model, scheme), size(model, scheme))
    ahead = rounded(model, lambda n, w: gptq(w, seen[first_reader(n)].gram, INT4).dequantize())
    yield "int4, GPTQ", facts(ahead, size(model, INT4))
    int8 = quantized(model, INT8)
    yield "int8, activations dynamic", facts(int8, size(model, INT8), rounded_inputs(int8))
    static = rounded_inputs(int8, static_scales(seen, 99.99))
    yield "int8, activations calibrated", facts(int8, size(model, INT8), static)
    if name == "small":
        teacher, _ = load("base", folder)
        config = DistillConfig(steps=2 * STEPS, lr=2e-3, adamw_lr=3e-4)
        for label, one in (("trained further, taught by base", teacher), ("trained further", None)):
            yield label, facts(distill(model, one, train, config), size(model))
    if name != "base":
        return
    scores = {
        n: prune.wanda(linear.weight, seen[first_reader(n)])
        for n, linear in matrices(model).items()
    }
    yield (
        "2:4 zeros, Wanda",
        facts(rounded(model, lambda n, w: w * prune.two_of_four(scores[n])), size(model)),
    )
    columns = prune.column_importance(model, rows[:16])
    thin = prune.without_columns(model, [c.topk(c.numel() * 3 // 4).indices for c in columns])
    losses = prune.layer_importance(model, rows[:8])
    order = sorted(range(len(losses)), key=losses.__getitem__)
    for label, student in (
        ("3/4 of the columns", thin),
        ("two layers out", prune.without_layers(model, order[:2])),
    ):
        yield label, facts(student, size(student))
        taught = distill(student, model, train, DistillConfig(steps=STEPS))
        yield f"{label}, distilled", facts(taught, size(taught))
        alone = distill(student, None, train, DistillConfig(steps=STEPS))
        yield f"{label}, trained alone", facts(alone, size(alone))
