"""Given: the measurement of exercise 02c, with the functions of the file."""

import torch
import torch.distributed as dist

from utils.course.runner import attempted
from utils.data import corpus
from utils.models.gpt import GPT, GPTConfig, cross_entropy

ROWS = 4  # of a rank
SECONDS = 60.0  # of processor time


def measure(path: str = "noise.py", steps: int = 90, size: int = 2) -> list[float] | None:
    """Trains a small GPT on `size` ranks of 4 rows; the noise scale of each third of the run, rows.

    None, and a word, where the functions are not written.
    """
    ranks = attempted(path, size, _measure, steps, seconds=SECONDS)
    if ranks is None:
        return print(f"Nothing to measure yet: {path} does not run.")
    return ranks[0]


def _measure(answer, steps: int) -> list[float]:
    """On a rank: AdamW on the corpus, the norms on the way."""
    tokens = corpus.split(corpus.load())[0]
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, history = GPT(GPTConfig(hidden_size=64, layers=2, heads=4)), []
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    for step in range(steps):
        x, y = corpus.batch(tokens, step, ROWS * size, 64, rank=rank, world_size=size)
        cross_entropy(model(x), y).backward()
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        history.append(answer.squared_norms(gradient))
        pieces = gradient.split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces):
            parameter.grad = piece.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
    third = steps // 3
    parts = [history[start : start + third] for start in range(0, 3 * third, third)]
    return [answer.noise_scale(part, ROWS, ROWS * size) for part in parts]
