"""In-context learning: how often a language model is right after it has seen k worked examples.

    print(few_shot(task, shots=2, question=question))       # the text that the model continues
    learned = curve(model, tokenizer, task, shots=(0, 1, 2, 4, 8), questions=64)
    learned[4].mean, learned[4].low, learned[4].high        # accuracy, with its 95 % interval

No weight changes. An answer is judged in one of two ways. If there are choices, the right one must
be the likeliest: the sum of its tokens' log-probabilities is the highest. If any text can be an
answer, greedy decoding must give exactly the right one and then end the line. This needs no
decoding: greedy decoding gives an answer if and only if each of its tokens is the likeliest after
the preceding ones, so one forward pass suffices.

Passes are shared: a row of k + 1 examples is read once and gives the answers after 0, 1, ... k
examples, since under causal attention no token sees later ones.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.prompts.tasks import Question, Task

Case = tuple[tuple[int, ...], Question]  # the tokens of a context, and the question after it
TOKENS = 4096  # read at once: more would fit in memory, but not in the processor's caches
Z = 1.959964  # 95 % of a normal distribution lie within this many standard deviations


# ---- 1. from examples to text and tokens


def few_shot(task: Task, shots: int, seed: int = 0, question: Question | None = None) -> str:
    """The text of a few-shot prompt: `shots` examples to learn from, then a question's input.

    question None: only the examples. Zero shots: only the question.
    """
    shown = task.examples(seed, shots)
    text = "".join(example.input + example.output + task.between for example in shown)
    return text + (question.input if question else "")


def context(
    task: Task, tokenizer: Tokenizer, shown: Sequence[Question], question: Question
) -> tuple[int, ...]:
    """A few-shot prompt with the examples `shown`, as token ids. It starts with the end token, if
    there is one, as new documents did in training. Input, output and separator are encoded
    separately, as in prompt tuning."""
    tokens = [] if tokenizer.end is None else [tokenizer.end]
    for example in shown:
        for text in (example.input, example.output, task.between):
            tokens += tokenizer.encode(text)
    return (*tokens, *tokenizer.encode(question.input))


# ---- 2. the model's reading


@dataclass(frozen=True)
class Reading:
    """How a model reads some tokens after a context."""

    log_probability: float  # of all of them together, in nats
    likeliest: tuple[int, ...]  # the likeliest token at the position of each


@torch.no_grad()
def read(model: GPT, wanted: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Reading]:
    """Readings of (context, tokens) pairs, in order; both are tuples of token ids.

    Pairs with a common prefix are read in one row. The model is a GPT, possibly with a prompt or
    adapters; it runs on the device of its weights.
    """
    # the last token is only predicted, never read
    order = sorted(range(len(wanted)), key=lambda n: wanted[n][0] + wanted[n][1][:-1])
    rows, places = [], {}
    for n in reversed(order):  # the prefixes of a row come right after it in this order
        row = wanted[n][0] + wanted[n][1][:-1]
        if not rows or rows[-1][: len(row)] != row:
            rows.append(row)
        places.setdefault(len(rows) - 1, []).append(n)
    readings = [None] * len(wanted)
    for numbers in _batches(rows):
        here = [(i, n) for i, row in enumerate(numbers) for n in places[row]]
        for n, reading in _read(model, [rows[row] for row in numbers], here, wanted):
            readings[n] = reading
    return readings


def _batches(rows):
    """Indices of rows to read together: of similar length, at most TOKENS tokens."""
    batch = []
    for number in sorted(range(len(rows)), key=lambda number: len(rows[number])):
        if batch and (len(batch) + 1) * len(rows[number]) > TOKENS:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def _read(model, rows, here, wanted):
    weight = model.lm_head.weight
    length = max(map(len, rows))
    tokens = torch.zeros(len(rows), length, dtype=torch.long)  # padded on the right: unseen
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    hidden = model.model(tokens.to(weight.device))
    hidden = hidden[:, hidden.shape[1] - length :]  # without the virtual tokens, if there are any
    at = [
        (i, len(wanted[n][0]) - 1 + j, token)
        for i, n in here
        for j, token in enumerate(wanted[n][1])
    ]
    row, place, target = torch.tensor(at, device=weight.device).T
    logits = model.lm_head(hidden[row, place]).float()  # logits only where they are needed
    likeliest = logits.argmax(dim=-1).tolist()
    chosen = logits.log_softmax(dim=-1).gather(1, target[:, None])[:, 0].tolist()
    start = 0
    for _, n in here:
        stop = start + len(wanted[n][1])
        yield n, Reading(math.fsum(chosen[start:stop]), tuple(likeliest[start:stop]))
        start = stop


# ---- 3. right or wrong


def judge(
    model: GPT,
    tokenizer: Tokenizer,
    cases: Sequence[Case],
    calibrate: bool = False,
    exact: bool = False,
    stop: str = "\n",
) -> list[bool]:
    """[whether the model is right] for cases (context tokens, Question).

    calibrate   divide a choice's probability by its mean over all cases, so that a word that the
                model prefers everywhere is not always the answer (batch calibration, Zhou et al.
                2023, arXiv:2309.17249). Needs the same choices in every case, but no labels.
    exact       even if there are choices, greedy decoding must give the right one, among all
                possible texts; whatever follows it is ignored
    stop        the character, or else the end token, that must follow an answer without choices
    """
    after = tokenizer.encode(stop)[:1]  # a placeholder: the model's likeliest token there is read
    wanted, parts = [], []
    for tokens, question in cases:
        texts = question.choices if not exact else ()
        answers = [tuple(tokenizer.encode(text)) for text in texts or (question.output,)]
        if not question.choices:
            answers = [(*answers[0], *after)]
        parts.append((len(wanted), len(wanted) + len(answers)))
        wanted += [(tuple(tokens), answer) for answer in answers]
    readings = read(model, wanted)
    prior = None
    if calibrate:
        prior = _prior([[r.log_probability for r in readings[a:b]] for a, b in parts], cases)
    return [
        _chosen(question, readings[a:b], prior)
        if question.choices and not exact
        else _said(tokenizer, question, readings[a].likeliest, stop)
        for (_, question), (a, b) in zip(cases, parts)
    ]


def _chosen(question, readings, prior):
    scores = [reading.log_probability for reading in readings]
    if prior is not None:
        scores = [score - before for score, before in zip(scores, prior)]
    best = max(range(len(scores)), key=scores.__getitem__)
    return question.choices[best] == question.output


def _said(tokenizer, question, likeliest, stop):
    """Whether greedy decoding gives the answer and, if any text may be one, then ends it."""
    answer = tuple(tokenizer.encode(question.output))
    if likeliest[: len(answer)] != answer:
        return False
    if question.choices:
        return True
    return likeliest[-1] == tokenizer.end or tokenizer.decode(likeliest[-1:]).startswith(stop)


def _prior(scores, cases):
    """The log of each choice's mean probability."""
    choices = {question.choices for _, question in cases}
    if len(choices) != 1 or not all(choices):
        raise ValueError("calibrate needs the same choices in every question: leave it out here")
    table = torch.tensor(scores, dtype=torch.float64)  # (cases, choices)
    return (table.logsumexp(dim=0) - math.log(len(cases))).tolist()


# ---- 4. accuracy


@dataclass(frozen=True)
class Accuracy:
    """The fraction of right answers and its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self):
        return f"{self.mean:.0%} ({self.low:.0%} to {self.high:.0%})"


def accuracy(right: Sequence[bool]) -> "Accuracy":
    """The Accuracy of [right or wrong]; its interval is Wilson's (1927), which is valid near 0 and
    1 and for few questions. Raises ValueError for an empty list."""
    if not right:
        raise ValueError("accuracy of no answers: ask at least one question")
    n, p = len(right), sum(right) / len(right)
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    reach = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return Accuracy(p, max(0.0, middle - reach), min(1.0, middle + reach), n)


def curve(
    model: GPT,
    tokenizer: Tokenizer,
    task: Task,
    shots: Sequence[int] = (0, 1, 2, 4, 8),
    questions: int = 64,
    seed: int = 0,
    **judging: Any,
) -> dict[int, "Accuracy"]:
    """{number of shots: Accuracy} on `questions` held-out questions, each asked once per number.

    Every question follows its own examples, so the interval also covers the luck of drawing them.
    The examples are held-out questions too: the model learns from them only in context.
    judging: `calibrate` or `exact` of `judge`.
    """
    cases = cases_of(task, tokenizer, shots, questions, seed)
    judging["stop"] = task.between[0]
    if judging.get("calibrate"):  # each number of shots has its own prior
        right = [judge(model, tokenizer, each, **judging) for each in cases.values()]
    else:  # all in one reading, so that rows are shared
        flat = [case for each in cases.values() for case in each]
        right = judge(model, tokenizer, flat, **judging)
        right = [right[n * questions : (n + 1) * questions] for n in range(len(cases))]
    return {count: accuracy(each) for count, each in zip(cases, right)}


def surprise(
    model: GPT,
    tokenizer: Tokenizer,
    task: Task,
    shots: Sequence[int] = (0, 1, 2, 4, 8),
    questions: int = 64,
    seed: int = 0,
) -> dict[int, float]:
    """{number of shots: mean nats of the right answer}, on the same cases as `curve`.

    It falls as soon as examples help, even while another answer is still likelier.
    """
    cases = cases_of(task, tokenizer, shots, questions, seed)
    wanted = [
        (tokens, tuple(tokenizer.encode(question.output)))
        for each in cases.values()
        for tokens, question in each
    ]
    nats = [-reading.log_probability for reading in read(model, wanted)]
    return {
        count: math.fsum(nats[n * questions : (n + 1) * questions]) / questions
        for n, count in enumerate(cases)
    }


def cases_of(
    task: Task, tokenizer: Tokenizer, shots: Sequence[int], questions: int, seed: int = 0
) -> dict[int, list[Case]]:
    """{number of shots: [(context tokens, Question)]}, from the rows of `rows_of`."""
    rows = rows_of(task, questions, max(shots) + 1, seed)
    return {
        count: [(context(task, tokenizer, row[:count], row[count]), row[count]) for row in rows]
        for count in sorted(set(shots))
    }


def rows_of(task: Task, questions: int, length: int, seed: int = 0) -> list[list[Question]]:
    """`questions` rows of `length` held-out questions, in which every question occurs once at each
    position. Raises ValueError if `length` exceeds the number of questions."""
    if questions < length:
        raise ValueError(
            f"{questions} questions do not fill rows of {length}: give at least {length} questions "
            "or fewer shots"
        )
    pool = task.examples(seed, questions, held_out=True)
    offsets = random.Random(f"rows {seed}").sample(range(questions), length)
    return [[pool[(row + offset) % questions] for offset in offsets] for row in range(questions)]


def draws(
    model: GPT,
    tokenizer: Tokenizer,
    task: Task,
    shots: int,
    questions: int = 64,
    count: int = 5,
    seed: int = 0,
    **judging: Any,
) -> list["Accuracy"]:
    """[Accuracy] for `count` draws of `shots` training examples, each with the same held-out
    questions: how much depends on the choice of examples."""
    asked = task.examples(seed, questions, held_out=True)
    found = []
    for draw in range(count):
        shown = task.examples(seed * 1000 + draw, shots)
        cases = [(context(task, tokenizer, shown, question), question) for question in asked]
        found.append(accuracy(judge(model, tokenizer, cases, stop=task.between[0], **judging)))
    return found


def tuned(
    model: GPT, tokenizer: Tokenizer, questions: Sequence[Question], **judging: Any
) -> "Accuracy":
    """The Accuracy of a model that was tuned on such questions or has a prompt inserted: the
    context is only the question's input, as in tuning."""
    cases = [(tuple(tokenizer.encode(question.input)), question) for question in questions]
    return accuracy(judge(model, tokenizer, cases, **judging))
