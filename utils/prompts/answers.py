"""Answers of a model with or without a prompt: greedy, many inputs at once.

answer(model, tokenizer, ["module: "], prompt)          # ["zlib"]: token by token
matches(model, tokenizer, examples, prompt)             # [True]: right or wrong, one forward pass
"""

from collections.abc import Sequence

import torch

from utils.models.gpt import GPT
from utils.models.tokenizer import Tokenizer
from utils.prompts.data import IGNORED, Example, encode, end_token, padded
from utils.prompts.embedding import prompted


@torch.no_grad()
def answer(
    model: GPT,
    tokenizer: Tokenizer,
    inputs: Sequence[str],
    prompt: torch.Tensor | None = None,
    max_new_tokens: int = 32,
    batch: int = 64,
) -> list[str]:
    """The greedy answer to each input, token by token up to the end token: a list of texts.

    prompt   None, (P, C) for all, or (N, P, C): one for each of the N inputs
    Rows that have ended leave the batch. There is no cache of keys and values: each token reruns
    its row. Raises ValueError if an input with its prompt and answer exceeds max_positions.
    """
    end, answers = end_token(tokenizer), [None] * len(inputs)
    device, length = model.lm_head.weight.device, 0 if prompt is None else prompt.shape[-2]
    rows = [tokenizer.encode(text) for text in inputs]
    for text, row in zip(inputs, rows):
        if not row:
            raise ValueError("an input is empty: a model needs at least one token to continue")
        if length + len(row) + max_new_tokens - 1 > model.config.max_positions:
            raise ValueError(
                f"input {text[:30]!r} has {len(row)} tokens: with a prompt of {length} and "
                f"{max_new_tokens} new ones it exceeds max_positions {model.config.max_positions}"
            )
    for going in _by_length(rows, batch):
        begun = {number: len(rows[number]) for number in going}
        for _ in range(max_new_tokens):
            tokens, _ = padded([(rows[number], [end]) for number in going], device)
            with prompted(model, _of_rows(prompt, going)):
                hidden = model.model(tokens)[:, length:]  # (B, T, C)
            last = torch.tensor([len(rows[number]) - 1 for number in going], device=device)
            logits = model.lm_head(hidden[torch.arange(len(going), device=device), last])
            for number, token in zip(going, logits.argmax(dim=-1).tolist()):
                rows[number] = rows[number] + [token]
            going = [number for number in going if rows[number][-1] != end]
            if not going:
                break
        for number, start in begun.items():
            new = rows[number][start:]
            answers[number] = tokenizer.decode(new[:-1] if new[-1:] == [end] else new)
    return answers


@torch.no_grad()
def matches(
    model: GPT,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    prompt: torch.Tensor | None = None,
    batch: int = 64,
) -> list[bool]:
    """Whether `answer` would give exactly the output, for each example: a list of bools.

    This takes one forward pass instead of one per token: greedy decoding gives an answer if and
    only if each of its tokens, and the end, is the likeliest after the preceding ones.
    """
    length = 0 if prompt is None else prompt.shape[-2]
    rows = encode(examples, tokenizer, model.config.max_positions - length)
    right = [None] * len(rows)
    for numbers in _by_length([question + tail for question, tail in rows], batch):
        tokens, targets = padded([rows[n] for n in numbers], model.lm_head.weight.device)
        counted = targets != IGNORED
        with prompted(model, _of_rows(prompt, numbers)):
            hidden = model.model(tokens)[:, length:]
        hits = torch.ones_like(counted)
        hits[counted] = model.lm_head(hidden[counted]).argmax(dim=-1) == targets[counted]
        for number, hit in zip(numbers, hits.all(dim=1).tolist()):
            right[number] = hit
    return right


def _by_length(rows, batch):
    """Indices of rows, `batch` at a time, grouped by length to minimize padding."""
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    return [order[start : start + batch] for start in range(0, len(order), batch)]


def _of_rows(prompt, numbers):
    return prompt[numbers] if prompt is not None and prompt.ndim == 3 else prompt
