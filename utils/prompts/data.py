"""Examples for prompt tuning: a JSON-lines file -> rows of tokens, of which only answers count.

    {"input": "module: ", "output": "zlib"}          one example per line

    examples = read_examples("task.jsonl")
    tokens, targets = batch_of(examples[:8], tokenizer)      # both (8, T)

A row is the input's tokens, the output's tokens and the end token; targets are the row shifted by
one, with -100 ("no loss here", as in torch's cross_entropy) everywhere except on the answer. Input
and output are encoded separately, because the model will have to continue from the input alone.
Short rows are padded on the right: under causal attention no token sees later ones, so no mask is
needed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from utils.models.tokenizer import Tokenizer

IGNORED = -100  # the target of a token that does not count
Row = tuple[list[int], list[int]]  # tokens of an input, and of its answer with the end
MOST = 2**16  # most rows per step, tokens per prompt
LONGEST = 2**20  # most bytes per line
SHOWN = 10  # bad lines that are reported; the rest are only counted


@dataclass(frozen=True)
class Example:
    """A question and its answer, used unchanged, including spaces and line ends."""

    input: str
    output: str
    line: int | None = field(default=None, compare=False, repr=False)  # in its file, from 1


# ---- 1. files


def read_examples(file: Path | str) -> list[Example]:
    """The examples of a JSON-lines file, {"input": text, "output": text} on each line.

    Empty lines are skipped, other keys ignored. Raises ValueError with the numbers of the bad
    lines: the first 10, then how many more.
    """
    try:
        with open(file, "rb") as data:
            lines = data.read().split(b"\n")  # not splitlines: texts may contain other line ends
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    examples, bad = [], []
    for number, line in enumerate(lines, start=1):
        try:
            example = _example(line, number)
        except ValueError as error:
            bad.append((number, str(error)))
            continue
        if example:
            examples.append(example)
    refuse(bad, f"{file} has {len(bad)} bad line{'s' * (len(bad) > 1)}")
    if not examples:
        raise ValueError(
            f'{file} holds no examples: write {{"input": "...", "output": "..."}}, one per line'
        )
    return examples


def _example(line, number):
    """The example on a line, None on an empty one; ValueError says what is wrong with it."""
    if len(line) > LONGEST:
        raise ValueError(f"{len(line):,} bytes, but an example may have at most {LONGEST:,}")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors write a BOM
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8") from None
    if not text.strip():
        return None
    try:
        entry = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        what = getattr(error, "msg", str(error))
        where = f" at column {error.colno}" if hasattr(error, "colno") else ""
        raise ValueError(f"not JSON ({what}{where})") from None
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON {type(entry).__name__}, not an object")
    for key in ("input", "output"):
        if key not in entry:
            raise ValueError(f'no "{key}"')
        if not isinstance(entry[key], str):
            raise ValueError(f'"{key}" is {json.dumps(entry[key])[:40]}, not text')
        if not entry[key]:
            raise ValueError(f'"{key}" is empty')
        if not _is_unicode(entry[key]):
            raise ValueError(f'"{key}" holds half of a surrogate pair, which is not a character')
    return Example(entry["input"], entry["output"], number)


def _is_unicode(text):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def refuse(bad: Sequence[tuple[int, str]], what: str) -> None:
    """Raise ValueError listing (line number, complaint) pairs, if there are any."""
    if not bad:
        return
    shown = [f"line {number}: {complaint}" for number, complaint in bad[:SHOWN]]
    if len(bad) > SHOWN:
        shown.append(f"and {len(bad) - SHOWN} more")
    raise ValueError(f"{what}: " + "; ".join(shown))


# ---- 2. tokens


def end_token(tokenizer: Tokenizer) -> int:
    """The id that ends an answer: "<|end|>", or the line end if tokens are bytes."""
    return tokenizer.encode("\n")[-1] if tokenizer.end is None else tokenizer.end


def encode(
    examples: Sequence[Example], tokenizer: Tokenizer, limit: int | None = None
) -> list[Row]:
    """[(tokens of the input, tokens of the answer with its end)] of examples.

    limit   most tokens per row. Raises ValueError for longer examples, with their lines in the file
            (or their positions, counted from 1).
    """
    end, rows, bad = end_token(tokenizer), [], []
    for place, example in enumerate(examples, start=1):
        row = tokenizer.encode(example.input), [*tokenizer.encode(example.output), end]
        rows.append(row)
        length = len(row[0]) + len(row[1]) - 1  # the model never reads the end
        if limit is not None and length > limit:
            bad.append((example.line or place, f"{length} tokens"))
        elif not row[0]:
            bad.append((example.line or place, "the input is empty"))
    refuse(bad, f"examples of at most {limit} tokens fit" if limit else "examples need an input")
    return rows


def padded(
    rows: Sequence[Row], device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), both int64 (B, T), for rows of `encode`; T fits the longest."""
    length = max(len(question) + len(answer) for question, answer in rows) - 1
    tokens = torch.zeros(len(rows), length, dtype=torch.long)  # any token will do as padding
    targets = torch.full((len(rows), length), IGNORED)
    for number, (question, answer) in enumerate(rows):
        row, first = torch.tensor(question + answer), len(question) - 1
        tokens[number, : len(row) - 1] = row[:-1]
        targets[number, first : len(row) - 1] = row[first + 1 :]
    return tokens.to(device), targets.to(device)


def batch_of(
    examples: Sequence[Example], tokenizer: Tokenizer, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets), both int64 (B, T): rows padded on the right, targets -100 where there is
    no loss; only the answer and the end token after it count."""
    return padded(encode(examples, tokenizer), device)


def rows_of_step(count: int, step: int, batch: int, seed: int = 0) -> list[int]:
    """The indices, out of `count`, of the `batch` examples in batch number `step`.

    Every example is used once before any is used again, in a new order each time. A pure function,
    so N ranks see the same as one.
    """
    rows = []
    for place in range(step * batch, (step + 1) * batch):
        epoch, number = divmod(place, count)
        if not rows or number == 0:
            # each epoch has its own order; seeds of different runs and epochs do not collide
            generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
            order = torch.randperm(count, generator=generator).tolist()
        rows.append(order[number])
    return rows
