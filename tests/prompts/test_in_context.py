"""In-context accuracy: shared reading equals separate reading, and judging equals decoding."""

import math
import random

import pytest
import torch

from utils.models.config import GPTConfig
from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.prompts import PromptConfig, in_context, prompted, tune
from utils.prompts.in_context import (
    Accuracy,
    accuracy,
    context,
    curve,
    draws,
    few_shot,
    judge,
    read,
)
from utils.prompts.lora import PeerConfig, tune_weights
from utils.prompts.tasks import TASKS, Question, Task

pytestmark = pytest.mark.usefixtures("one_thread")

WORDS = ("red", "green", "blue", "black")


def draw(rng):
    text = "".join(rng.choice("abcdefgh") for _ in range(6))
    return Question(f"{text}=", rng.choice(WORDS))


def draw_choice(rng):
    text = "".join(rng.choice("abcdefgh") for _ in range(6))
    return Question(f"{text}=", rng.choice(WORDS), choices=WORDS)


COLORS = Task("colors", "Which color?", draw)
CHOICES = Task("choices", "Which of the colors?", draw_choice)


def small(seed=0, vocab=256):
    torch.manual_seed(seed)
    return GPT(GPTConfig(vocab_size=vocab, hidden_size=32, layers=2, heads=2, max_positions=256))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["red green blue black abc=red cde=green\n" * 4], size=280)


@pytest.fixture(scope="module")
def taught(tokenizer):
    """A model that has memorized some answers, those questions, and as many held-out ones."""
    examples = COLORS.examples(0, 12)
    config = PeerConfig("full", lr=5e-3, steps=40, batch=12)
    tuned, _ = tune_weights(small(vocab=tokenizer.size), tokenizer, examples, config)
    return tuned, examples + COLORS.examples(0, 12, held_out=True)


def alone(model, tokens, answer):
    """What `read` returns for one pair, by definition and in one row."""
    logits = model(torch.tensor([tokens + answer]))[0, len(tokens) - 1 : -1]
    chosen = logits.log_softmax(dim=-1)[range(len(answer)), list(answer)]
    return chosen.sum().item(), tuple(logits.argmax(dim=-1).tolist())


def test_shared_reading_equals_reading_alone():
    model, rng = small(), random.Random(0)
    stem = tuple(rng.randrange(256) for _ in range(40))
    wanted = [(stem[:n], tuple(rng.randrange(256) for _ in range(m)))
              for n in (1, 7, 8, 40) for m in (1, 2, 5)]
    wanted += [(stem[:7], stem[7:9]), (stem[:7], stem[7:12]), wanted[0]]
    for pair, reading in zip(wanted, read(model, wanted)):
        log_probability, likeliest = alone(model, *pair)
        assert math.isclose(reading.log_probability, log_probability, abs_tol=1e-4)
        assert reading.likeliest == likeliest


def test_what_begins_alike_is_read_once(tokenizer):
    model, seen = small(vocab=tokenizer.size), []
    model.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    row = COLORS.examples(0, 5)
    cases = [(context(COLORS, tokenizer, row[:n], row[n]), row[n]) for n in range(5)]
    judge(model, tokenizer, cases)
    assert len(seen) == 1 and seen[0][0] == 1  # five questions, one row
    # choices of several tokens need rows of their own; choices of one token do not
    one_token = [Question("ab", "c", choices=("c", "d", "e"))]
    judge(model, tokenizer, [(tuple(tokenizer.encode("ab")), q) for q in one_token])
    assert seen[1] == (1, len(tokenizer.encode("ab")))


def test_batches_hold_every_row_once_and_are_not_too_large(monkeypatch):
    monkeypatch.setattr(in_context, "TOKENS", 20)
    rows = [(0,) * n for n in (3, 9, 1, 30, 4, 4, 10)]
    batches = list(in_context._batches(rows))
    assert sorted(number for batch in batches for number in batch) == list(range(len(rows)))
    assert all(len(b) == 1 or len(b) * max(len(rows[n]) for n in b) <= 20 for b in batches)


def test_exact_answers_are_those_of_greedy_decoding(taught, tokenizer):
    model, questions = taught
    cases = [(tuple(tokenizer.encode(q.input)), q) for q in questions]
    right = judge(model, tokenizer, cases)
    decoded = []
    for tokens, question in cases:
        new = model.generate(torch.tensor([tokens]), 8, temperature=0)[0, len(tokens) :].tolist()
        text = tokenizer.decode(new).split("<|end|>")[0].split("\n")[0]
        decoded.append(text == question.output)
    assert right == decoded
    assert 3 < sum(right) < len(right)  # both right and wrong answers


def test_a_choice_is_the_likeliest_whole_answer(taught, tokenizer):
    model, questions = taught
    for question in questions[::4]:
        tokens = tuple(tokenizer.encode(question.input))
        sums = {w: alone(model, tokens, tuple(tokenizer.encode(w)))[0] for w in WORDS}
        asked = Question(question.input, question.output, choices=WORDS)
        assert judge(model, tokenizer, [(tokens, asked)]) == [
            max(sums, key=sums.get) == question.output
        ]


def test_calibration_divides_by_the_mean_probability(tokenizer):
    model = small(vocab=tokenizer.size)
    questions = CHOICES.examples(0, 16)
    cases = [(tuple(tokenizer.encode(q.input)), q) for q in questions]
    p = torch.tensor(
        [[alone(model, c, tuple(tokenizer.encode(w)))[0] for w in WORDS] for c, _ in cases]
    ).exp()
    best = (p / p.mean(dim=0)).argmax(dim=1).tolist()
    assert judge(model, tokenizer, cases, calibrate=True) == [
        WORDS[b] == q.output for b, q in zip(best, questions)
    ]
    assert len(set(p.argmax(dim=1).tolist())) < len(set(best))  # uncalibrated, fewer words win
    with pytest.raises(ValueError, match="calibrate needs the same choices"):
        judge(model, tokenizer, [((1,), COLORS.examples(0, 1)[0])], calibrate=True)


def test_a_prompt_in_front_is_read_like_tokens(tokenizer):
    model, words = small(vocab=tokenizer.size), (5, 6, 7)
    prompt = model.model.embed_tokens.weight[list(words)].detach()
    wanted = [((1, 2, 3), (4, 5)), ((1, 2), (3,)), ((9,), (8, 7, 6))]
    with prompted(model, prompt):
        ours = read(model, wanted)
    for (tokens, answer), reading in zip(wanted, ours):
        log_probability, likeliest = alone(model, words + tokens, answer)
        assert math.isclose(reading.log_probability, log_probability, abs_tol=1e-4)
        assert reading.likeliest == likeliest


def test_tuned_prompt_is_measured(taught, tokenizer):
    model, questions = taught
    blue = [Question(q.input, "blue", choices=WORDS) for q in questions]
    before = in_context.tuned(model, tokenizer, blue)
    prompt, _ = tune(model, tokenizer, blue, PromptConfig(length=8, lr=0.1, steps=30, batch=8))
    with prompted(model, prompt):
        after = in_context.tuned(model, tokenizer, blue)
    assert after.mean > before.mean + 0.3 and after.count == len(blue)


def test_few_shot_text():
    task = TASKS["type"]
    shown, question = task.examples(3, 2), task.examples(0, 1, held_out=True)[0]
    parts = [e.input + e.output + task.between for e in shown]
    assert few_shot(task, 2, seed=3, question=question) == "".join(parts) + question.input
    assert few_shot(task, 0, question=question) == question.input


def test_context_is_the_few_shot_text(tokenizer):
    row = COLORS.examples(0, 3)
    tokens = context(COLORS, tokenizer, row[:2], row[2])
    assert tokenizer.decode(tokens) == "<|end|>" + few_shot(COLORS, 2, question=row[2])
    assert bytes(context(COLORS, Tokenizer(), row[:1], row[1])).decode() == few_shot(
        COLORS, 1, question=row[1]
    )


def test_wilson_interval():
    # Wilson's score interval solves |p - x| = z sqrt(x (1 - x) / n) for x
    for right, count in ((0, 10), (7, 10), (50, 100), (64, 64)):
        found = accuracy([True] * right + [False] * (count - right))
        assert found.mean == right / count and found.count == count
        for bound in (found.low, found.high):
            if 0 < bound < 1:
                reach = in_context.Z * math.sqrt(bound * (1 - bound) / count)
                assert math.isclose(abs(found.mean - bound), reach, rel_tol=1e-9)
    assert accuracy([False] * 10).low == 0
    assert accuracy([True] * 10).high == pytest.approx(1, abs=1e-12)
    assert str(Accuracy(0.5, 0.4, 0.6, 96)) == "50% (40% to 60%)"
    with pytest.raises(ValueError, match="accuracy of no answers"):
        accuracy([])


def test_every_question_is_asked_once_at_each_place():
    rows = in_context.rows_of(COLORS, questions=20, length=5, seed=1)
    pool = {q.input for q in COLORS.examples(1, 20, held_out=True)}
    for place in range(5):
        assert {row[place].input for row in rows} == pool
    assert all(len({q.input for q in row}) == 5 for row in rows)
    assert rows == in_context.rows_of(COLORS, questions=20, length=5, seed=1)
    with pytest.raises(ValueError, match="4 questions do not fill rows of 5"):
        in_context.rows_of(COLORS, questions=4, length=5)


@pytest.mark.parametrize("task", [COLORS, CHOICES])
def test_curve_is_the_accuracy_of_its_rows(task, taught, tokenizer):
    model, _ = taught
    found = curve(model, tokenizer, task, shots=(0, 3), questions=12)
    rows = in_context.rows_of(task, 12, 4)
    for shots in (0, 3):
        cases = [(context(task, tokenizer, row[:shots], row[shots]), row[shots]) for row in rows]
        assert found[shots] == accuracy(judge(model, tokenizer, cases))
    exact = curve(model, tokenizer, task, shots=(3,), questions=12, exact=True)
    assert exact[3] == accuracy(judge(model, tokenizer, cases, exact=True))
    if task is CHOICES:
        calibrated = curve(model, tokenizer, task, shots=(0, 3), questions=12, calibrate=True)
        assert calibrated[3] == accuracy(judge(model, tokenizer, cases, calibrate=True))


def test_surprise_is_the_mean_of_the_right_answers_nats(taught, tokenizer):
    model, _ = taught
    found = in_context.surprise(model, tokenizer, COLORS, shots=(0, 2), questions=6)
    for shots, row in in_context.cases_of(COLORS, tokenizer, (0, 2), 6).items():
        nats = [-alone(model, c, tuple(tokenizer.encode(q.output)))[0] for c, q in row]
        assert found[shots] == pytest.approx(sum(nats) / 6, abs=1e-4)


def test_an_exact_answer_must_stop_where_it_should(taught, tokenizer):
    model, questions = taught
    cases = [(tuple(tokenizer.encode(q.input)), q) for q in questions]
    # the model was tuned to end its answers with the end token, so no other stop matters
    assert judge(model, tokenizer, cases) == judge(model, tokenizer, cases, stop="'")
    # among choices, only the answer itself counts, and it must be the likeliest of all tokens
    asked = [(c, Question(q.input, q.output, choices=WORDS)) for c, q in cases]
    greedy = [alone(model, c, tuple(tokenizer.encode(q.output)))[1] for c, q in asked]
    assert judge(model, tokenizer, asked, exact=True) == [
        list(said) == tokenizer.encode(q.output) for said, (_, q) in zip(greedy, asked)
    ]
    # of a longer answer, it gives only the beginning
    longer = [(c, Question(q.input, q.output + "ish")) for c, q in cases]
    assert not any(judge(model, tokenizer, longer))


def test_draws_show_training_examples_to_the_same_questions(taught, tokenizer):
    model, _ = taught
    found = draws(model, tokenizer, CHOICES, shots=2, questions=10, count=3)
    asked = CHOICES.examples(0, 10, held_out=True)
    shown = CHOICES.examples(1, 2)
    cases = [(context(CHOICES, tokenizer, shown, q), q) for q in asked]
    assert len(found) == 3 and found[1] == accuracy(judge(model, tokenizer, cases))
