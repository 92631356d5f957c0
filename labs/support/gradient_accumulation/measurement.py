"""Given: the measurement of exercise 02c, with the functions of the file."""

from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.runner import load_answer
from utils.data import corpus
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.ranks import RankError, Ranks

ROWS = 4  # of a rank


def measure(path: str = "noise.py", steps: int = 90, size: int = 2) -> list[float] | None:
    """Trains a small GPT on `size` ranks of 4 rows; the noise scale of each third of the run, rows.

    None, and a word, where the functions are not written.
    """
    with Ranks(size, device="cpu", timeout=20) as ranks:
        try:
            return ranks.run(_measure, str(Path(path).resolve()), steps)[0]
        except (RankError, NotImplementedError) as error:
            why = "is not written" if "NotImplementedError" in str(error) else "does not run"
            print(f"Nothing to measure yet: {path} {why}.")
            return None


def _measure(path: str, steps: int) -> list[float]:
    """On a rank: AdamW on the corpus, the norms on the way."""
    answer, tokens = load_answer(Path(path)), corpus.split(corpus.load())[0]
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
