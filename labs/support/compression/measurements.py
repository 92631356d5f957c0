"""Given: the results of your functions on larger models, for the notebook's figures.

Each runs in its own process and returns None if the answer is not ready.
"""

import copy
import functools
import math
import random
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import nn

from labs.support.compression import blocks, drawn
from labs.support.compression.blocks import READERS
from utils.compression.prune import without_heads
from utils.course.runner import attempted
from utils.data import corpus
from utils.models import shipped
from utils.models.gpt import GPT, cross_entropy

SECONDS = 200.0
N, K = 1024, 4096  # sizes of the linear layer whose bytes are counted
TEXT = 400_000  # bytes to train on, and a tenth as many to measure on
ROWS, T, STEPS, EVERY = 8, 64, 40, 8
LEFT = ([1], [1], [0], [1], [1])  # the more important head of each layer of models/small
LR = 2e-3


def of_an_answer(measure: Callable[[ModuleType], dict]) -> Callable[[str], dict | None]:
    """Make a function of a file from a function of the answer in it."""

    @functools.wraps(measure)
    def asked(file: str) -> dict | None:
        found = attempted(file, 1, measure, seconds=SECONDS)
        return found and found[0]

    return asked


def _bits(model: GPT, held_out: list) -> float:
    return drawn.loss(model, held_out) / math.log(2)


# ---- a


@of_an_answer
def layer(answer) -> dict:
    """Bytes of a linear layer's state in fp32 and as your Int8Linear, and the relative error."""
    blocks.whole_products()
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(K, N, bias=False)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(N, K, generator=generator) / K**0.5)
    x = torch.randn(64, K, generator=generator)
    whole = answer.Int8Linear(linear, answer.calibrate([x]))
    with torch.no_grad():
        error = (whole(x) - linear(x)).norm() / linear(x).norm()
    state = {"fp32": linear.state_dict(), "int8": whole.state_dict()}
    bytes_ = {name: sum(t.nbytes for t in some.values()) for name, some in state.items()}
    return bytes_ | {"error": error.item()}


# ---- b


@of_an_answer
def channels(answer) -> dict:
    """models/tiny with an outlier channel after each norm, 100 times the median, before and after
    your smoothing. Held-out bits per token: "floats", "int8", "smoothed". For the first norm: its
    channels "before" and "after", and the outliers "planted" and "found"."""
    model, draw = copy.deepcopy(drawn.tiny()[0]), random.Random(0)
    calibration, held_out = drawn.batches(0, 4, 4)
    layers, inputs = model.model.layers, blocks.inputs_of(model, calibration)
    planted = []
    for block, x in zip(layers, inputs):
        for norm, largest in answer.observe(block, x).items():
            channel = draw.randrange(len(largest))
            factor = 100 * (largest.median() / largest[channel]).item()
            blocks.plant(block, [channel], [factor], norm)
            planted.append(channel)
    found = {"planted": planted[:1], "floats": _bits(model, held_out)}

    def measured() -> tuple[list, float]:
        seen = [answer.observe(block, x) for block, x in zip(layers, inputs)]
        return seen, _bits(blocks.rounded(model, seen), held_out)

    seen, found["int8"] = measured()
    first = next(iter(READERS))
    found |= {"before": seen[0][first].tolist(), "found": answer.outliers(seen[0][first])}
    for block, some in zip(layers, seen):
        answer.smooth(block, some)
    seen, found["smoothed"] = measured()
    return found | {"after": seen[0][first].tolist()}


# ---- c


@of_an_answer
def heads(answer) -> dict:
    """models/small with one of its two heads left in each layer. Bytes "before" and "after";
    held-out bits per token with "all heads", "yours" and "the others"."""
    model = shipped.load("small")[0]
    calibration, held_out = drawn.batches(0, 4, 8)
    scores = torch.as_tensor(answer.importance(model, calibration))
    small = answer.prune(model, calibration, 1)
    others = without_heads(model, scores.argmin(dim=1, keepdim=True).tolist())
    sizes = (sum(p.nbytes for p in m.parameters()) for m in (model, small))
    found = dict(zip(("before", "after"), sizes))
    models = {"all heads": model, "yours": small, "the others": others}
    return found | {name: _bits(some, held_out) for name, some in models.items()}


# ---- d


class _Watched(list):
    """Batches that measure the student after every few of them."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for step, batch in enumerate(super().__iter__()):
            if step % EVERY == 0:
                self.seen.append(_bits(self.student, self.held_out))
            yield batch
        self.seen.append(_bits(self.student, self.held_out))


@of_an_answer
def curves(answer) -> dict:
    """Held-out bits per token of models/small ("teacher") and, by step, of a student with half of
    its heads: with your `distill`, and with as many steps of Adam on tokens only."""
    few = torch.zeros(1, 1, 2)
    answer.distillation_loss(few, few, few[..., 0].long())  # a stub raises before any text is read
    teacher, tokenizer = shipped.load("small")
    texts = [part[: TEXT // size] for part, size in zip(corpus.load_split("library"), (1, 10))]
    learn, unseen = (
        torch.tensor(tokenizer.encode(text.numpy().tobytes().decode("utf-8", "ignore")))
        for text in texts
    )
    held_out = list(corpus.held_out_batches(unseen, T, 16, limit=64))
    found = {"steps": list(range(0, STEPS + 1, EVERY)), "teacher": _bits(teacher, held_out)}
    for name, train in (
        ("with the teacher", lambda s, b: answer.distill(teacher, s, b, lr=LR)),
        ("without", lambda s, b: drawn.trained(s, b, LR, lambda s, x, y: cross_entropy(s(x), y))),
    ):
        student = without_heads(teacher, LEFT)
        batches = _Watched(corpus.batch(learn, step, ROWS, T) for step in range(STEPS))
        batches.student, batches.held_out, batches.seen = student, held_out, []
        train(student, batches)
        found[name] = batches.seen
    return found
