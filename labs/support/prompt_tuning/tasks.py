"""Given: two tasks for the frozen model of pretrained.py, batches for training a prompt, and its
accuracy on held-out questions."""

from collections.abc import Iterator

import torch

from labs.support.prompt_tuning import pretrained, reference
from labs.support.prompt_tuning.pretrained import END, examples
from utils.models.gpt import GPT
from utils.prompts import prompted
from utils.prompts.data import rows_of_step

NAMES = ("next", "previous")
LENGTHS = {"next": 4, "previous": 6}  # virtual tokens
STEPS, ROWS = 60, 32
TO_LEARN, TO_MEASURE = 300, 200


def first_words(name: str) -> torch.Tensor:
    """The tokens that initialize the prompt, int64 (P): some letters."""
    return 3 * torch.arange(LENGTHS[name]) % pretrained.LETTERS


class Batches:
    """STEPS batches of a task, made by the answer's `batch`; `drawn` counts those yielded."""

    def __init__(self, answer, name: str, seed: int = 0):
        pairs = examples(name, TO_LEARN, seed)
        rows = [rows_of_step(len(pairs), step, ROWS) for step in range(STEPS)]
        self.answer, self.drawn = answer, 0
        self.pairs = [[pairs[row] for row in some] for some in rows]

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for pairs in self.pairs:
            self.drawn += 1
            yield self.answer.batch(pairs, END)


def to_measure(*names: str, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Held-out questions, the same for every task, with the tasks alternating row by row: tokens
    and targets (B, T), and the index of each row's task (B)."""
    by_task = [examples(name, TO_MEASURE, seed, held_out=True) for name in names]
    tokens, targets = reference.right_batch([pair for row in zip(*by_task) for pair in row], END)
    return tokens, targets, torch.arange(len(tokens)) % len(names)


def exact(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Which rows are answered exactly, bool (B): the likeliest token is right wherever the target
    is not ignored."""
    return ((logits.argmax(dim=-1) == targets) | (targets == -100)).all(dim=1)


@torch.no_grad()
def accuracy(model: GPT, name: str, prompt: torch.Tensor | None = None, seed: int = 1) -> float:
    """The fraction of held-out questions that are answered exactly, with the prompt inserted by
    `utils.prompts`."""
    tokens, targets, _ = to_measure(name, seed=seed)
    if prompt is None:
        return exact(model(tokens), targets).float().mean().item()
    with prompted(model, prompt):
        return exact(model(tokens)[:, len(prompt) :], targets).float().mean().item()
