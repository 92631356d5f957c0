"""Given: what the check cells of exercise 02c look at, and the measurement after it."""

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist

from utils.course.assertions import Wrong, a_number, close, described, same_bits, told_apart
from utils.course.observe import Look
from utils.course.runner import Trial, fractions, load_answer
from utils.data import corpus
from utils.models.gpt import GPT, GPTConfig, cross_entropy
from utils.ranks import RankError, Ranks

ZERO, ONE_NAN = ", zeros on one rank", ", a NaN on one rank"
ROWS = 4  # of a rank in the measurement
LARGE = 50_000  # numbers: more than any message of the small cases has
STEPS = [(1, 61)] * 4 + [(150, 900), (1500, 3000)]  # of the histories: at least, and fewer than
EQUATIONS = 12


def norms(trial: Trial) -> str:
    """Judges `squared_norms` in the file."""
    for group in trial.groups(hang="Does every rank call the all-reduce?"):
        for late in (False, True):
            calls = _draw_calls(trial, group.size, late)
            odd, seed = trial.draw.randrange(group.size), trial.new_seed()
            slow = ", on a slow network" * late
            ranks = group.run(group.case() + slow, _norms, calls, odd, seed, late=late)
            for call, results in zip(calls, zip(*ranks)):
                case = group.case(str(call)) + slow
                wheres = [f"{case}, rank {rank}" for rank in range(group.size)]
                for where, result in zip(wheres, results):
                    _right_gradient(where, result, group.size)
                for where, result in zip(wheres, results):
                    _right_norms(where, result, group.size, call.dtype)
                    most = (call.length + 1) * call.dtype.itemsize
                    _right_messages(where, result["events"], most, group.size)
                same_bits(case, "the gradient", [r["gradient"].nan_to_num() for r in results])
                for name in ("small", "big"):
                    values = [torch.tensor(r[name]).double().nan_to_num() for r in results]
                    same_bits(case, f"`{name}`", values)
            for rank, results in enumerate(ranks):
                if results[-1]["kept"] > 12 * (max(call.length for call in calls) + 1):
                    raise Wrong(
                        f"{group.case()}, rank {rank}: after {len(calls)} calls "
                        f"{results[-1]['kept']:,} bytes of what was made are still held.\n"
                        "Who keeps them, and for what?"
                    )
    return (
        "both norms and the mean gradient are right on 1 to 6 ranks, in fp32 and fp64, for few\n"
        "and for 50,000 numbers, also where one rank's gradient is zero or has a NaN; one\n"
        "all-reduce, one number longer than the gradient."
    )


def estimate(trial: Trial) -> str:
    """Judges `signal_and_noise` and `noise_scale` in the file."""
    draw = trial.draw
    equations = []
    for _ in range(EQUATIONS):
        small_rows = draw.randrange(1, 40)
        big_rows = small_rows * draw.randrange(2, 9) + draw.randrange(5)
        size = 10.0 ** draw.randrange(-6, 4)  # of squared norms
        signal, noise = size * draw.uniform(-1, 5), size * draw.choice((0.0, draw.uniform(0, 90)))
        equations.append((signal, noise, small_rows, big_rows))
    histories = [_draw_history(draw, number) for number in range(len(STEPS))]
    found = trial.alone("in one process", _estimate, equations, histories)
    for (signal, noise, small, big), seen in zip(equations, found["solved"]):
        norms = signal + noise / small, signal + noise / big
        for name, value, right in zip(("|G|²", "tr Σ"), seen, (signal, noise)):
            if not math.isclose(value, right, rel_tol=1e-9, abs_tol=1e-9 * max(map(abs, norms))):
                raise Wrong(
                    f"|G|² = {signal:.4g} and tr Σ = {noise:.4g} give norms of {norms[0]:.4g} for "
                    f"{small} rows and {norms[1]:.4g} for {big};\n"
                    f"signal_and_noise makes {name} = {value:.4g} of them. "
                    "Put your two results back into the two equations."
                )
    cases = [(steps, small, big) for both, small, big in histories for steps in both]
    for (history, small, big), seen in zip(cases, found["scales"]):
        signal, noise = _averages(history, small, big)
        right = float(noise / signal)
        if not math.isclose(seen, right, rel_tol=1e-8):
            mine, wanted = told_apart(seen, right)
            raise Wrong(
                f"noise_scale of {len(history)} noisy step{'s' * (len(history) > 1)}, {small} and "
                f"{big} rows, with the mean |G|² = {float(signal):.4g},\nis {mine}, not {wanted}. "
                + _question(seen, right)
            )
    return (
        f"signal and noise solve {EQUATIONS} pairs of equations; noise_scale averages first and "
        f"divides last,\nfor {2 * len(STEPS)} histories of up to 3,000 steps, also where the mean "
        "|G|² is below zero."
    )


# ---- norms


@dataclass(frozen=True)
class Call:
    """Of squared_norms. odd: what one rank's gradient has, ZERO or ONE_NAN or ""."""

    length: int
    dtype: torch.dtype
    odd: str

    def __str__(self) -> str:
        return f"{self.length} numbers in {str(self.dtype).split('.')[1]}{self.odd}"


def _draw_calls(trial: Trial, size: int, late: bool) -> list[Call]:
    """Two types in turns, at the same length and at others."""
    draw, dtypes = trial.draw, [torch.float64, torch.float32]
    draw.shuffle(dtypes)
    lengths = [draw.randrange(1, 300)] * 2 + [draw.randrange(1, 300) for _ in range(2)]
    lengths += [LARGE + draw.randrange(999)] * (size == 2 or (size == 3 and late))
    odd = ["", "", ZERO, ONE_NAN, ""]
    return [Call(n, dtypes[i % 2], odd[i]) for i, n in enumerate(lengths)]


def _gradient(seed: int, number: int, rank: int, call: Call, odd: int) -> torch.Tensor:
    """A rank's mean gradient in a call."""
    drawn = fractions(seed + 100 * number + rank, call.length, dtype=call.dtype) + 0.3
    if call.odd and rank == odd:
        drawn = drawn * 0
        drawn[-1] = 0.0 if call.odd == ZERO else math.nan
    return drawn


def _norms(answer, calls: list[Call], odd: int, seed: int) -> list[dict]:
    """On a rank: the answer's norms of gradients that everyone can work out."""
    rank, size, results, whole = dist.get_rank(), dist.get_world_size(), [], Look()
    for number, call in enumerate(calls):
        everyone = torch.stack([_gradient(seed, number, r, call, odd) for r in range(size)])
        around = torch.cat([torch.ones(3), everyone[rank], torch.ones(2)])  # others' memory
        around, length = around.to(call.dtype), call.length
        mine = around[3 : 3 + length]
        with whole, Look() as look:
            found = answer.squared_norms(mine)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Wrong(f"squared_norms returns {described(found)}: two numbers, (small, big).")
        if not (torch.cat([around[:3], around[3 + length :]]) == 1).all():
            raise Wrong("squared_norms writes beyond the ends of `gradient`.")
        own, everyone = everyone[rank], everyone.double()
        results.append({
            "small": a_number("squared_norms", "`small`", found[0]),
            "big": a_number("squared_norms", "`big`", found[1]),
            "gradient": around[3 : 3 + length].clone(), "own": own, "mean": everyone.mean(0),
            "right_small": everyone.square().sum(1).mean(),
            "own_small": own.double().square().sum(),
            "events": [(event.op, event.payload) for event in look.events],
        })
        del found, look, mine, around
    results[-1]["kept"] = whole.kept()
    return results


def _alike(value: float, right) -> bool:
    return math.isclose(value, float(right), rel_tol=1e-4)


def _right_gradient(where: str, result: dict, size: int) -> None:
    gradient, mean = result["gradient"], result["mean"]
    hint = ""
    if size > 1 and torch.allclose(gradient.double(), mean * size, rtol=1e-4):
        hint = f"It is the sum over the ranks, {size} times the mean."
    elif gradient.equal(result["own"]):
        hint = "Its memory still has this rank's own: copy the mean into it."
    close(where, "`gradient` afterwards", gradient, mean, hint=hint)


def _right_norms(where: str, result: dict, size: int, dtype: torch.dtype) -> None:
    small, right = result["small"], result["right_small"]
    hint = "It should be the mean over the ranks of |gradient of one rank|²."
    if _alike(small, right * size):
        hint = f"It is the sum over the {size} ranks: take the mean."
    elif _alike(small, result["own_small"]):
        hint = "It is this rank's own: the others' must go into the mean as well."
    elif _alike(small**2, right):
        hint = "It is the square root: take the squared norm."
    close(where, "`small`", torch.tensor(small, dtype=dtype), right, hint=hint)
    big, right = result["big"], result["mean"].square().sum()
    hint = "It should be |mean gradient|²."
    if _alike(big, right * size**2):
        hint = "It is the squared norm of the sum: take that of the mean."
    elif _alike(big**2, right):
        hint = "It is the norm: take its square."
    close(where, "`big`", torch.tensor(big, dtype=dtype), right, hint=hint)


def _right_messages(where: str, events: list, most: int, size: int) -> None:
    ops = [op for op, _ in events]
    if not ops and size == 1:
        return
    if ops != ["all_reduce"]:
        raise Wrong(
            f"{where}: {len(ops)} collectives ({', '.join(ops)}), where one all-reduce is enough:\n"
            "append the small number to the gradient, and let them travel together."
        )
    if events[0][1] > most:
        raise Wrong(
            f"{where}: an all-reduce of {events[0][1]:,} bytes; the gradient and one number are "
            f"{most:,}."
        )


# ---- estimate


def _draw_history(draw, number: int) -> tuple[list[list[tuple[float, float]]], int, int]:
    """Noisy norms of some steps, other ones of as many steps, and their numbers of rows.

    The first histories are short, the last ones long; in every second one the mean signal is
    negative, as it may be when a run is short or its gradient small.
    """
    small_rows = draw.randrange(1, 20)
    big_rows = small_rows * draw.randrange(2, 7) + draw.randrange(3)
    steps = draw.randrange(*STEPS[number])
    sign, both = (-1) ** number, []
    while len(both) < 2:
        noise, size = draw.uniform(1, 40), 10.0 ** draw.randrange(-6, 4)
        history = [
            (sign + noise / small_rows + draw.gauss(0, 0.8),
             sign + noise / big_rows + draw.gauss(0, 0.8))
            for _ in range(steps)
        ]
        if sign * _averages(history, small_rows, big_rows)[0] > 0.3:
            both.append([(size * small, size * big) for small, big in history])
    return both, small_rows, big_rows


def _averages(history: list, small_rows: int, big_rows: int) -> tuple[Fraction, Fraction]:
    """Mean |G|² and tr Σ, exactly."""
    small, big = (sum(map(Fraction, column)) / len(history) for column in zip(*history))
    noise = (small - big) / (Fraction(1, small_rows) - Fraction(1, big_rows))
    return big - noise / big_rows, noise


def _question(seen: float, right: float) -> str:
    if math.isclose(seen, right, rel_tol=1e-4):
        return "In which type is it added up?"
    return (
        "Average the signal and the noise over the steps first, over\nall of them and as they are; "
        "divide last."
    )


def _estimate(answer, equations: list, histories: list) -> dict:
    """On a rank: what the two functions make of the cases, in turns, without a message."""
    with Look() as look:
        found = _solved(answer, equations, histories)
    if look.events:
        raise Wrong(
            f"the two functions call {look.events[0].op}: squared_norms has given all ranks the "
            "same numbers already, and whoever asks alone would wait for ever."
        )
    return found


def _solved(answer, equations: list, histories: list) -> dict:
    solved, scales = [], []
    for number, (signal, noise, small, big) in enumerate(equations):
        found = answer.signal_and_noise(signal + noise / small, signal + noise / big, small, big)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Wrong(f"signal_and_noise returns {described(found)}: two numbers, (|G|², tr Σ).")
        solved.append([a_number("signal_and_noise", "one result", value) for value in found])
        if number < len(histories):
            both, small, big = histories[number]
            given = []
            for history in both:  # in one list: a run may empty its history and begin anew
                given[:] = history
                found = answer.noise_scale(given, small, big)
                scales.append(a_number("noise_scale", "the result", found))
                if given != history:
                    raise Wrong(
                        "noise_scale: the caller's history is not what it was before the call."
                    )
    return {"solved": solved, "scales": scales}


# ---- the measurement


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
