"""Prompt tuning: a frozen model learns a task through virtual tokens in front of its input.

    model, tokenizer = load("base")
    examples = read_examples("task.jsonl")                  # {"input": …, "output": …} per line
    prompt, history = tune(model, tokenizer, examples, PromptConfig(length=16, steps=200))
    answer(model, tokenizer, ["module: "], prompt)          # greedy, many inputs at once
    save_prompt("task.safetensors", prompt, "models/base")

A virtual token is a vector (C,) that need not be any token's embedding; P of them precede the
embedded input, and only they are learned: P·C values (Lester et al., arXiv:2104.08691). The model
itself does not change; only its embedding is temporarily replaced:

    with prompted(model, prompt):
        logits = model(tokens)[:, P:]                       # (B, T, V) for tokens (B, T)

Each row may have its own prompt, so a batch can mix several tasks. From the shell, for any
checkpoint in Llama's layout: python -m utils.prompt_tuning --model FOLDER --data FILE.jsonl
--out FILE
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from utils.cli import check_options, option
from utils.memory.precision import autocast
from utils.models.gpt import GPT, cross_entropy
from utils.models.tokenizer import Tokenizer
from utils.prompts.data import IGNORED, MOST, Example, Row, encode, padded, rows_of_step
from utils.prompts.embedding import draw_prompt, frozen, prompted


class FallingRate:
    """Base of the tuning configs: the learning rate from their `lr`, `cooldown` and `steps`."""

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: constant, then falling linearly to 0."""
        left = 1 - step / self.steps
        return self.lr * min(1.0, left / self.cooldown if self.cooldown else 1.0)


@dataclass(frozen=True)
class PromptConfig(FallingRate):
    """How a prompt is tuned. Raises ValueError for invalid values."""

    length: int = option(16, "virtual tokens", least=1, most=MOST)
    lr: float = option(0.1, "learning rate of Adam, far higher than weights tolerate")
    cooldown: float = option(0.5, "fraction of the steps in which the learning rate falls to 0")
    steps: int = option(200, "number of steps", least=1)
    batch: int = option(16, "examples per step", least=1, most=MOST)
    seed: int = option(0, "of the initial prompt and the order of the examples")
    init: str = option(
        "words",
        "initial prompt; words: the embeddings of --words; random: those of random tokens",
        ("words", "random"),
    )
    words: str | None = option(
        None, "initial text, repeated or truncated to --length; default: the first examples"
    )
    precision: str = option(
        "fp32",
        "bf16: matrix products in 16 bits, the prompt in fp32; fp64: for comparing runs",
        ("fp32", "bf16", "fp64"),
    )

    def __post_init__(self):
        check_options(self)
        if not 0 < self.lr <= 1e6:
            raise ValueError(f"--lr {self.lr} is not above 0 and at most 1e6")
        if not 0 <= self.cooldown <= 1:
            raise ValueError(f"--cooldown {self.cooldown} is not a fraction from 0 to 1")
        if self.words is not None and self.init == "random":
            raise ValueError("--words is only for --init words: leave out --init random")
        try:
            (self.words or "").encode()
        except UnicodeEncodeError:
            raise ValueError(f"--words {self.words!r} is not UTF-8 text") from None


def prompt_loss(
    model: nn.Module,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    reduction: str = "mean",
    loss: Callable = cross_entropy,
) -> torch.Tensor:
    """The loss of the answers in nats: tokens and targets (B, T) as returned by `batch_of`.

    Equal to `loss(model(tokens)[:, P:], targets)`, but computes only the logits that count.
    """
    length = getattr(model.model.embed_tokens, "length", 0)
    counted = targets != IGNORED
    hidden = model.model(tokens)[:, length:][counted]  # (N, C): N tokens of answers
    return loss(model.lm_head(hidden[None]), targets[counted][None], reduction=reduction)


def tune(
    model: GPT,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    config: PromptConfig | None = None,
    on_step: Callable[[dict], bool | None] | None = None,
    start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[dict]]:
    """Learn a prompt for a frozen model; return (prompt (P, C), history).

    start     the initial prompt; None: as `config` says
    on_step   called with each step's {"step", "loss" (nats per token of the answers), "lr"}, which
              make up the history; if it returns True, the tuning ends early
    Raises ValueError naming the examples that, with the prompt, exceed max_positions, and
    FloatingPointError if the loss is not finite. On several ranks: `utils/prompts/parallel.py`.
    """
    config = config or PromptConfig()
    rows = encode_all(model, tokenizer, examples, config)
    prompt = first_prompt(model, tokenizer, rows, config, start)
    device = prompt.device

    def backward(rows):
        tokens, targets = padded(rows, device)
        with autocast(config.precision, device):
            loss = prompt_loss(model, tokens, targets)
        loss.backward()
        return loss.item()

    with frozen(model), prompted(model, prompt):
        history = descend([prompt], rows, config, backward, on_step)
    return prompt.detach(), history


def encode_all(
    model: GPT, tokenizer: Tokenizer, examples: Sequence[Example], config: PromptConfig
) -> list[Row]:
    """The rows of `utils.prompts.data.encode`, each short enough to follow the prompt."""
    vocabulary, positions = model.config.vocab_size, model.config.max_positions
    if tokenizer.size > vocabulary:
        raise ValueError(
            f"the tokenizer has {tokenizer.size} tokens but the model only {vocabulary}: they do "
            "not belong together"
        )
    if config.length >= positions:
        raise ValueError(
            f"--length {config.length} leaves no room for tokens: the model has {positions} "
            "positions"
        )
    if not examples:
        raise ValueError("there are no examples to learn from: give at least one")
    return encode(examples, tokenizer, positions - config.length)


def first_prompt(
    model: GPT,
    tokenizer: Tokenizer,
    rows: Sequence[Row],
    config: PromptConfig,
    start: torch.Tensor | None = None,
) -> nn.Parameter:
    """The parameter to be learned: fp32, or fp64 in an fp64 model."""
    if start is None and config.init == "words":
        words = tokenizer.encode(config.words) if config.words else _words(rows, config.length)
        start = draw_prompt(model, config.length, words=words)
    elif start is None:
        start = draw_prompt(model, config.length, config.seed)
    if len(start) != config.length:
        raise ValueError(
            f"the first prompt has {len(start)} virtual tokens but the config {config.length}: "
            f"give PromptConfig(length={len(start)})"
        )
    like = model.model.embed_tokens.weight
    wide = like.dtype if like.dtype == torch.float64 else torch.float32
    return nn.Parameter(start.detach().to(like.device, wide, copy=True))


def _words(rows, length):
    """The tokens of the first examples, as a few-shot prompt would show them."""
    words = []
    for question, tail in rows:
        words += question + tail
        if len(words) >= length:
            break
    return words


def descend(
    parameters: list[nn.Parameter],
    rows: list,
    config: FallingRate,
    backward: Callable[[list], float],
    on_step: Callable[[dict], bool | None] | None = None,
) -> list[dict]:
    """The loop of all tuning: Adam on these parameters; returns the history.

    parameters   []: this rank has no learned parameters and only takes part in `backward`
    config       with steps, batch, seed, lr and cooldown
    backward     called with a step's rows; computes the gradients and returns the loss
    """
    optimizer = torch.optim.Adam(parameters, lr=config.lr) if parameters else None
    history = []
    for step in range(config.steps):
        numbers = rows_of_step(len(rows), step, config.batch, config.seed)
        loss = backward([rows[number] for number in numbers])
        if not math.isfinite(loss):
            advice = (
                "lower --lr" if step else "the model's weights or the first prompt are not finite"
            )
            raise FloatingPointError(f"the loss is {loss} at step {step + 1}: {advice}")
        if optimizer:
            optimizer.param_groups[0]["lr"] = config.rate(step)
            optimizer.step()
            optimizer.zero_grad()
        history.append({"step": step + 1, "loss": loss, "lr": config.rate(step)})
        if on_step and on_step(history[-1]):
            break
    return history
