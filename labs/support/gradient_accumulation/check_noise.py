"""Given: what the check cells of exercise 02c look at, and the measurement after it."""

import math
from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.checks import Wrong, load_answer, on_ranks
from utils.data import corpus
from utils.measure.traffic import Traffic
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.ranks import RankError, Ranks

LENGTH, ROWS = 50, 4  # numbers in the judge's gradients; rows of a rank in the measurement


def norms(path: Path) -> str:
    """Judges `squared_norms` in the file."""
    for size in (1, 2, 3, 4):
        for rank, result in enumerate(on_ranks(size, path, _norms)):
            _right_norms(result, size, f"with {size} ranks, rank {rank}")
    return (
        "both norms and the mean gradient are right on 1, 2, 3 and 4 ranks;\n"
        "one all-reduce, one number longer than the gradient."
    )


def estimate(path: Path) -> str:
    """Judges `signal_and_noise` and `noise_scale` in the file."""
    answer = load_answer(path)
    for signal, noise, small, big in ((3.0, 40.0, 4, 8), (0.5, 7.0, 1, 64), (2.0, 0.0, 2, 6)):
        found = answer.signal_and_noise(signal + noise / small, signal + noise / big, small, big)
        if not isinstance(found, tuple) or len(found) != 2:
            raise Wrong(f"signal_and_noise returns {found!r}: two numbers, (|G|², tr Σ).")
        for name, value, right in zip(("|G|²", "tr Σ"), found, (signal, noise)):
            if not math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-9):
                raise Wrong(
                    f"|G|² = {signal} and tr Σ = {noise} give norms of "
                    f"{signal + noise / small:.4g} for {small} rows and "
                    f"{signal + noise / big:.4g} for {big};\n"
                    f"signal_and_noise makes {name} = {value:.4g} of them. "
                    "Put your two results back into the two equations."
                )
    history, right = _history()
    found = answer.noise_scale(history, 4, 16)
    if not math.isclose(found, right, rel_tol=1e-9):
        raise Wrong(
            f"noise_scale of {len(history)} noisy steps is {found:.4g}, not {right:.4g}.\n"
            "Average the signal and the noise over the steps first; divide last."
        )
    return "signal and noise solve their equations; noise_scale averages first and divides last."


def _gradient(rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(rank)
    return torch.randn(LENGTH, generator=random, dtype=torch.float64) + 0.3


def _norms(answer) -> dict:
    """On a rank: the answer's norms of gradients that everyone can work out."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone = torch.stack([_gradient(r) for r in range(size)])
    mine = _gradient(rank)
    with Traffic() as traffic:
        found = answer.squared_norms(mine)
    return {
        "found": found,
        "gradient": mine,
        "own": everyone[rank],
        "mean": everyone.mean(0),
        "small": everyone.square().sum(1).mean().item(),
        "big": everyone.mean(0).square().sum().item(),
        "own_small": everyone[rank].square().sum().item(),
        "events": [(event.op, event.payload) for event in traffic.events],
    }


def _right_norms(result: dict, size: int, case: str) -> None:
    found = result["found"]
    if not isinstance(found, tuple) or len(found) != 2:
        raise Wrong(f"{case}: squared_norms returns {found!r}: two numbers, (small, big).")
    small, big = (float(value) for value in found)
    gradient, mean = result["gradient"], result["mean"]
    if not torch.allclose(gradient, mean, rtol=1e-9):
        hint = ""
        if torch.allclose(gradient, mean * size, rtol=1e-9):
            hint = f"\nIt is the sum over the ranks, {size} times the mean."
        elif gradient.equal(result["own"]):
            hint = "\nIt is still this rank's own: copy the mean into it."
        raise Wrong(f"{case}: `gradient` is not the mean over the ranks afterwards.{hint}")
    if not math.isclose(small, result["small"], rel_tol=1e-9):
        hint = "Take the mean over the ranks of |gradient of one rank|²."
        if math.isclose(small, result["small"] * size, rel_tol=1e-9):
            hint = f"It is the sum over the {size} ranks: take the mean."
        elif math.isclose(small, result["own_small"], rel_tol=1e-9):
            hint = "It is this rank's own: the others' must go into the mean as well."
        elif math.isclose(small**2, result["small"], rel_tol=0.1):
            hint = "It is close to the square root: take the squared norm."
        raise Wrong(f"{case}: small is {small:.6g}, and should be {result['small']:.6g}.\n{hint}")
    if not math.isclose(big, result["big"], rel_tol=1e-9):
        hint = "Take |mean gradient|²."
        if math.isclose(big, result["big"] * size**2, rel_tol=1e-9):
            hint = "It is the squared norm of the sum: take that of the mean."
        elif math.isclose(big**2, result["big"], rel_tol=1e-9):
            hint = "It is the norm: take its square."
        raise Wrong(f"{case}: big is {big:.6g}, and should be {result['big']:.6g}.\n{hint}")
    ops = [op for op, _ in result["events"]]
    if ops != ["all_reduce"]:
        raise Wrong(
            f"{case}: {len(ops)} collectives ({', '.join(ops)}), where one all-reduce is enough:\n"
            "append the small number to the gradient, and let them travel together."
        )


def _history() -> tuple[list[tuple[float, float]], float]:
    """Noisy norms of 12 steps, and the noise scale that follows from them."""
    random = torch.Generator().manual_seed(5)
    small = (1 + 10 / 4 + 0.8 * torch.randn(12, generator=random)).tolist()
    big = (1 + 10 / 16 + 0.3 * torch.randn(12, generator=random)).tolist()
    noise = (sum(small) - sum(big)) / 12 / (1 / 4 - 1 / 16)
    return list(zip(small, big)), noise / (sum(big) / 12 - noise / 16)


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
