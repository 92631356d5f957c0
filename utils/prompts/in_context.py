"""In-context learning: how often a language model is right after it has seen k worked examples.

    print(few_shot(task, shots=2, question=question))       # the text that the model goes on from
    learned = curve(model, tokenizer, task, shots=(0, 1, 2, 4, 8), questions=64)
    learned[4].mean, learned[4].low, learned[4].high        # accuracy, with its 95 % interval

No weight changes. An answer is judged in one of two ways. Where there are choices, the right one
must be the likeliest: the sum of its tokens' log probabilities is the highest. Where any text is
an answer, greedy decoding must give exactly the right one and then end the line; that needs no
decoding, because greedy decoding gives an answer exactly if each of its tokens is the likeliest
after those before it, so one forward pass tells.

The passes are shared: a row of k + 1 examples is read once and gives the answers after 0, 1, ... k
examples, since under causal attention no token sees what comes after it.
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

Case = tuple[tuple[int, ...], Question]  # the tokens of a context, and what is asked behind it
TOKENS = 4096  # that are read at once: more fits the memory, but not the processor's caches
Z = 1.959964  # 95 % of a normal distribution lie within so many standard deviations


# ---- 1. from examples to text and tokens


def few_shot(task: Task, shots: int, seed: int = 0, question: Question | None = None) -> str:
    """The text of a few-shot prompt: `shots` examples to learn from, and then a question's input.

    question None: only the examples. Zero shots: only the question.
    """
    shown = task.examples(seed, shots)
    text = "".join(example.input + example.output + task.between for example in shown)
    return text + (question.input if question else "")


def context(
    task: Task, tokenizer: Tokenizer, shown: Sequence[Question], question: Question
) -> tuple[int, ...]:
    """The same as tokens, a tuple of ints, for examples that are chosen already. It starts with
    the end token, if there is one: in training a new document came after it. Input, output and
    what is between are encoded apart, as in prompt tuning."""
    tokens = [] if tokenizer.end is None else [tokenizer.end]
    for example in shown:
        for text in (example.input, example.output, task.between):
            tokens += tokenizer.encode(text)
    return (*tokens, *tokenizer.encode(question.input))


# ---- 2. what the model makes of it


@dataclass(frozen=True)
class Reading:
    """How a model reads some tokens after a context."""

    log_probability: float  # of all of them, in nats
    likeliest: tuple[int, ...]  # the token that it would have put in the place of each


@torch.no_grad()
def read(model: GPT, wanted: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Reading]:
    """Readings of (context, tokens) pairs, in their order; both are tuples of token ids.

    Pairs that begin alike are read in one row. The model is a GPT, also with a prompt put in or
    with adapters; it runs on the device of its weights.
    """
    # the last token is only predicted, never read
    order = sorted(range(len(wanted)), key=lambda n: wanted[n][0] + wanted[n][1][:-1])
    rows, places = [], {}
    for n in reversed(order):  # what begins with a row comes right after it in this order
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
    """Numbers of rows that are read together: of like length, TOKENS tokens at most."""
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
    tokens = torch.zeros(len(rows), length, dtype=torch.long)  # filled up on the right: unseen
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
    logits = model.lm_head(hidden[row, place]).float()  # the last matrix only where it is needed
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

    calibrate   a choice's probability is divided by its mean over all cases, so that a word which
                the model likes everywhere is not always the answer (batch calibration, Zhou et al.
                2023, arXiv:2309.17249). It needs the same choices in every case, and no labels.
    exact       also where there are choices, greedy decoding must say the right one, out of all
                that could be said; what comes after it is not looked at
    stop        the first sign of what must come after an answer without choices, or the end token
    """
    after = tokenizer.encode(stop)[:1]  # it holds the place: what the model puts there is read
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
    """Whether greedy decoding says the answer, and then ends it where any text may be one."""
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
    """A share of right answers and its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self):
        return f"{self.mean:.0%} ({self.low:.0%} to {self.high:.0%})"


def accuracy(right: Sequence[bool]) -> "Accuracy":
    """The Accuracy of [right or wrong]; its interval is Wilson's (1927), which holds near 0 and 1
    and for few questions too. Raises ValueError when nothing was asked."""
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
    """{number of shots: Accuracy} on `questions` held-out questions, each asked once a number.

    Every question is asked behind examples of its own, so the interval covers the luck of drawing
    them too. The examples are held-out questions as well: nothing is learned from them but here.
    judging: `calibrate` or `exact` of `judge`.
    """
    cases = cases_of(task, tokenizer, shots, questions, seed)
    judging["stop"] = task.between[0]
    if judging.get("calibrate"):  # each number of shots has a prior of its own
        right = [judge(model, tokenizer, each, **judging) for each in cases.values()]
    else:  # all in one reading: it is here that the rows are shared
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
    """{number of shots: nats of the right answer, on average}, on the same cases as `curve`.

    It falls as soon as examples help, even while another answer is still the likeliest.
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
    """`questions` rows of `length` held-out questions; at each place of the rows every question
    stands once. Raises ValueError when the rows are longer than the questions reach."""
    if questions < length:
        raise ValueError(
            f"{questions} questions do not fill rows of {length}: ask {length} or more, "
            "or show fewer examples"
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
    """[Accuracy] of `count` draws of `shots` training examples, the same held-out questions behind
    each: how much hangs on which examples are shown."""
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
    """Accuracy of a model that was tuned on such questions, or that has a prompt put in: the
    context is the question's input alone, as it was in tuning."""
    cases = [(tuple(tokenizer.encode(question.input)), question) for question in questions]
    return accuracy(judge(model, tokenizer, cases, **judging))
