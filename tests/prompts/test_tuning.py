"""Prompt tuning in one process: the loss, what learns, and the same results as `peft`."""

import math

import pytest
import torch
from torch import nn

from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.prompts import (
    Example,
    PromptConfig,
    PromptedEmbedding,
    answer,
    batch_of,
    draw_prompt,
    frozen,
    matches,
    prompt_loss,
    prompted,
    read_examples,
    tune,
)
from utils.prompts.data import IGNORED, encode, padded, rows_of_step
from utils.prompts.file import read_peft
from utils.prompts.tuning import first_prompt

CONFIG = GPTConfig(
    vocab_size=256, hidden_size=24, layers=3, heads=6, kv_heads=3, max_positions=64,
    tie_embeddings=True,
)
COLORS = {"rose": "red", "sea": "blue", "fire": "red", "sky": "blue", "ice": "blue"}
EXAMPLES = [Example(f"{name} is ", color) for name, color in COLORS.items()]


class Bytes:
    """Byte tokens, as in `utils.models.tokenizer` for a folder without a tokenizer."""

    size, end = 256, None

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


TOKENIZER = Bytes()


def new_model(config=CONFIG, dtype=torch.float64, scale=5.0):
    """Make a model whose weights are large enough for attention to be selective."""
    torch.manual_seed(0)
    model = GPT(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(scale)
    return model


# ---- examples


def write(tmp_path, *lines):
    file = tmp_path / "data.jsonl"
    file.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return file


def test_examples_of_a_file(tmp_path):
    file = write(
        tmp_path,
        b'\xef\xbb\xbf{"input": "a ", "output": "b", "note": 1}\r',
        "",
        '  {"output": "ü\\n", "input": "line\u2028end"}',
        "",
    )
    found = read_examples(file)
    assert found == [Example("a ", "b"), Example("line\u2028end", "ü\n")]
    assert [example.line for example in found] == [1, 3]


BAD = {
    "{": r"line 2: not JSON \(.* at column 2\)",
    '["input", "output"]': "line 2: a JSON list, not an object",
    '{"input": "a"}': 'line 2: no "output"',
    '{"input": 3, "output": "b"}': 'line 2: "input" is 3, not text',
    '{"input": "", "output": "b"}': 'line 2: "input" is empty',
    '{"input": "a", "output": "\\ud800"}': "line 2: .*half of a surrogate pair",
    '{"input": "' + 2**20 * "a" + '", "output": "b"}': "line 2: 1,048,604 bytes, but an example",
    b'{"input": "\xff", "output": "b"}': "line 2: byte 12 is not UTF-8",
    "[" * 100_000: "line 2: (nested too deeply|not JSON)",
}


@pytest.mark.parametrize("line", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named(tmp_path, line):
    file = write(tmp_path, '{"input": "a", "output": "b"}', line)
    with pytest.raises(ValueError, match=f"data.jsonl has 1 bad line: {BAD[line]}"):
        read_examples(file)


def test_many_bad_lines_are_counted(tmp_path):
    file = write(tmp_path, *["nonsense"] * 13)
    with pytest.raises(ValueError, match=r"has 13 bad lines: line 1: .*; line 10: .*; and 3 more$"):
        read_examples(file)


def test_files_without_examples(tmp_path):
    with pytest.raises(ValueError, match="holds no examples: write"):
        read_examples(write(tmp_path, "", "  "))
    with pytest.raises(ValueError, match=r"missing\.jsonl cannot be read: No such file"):
        read_examples(tmp_path / "missing.jsonl")


def test_only_the_answer_counts():
    tokens, targets = batch_of([Example("ab", "cd"), Example("e", "f")], TOKENIZER)
    a, b, c, d, e, f, end = *b"abcdef", 10
    assert tokens.tolist() == [[a, b, c, d], [e, f, 0, 0]]
    assert targets.tolist() == [[IGNORED, c, d, end], [f, end, IGNORED, IGNORED]]


def test_the_end_token_of_the_tokenizer_ends_an_answer():
    class WithEnd(Bytes):
        size, end = 257, 256

    _, targets = batch_of([Example("a", "b")], WithEnd())
    assert targets.tolist() == [[ord("b"), 256]]


def test_every_example_once_before_any_again():
    drawn = [number for step in range(15) for number in rows_of_step(7, step, 3, seed=1)]
    epochs = [drawn[start : start + 7] for start in range(0, 42, 7)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert rows_of_step(7, 4, 3, seed=1) == drawn[12:15]
    assert len(rows_of_step(2, 0, 9)) == 9  # a batch larger than the data


def test_examples_that_do_not_fit_are_named(tmp_path):
    lengths = (3, 57, 58, 90)  # plus the answer's two tokens, the last of which is never read
    file = write(tmp_path, "", *[f'{{"input": "{"x" * n}", "output": "y"}}' for n in lengths])
    examples = read_examples(file)
    with pytest.raises(ValueError, match="at most 58 tokens fit: line 4: 59 tokens; line 5: 91"):
        tune(new_model(), TOKENIZER, examples, PromptConfig(length=6))
    with pytest.raises(ValueError, match=r"at most 63 tokens fit: line 4: 91 tokens$"):  # no file
        encode([Example("x" * n, "y") for n in lengths], TOKENIZER, limit=63)


# ---- the prompt in the model


def test_the_prompt_acts_as_the_words_that_it_is_made_of():
    """Virtual tokens act like real ones, and positions continue after them."""
    model, words = new_model(), torch.tensor([7, 9, 200, 7, 31])
    tokens = torch.randint(256, (3, 11))
    together = model(torch.cat((words.expand(3, -1), tokens), dim=1))[:, 5:]
    prompt = draw_prompt(model, 5, words=words).double()
    with prompted(model, prompt):
        found = model(tokens)
        assert found.shape == (3, 16, 256)
    # the prompt is fp32, so the fp64 weights were rounded
    torch.testing.assert_close(found[:, 5:], together, rtol=1e-5, atol=1e-5)
    exact = model.model.embed_tokens.weight[words].detach()
    with prompted(model, exact):
        torch.testing.assert_close(model(tokens)[:, 5:], together, rtol=1e-10, atol=1e-12)
    assert isinstance(model.model.embed_tokens, nn.Embedding)


def test_drawn_prompts():
    model = new_model(dtype=torch.float32)
    weight = model.model.embed_tokens.weight
    words = [3, 4, 5]
    assert torch.equal(draw_prompt(model, 7, words=words), weight[[3, 4, 5, 3, 4, 5, 3]])
    assert torch.equal(draw_prompt(model, 2, words=words), weight[[3, 4]])
    drawn = draw_prompt(model, 9, seed=3)
    assert all((weight == row).all(dim=1).any() for row in drawn)
    assert torch.equal(drawn, draw_prompt(model, 9, seed=3))
    assert not torch.equal(drawn, draw_prompt(model, 9, seed=4))
    assert not drawn.requires_grad
    with torch.no_grad():
        drawn.zero_()  # a copy: the embedding keeps its rows
    assert (weight != 0).any(dim=1).all()
    with pytest.raises(ValueError, match="no words to begin"):
        draw_prompt(model, 2, words=[])


def test_one_prompt_a_row_equals_one_by_one():
    model = new_model()
    prompts = torch.randn(3, 4, 24, dtype=torch.float64)
    tokens = torch.randint(256, (5, 9))
    which = torch.tensor([2, 0, 0, 1, 2])
    with prompted(model, prompts, index=which):
        found = model(tokens)
    for row, number in enumerate(which):
        with prompted(model, prompts[number]):
            alone = model(tokens[row : row + 1])[0]
        torch.testing.assert_close(found[row], alone, rtol=1e-10, atol=1e-12)
    with prompted(model, prompts[which]):
        assert torch.equal(model(tokens), found)
    with pytest.raises(ValueError, match="3 prompts for 5 rows"), prompted(model, prompts):
        model(tokens)
    assert isinstance(model.model.embed_tokens, nn.Embedding)  # even after an error


def test_a_prompt_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"shape \[4, 23\] does not fit: the model takes"):
        PromptedEmbedding(new_model().model.embed_tokens, torch.zeros(4, 23))


def test_prompt_and_tokens_share_the_positions():
    model = new_model()
    tokens = torch.zeros(1, 60, dtype=torch.long)
    with prompted(model, torch.zeros(4, 24)):
        assert model(tokens).shape[1] == 64
    too_long = pytest.raises(ValueError, match="sequence of 65 tokens is longer than max_positions")
    with too_long, prompted(model, torch.zeros(5, 24)):
        model(tokens)


def test_loss_and_gradient_are_those_of_the_whole_logits():
    model, prompt = new_model(), nn.Parameter(torch.randn(4, 24, dtype=torch.float64))
    tokens, targets = batch_of(EXAMPLES, TOKENIZER)
    with frozen(model), prompted(model, prompt):
        whole = cross_entropy(model(tokens)[:, 4:], targets)  # ignores -100 by default
        (expected,) = torch.autograd.grad(whole, prompt)
        loss = prompt_loss(model, tokens, targets)
        loss.backward()
        assert all(p.grad is None for p in model.parameters() if p is not prompt)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(prompt.grad, expected, rtol=1e-9, atol=1e-12)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_fills_up_a_row_changes_nothing():
    model, prompt = new_model(), torch.randn(2, 24, dtype=torch.float64)
    rows = encode(EXAMPLES, TOKENIZER)
    tokens, targets = padded(rows)
    with prompted(model, prompt):
        together = prompt_loss(model, tokens, targets, reduction="sum")
        alone = sum(prompt_loss(model, *padded([row]), reduction="sum") for row in rows)
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-12)


# ---- learning and answering


OTHERS = [Example(e.input, {"red": "warm", "blue": "cold"}[e.output]) for e in EXAMPLES]
TUNING = PromptConfig(length=6, lr=0.1, steps=60, batch=5, init="random")


@pytest.fixture(scope="module")
def tuned():
    """A model with two ways of answering, chosen by the words before the question, and a prompt
    that asks for the first way without such words."""
    model = new_model(dtype=torch.float32, scale=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    cues = {"color: ": EXAMPLES, "touch: ": OTHERS, "": EXAMPLES + OTHERS}
    seen = [Example(cue + e.input, e.output) for cue, some in cues.items() for e in some]
    for _ in range(120):
        prompt_loss(model, *batch_of(seen, TOKENIZER)).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    prompt, history = tune(model, TOKENIZER, EXAMPLES, TUNING)
    return model, before, prompt, history


def test_a_prompt_learns_and_the_model_does_not(tuned):
    model, before, prompt, history = tuned
    assert history[-1]["loss"] < 0.05 < 0.15 < history[0]["loss"]
    assert (prompt.shape, prompt.dtype, prompt.requires_grad) == ((6, 24), torch.float32, False)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.requires_grad
        assert parameter.grad is None
    assert [row["step"] for row in history] == list(range(1, 61))


def test_answers_of_a_batch(tuned):
    model, _, prompt, _ = tuned
    inputs = [example.input for example in EXAMPLES]
    found = answer(model, TOKENIZER, inputs, prompt, max_new_tokens=8, batch=2)
    assert found == [example.output for example in EXAMPLES]
    assert matches(model, TOKENIZER, EXAMPLES, prompt) == [True] * 5
    cut = answer(model, TOKENIZER, inputs, prompt, max_new_tokens=3)
    assert cut == [example.output[:3] for example in EXAMPLES]
    assert answer(model, TOKENIZER, [], prompt) == []


def test_matches_tells_what_answer_would_give(tuned):
    model, _, prompt, _ = tuned
    wrong = [Example(e.input, e.output[:-1] + "?") for e in EXAMPLES[:2]]
    longer = [Example(e.input, e.output + "!") for e in EXAMPLES[:2]]
    shorter = [Example(e.input, e.output[:-1]) for e in EXAMPLES[:2]]
    found = matches(model, TOKENIZER, EXAMPLES + wrong + longer + shorter, prompt, batch=3)
    assert found == [True] * 5 + [False] * 6
    own = answer(model, TOKENIZER, [e.input for e in EXAMPLES], max_new_tokens=8)  # no prompt
    truth = [Example(e.input, text) for e, text in zip(EXAMPLES, own)]
    assert set(own) <= {"red", "blue", "warm", "cold"} and all(matches(model, TOKENIZER, truth))


def test_two_tasks_in_one_batch(tuned):
    model, _, prompt, _ = tuned
    second, _ = tune(model, TOKENIZER, OTHERS, TUNING)
    inputs = [example.input for example in EXAMPLES] * 2
    prompts = torch.stack((prompt, second))[[0] * 5 + [1] * 5]
    found = answer(model, TOKENIZER, inputs, prompts, max_new_tokens=6, batch=4)
    assert found == [example.output for example in EXAMPLES + OTHERS]
    assert all(matches(model, TOKENIZER, EXAMPLES + OTHERS, prompts, batch=4))


def test_equal_seeds_equal_prompts():
    model = new_model(dtype=torch.float32)
    runs = [
        tune(model, TOKENIZER, EXAMPLES, PromptConfig(length=3, steps=4, batch=2, seed=s))
        for s in (0, 0, 1)
    ]
    assert torch.equal(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1]
    assert not torch.equal(runs[0][0], runs[2][0])


def test_words_of_the_first_prompt():
    model = new_model()
    weight = model.model.embed_tokens.weight.float()
    seen = []

    def first(config):
        tune(model, TOKENIZER, EXAMPLES, config, on_step=lambda row: seen.append(row) or True)

    first(PromptConfig(length=3, steps=9))
    assert len(seen) == 1  # on_step ended it
    rows = encode(EXAMPLES, TOKENIZER)
    by_examples = first_prompt(model, TOKENIZER, rows, PromptConfig(length=20))
    shown = list(b"rose is red\nsea is blue\n")[:20]
    assert torch.equal(by_examples.detach(), weight[shown].double())
    by_words = first_prompt(model, TOKENIZER, rows, PromptConfig(length=5, words="abc"))
    assert torch.equal(by_words.detach(), weight[list(b"abcab")].double())


def test_the_learning_rate_is_level_then_falls():
    config = PromptConfig(lr=0.4, steps=10, cooldown=0.5)
    assert [round(config.rate(step), 3) for step in (0, 4, 5, 6, 9)] == [0.4, 0.4, 0.4, 0.32, 0.08]
    assert {PromptConfig(lr=0.4, steps=10, cooldown=0.0).rate(step) for step in range(10)} == {0.4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "--length 0 is too small: it takes 1 or more"),
        ({"batch": 10**12}, "--batch 1000000000000 is too large: it takes 65536 or less"),
        ({"lr": 0.0}, "--lr 0.0 is not above 0"),
        ({"lr": 1e38}, r"--lr 1e\+38 is not above 0 and at most 1e6"),
        ({"lr": math.nan}, "--lr nan is not a finite number"),
        ({"cooldown": 2.0}, "--cooldown 2.0 is not a fraction"),
        ({"init": "zeros"}, "--init 'zeros' is not one of words, random"),
        ({"init": "random", "words": "x"}, "leave out --init random"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        PromptConfig(**options)


def test_what_does_not_fit_together():
    class Large(Bytes):
        size = 300

    model = new_model()
    with pytest.raises(ValueError, match="tokenizer has 300 tokens but the model only 256"):
        tune(model, Large(), EXAMPLES)
    with pytest.raises(ValueError, match="--length 64 leaves no room"):
        tune(model, TOKENIZER, EXAMPLES, PromptConfig(length=64))
    with pytest.raises(ValueError, match="the first prompt has 3 virtual tokens but the config 16"):
        tune(model, TOKENIZER, EXAMPLES, start=torch.zeros(3, 24))
    with pytest.raises(ValueError, match="there are no examples"):
        tune(model, TOKENIZER, [])
    with pytest.raises(ValueError, match="exceeds max_positions 64"):
        answer(model, TOKENIZER, ["x" * 40], max_new_tokens=26)
    with pytest.raises(ValueError, match="an input is empty"):
        answer(model, TOKENIZER, [""])
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 1: .* first prompt"):
        tune(model, TOKENIZER, EXAMPLES, start=torch.full((16, 24), math.nan))


# ---- peft


def test_peft_learns_the_same_prompt(tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = new_model(dtype=torch.float32, scale=3.0)
    model.save_pretrained(tmp_path / "base")
    config = PromptConfig(length=5, lr=0.05, steps=6, batch=3, init="random", cooldown=0.5)
    prompt, history = tune(model, TOKENIZER, EXAMPLES, config)

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapter = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=5, prompt_tuning_init="RANDOM"
    )
    theirs = peft.get_peft_model(theirs, adapter)
    learned = [p for p in theirs.parameters() if p.requires_grad]
    assert [p.shape for p in learned] == [(5, 24)]
    with torch.no_grad():
        learned[0].copy_(draw_prompt(model, 5, seed=0))
    optimizer = torch.optim.Adam(learned, lr=0.05)
    rows, losses = encode(EXAMPLES, TOKENIZER), []
    for step in range(6):
        chosen = [rows[number] for number in rows_of_step(5, step, 3, seed=0)]
        longest = max(len(question + tail) for question, tail in chosen)
        ids = torch.zeros(3, longest, dtype=torch.long)
        labels = torch.full((3, longest), -100)  # transformers shifts them by one
        for number, (question, tail) in enumerate(chosen):
            ids[number, : len(question + tail)] = torch.tensor(question + tail)
            labels[number, len(question) : len(question + tail)] = torch.tensor(tail)
        loss = theirs(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss
        losses.append(loss.item())
        optimizer.param_groups[0]["lr"] = config.rate(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx([row["loss"] for row in history], abs=1e-5)
    torch.testing.assert_close(learned[0].detach(), prompt, rtol=1e-3, atol=1e-4)

    theirs.save_pretrained(tmp_path / "adapter")
    assert torch.equal(read_peft(tmp_path / "adapter"), learned[0].detach())
    inputs = [example.input for example in EXAMPLES]
    own = answer(model, TOKENIZER, inputs, prompt, max_new_tokens=4)
    assert answer(model, TOKENIZER, inputs, read_peft(tmp_path / "adapter"), 4) == own
