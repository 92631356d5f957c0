"""Given: the contracts of exercises 02a to 02c, and the judges behind their check cells.

Ranks take steps, and each computes the right result for its own micro-batches in float64. The judge
adds these up over the ranks and compares gradients and losses; messages and memory are checked on
the rank.
"""

import contextlib
import copy
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP

from labs.support.gradient_accumulation import tiny_model
from labs.support.gradient_accumulation.tiny_model import MicroBatch, counted, loss_sum
from utils.course.assertions import Wrong, a_number, alike, close, same_bits, told_apart
from utils.course.contract import Case, tensors
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial
from utils.measure.traffic import Event

STEPS = 4
A_FEW = 16  # bytes: a count or a loss
PADDING = [0] * 12  # rows in which no target counts

# ---- the micro-batches


@dataclass(frozen=True)
class Training:
    """A model, and the micro-batches of each rank in each step.

    size: number of ranks; unequal: they have different numbers of micro-batches, and rank `odd` has
    none in step 1. In step 2 rank `odd` has only padding.
    """

    dtype: torch.dtype
    size: int
    vocab: int
    width: int
    length: int
    counts: list[int]  # of micro-batches, in turn
    unequal: bool
    odd: int
    seed: int

    def __str__(self) -> str:
        return f"a {self.dtype} model of {self.vocab} words and width {self.width}"

    def model(self) -> torch.nn.Module:
        """A new model, equal on every rank."""
        return tiny_model.new_model(self.seed, self.vocab, self.width, self.dtype)

    def share(self, step: int, rank: int) -> list[MicroBatch]:
        """The micro-batches of a rank."""
        seed, odd = self.seed + 100 * step + rank, rank == self.odd and self.size > 1
        draw, count = random.Random(seed), self.counts[(step + rank * self.unequal) % STEPS]
        rows = [[draw.randrange(self.length + 1) for _ in range(12)] for _ in range(count)]
        rows[0].append(self.length)  # some tokens must count
        if step == 0 and odd and self.unequal:
            rows = []
        elif step == 1 and odd:
            rows = [PADDING] * count
        return tiny_model.micro_batches(seed, rows, self.vocab, self.length)


def trainings(trial: Trial, size: int, unequal: bool) -> Iterator[tuple[Training, bool]]:
    """Trainings of 1 to 8 micro-batches per step, and whether the network is slow; on 2 ranks, one
    of each type."""
    draw, counts = trial.draw, [1, 2, 3, trial.draw.randrange(7, 9)]
    draw.shuffle(counts)
    types = [torch.float64, torch.float32, *[torch.bfloat16] * unequal]
    for dtype in types if size == 2 else [draw.choice(types)]:
        yield Training(
            dtype, size, draw.randrange(9, 14), draw.randrange(4, 8), draw.randrange(8, 13),
            counts, unequal, draw.randrange(size), trial.new_seed() // 2,
        ), dtype == torch.float32


# ---- what is right


@dataclass(frozen=True)
class Sums:
    """Sums over a rank's tokens, in float64; the gradients of all parameters in one 1-D tensor."""

    gradient: torch.Tensor
    loss: float
    tokens: int
    means: torch.Tensor  # the sum of the micro-batches' mean gradients

    @classmethod
    def of(cls, model: torch.nn.Module, share: list[MicroBatch]) -> "Sums":
        """The right sums for one rank; each loss is computed in the model's own type."""
        twin, losses = copy.deepcopy(model).double(), []
        gradient = means = torch.zeros_like(flat(twin.parameters()))
        for x, y in share:
            one = flat(torch.autograd.grad(loss_sum(twin, x, y), list(twin.parameters())))
            gradient, means = gradient + one, means + one / max(counted(y), 1)
            losses.append(loss_sum(model, x, y).item())
        return cls(gradient, math.fsum(losses), sum(counted(y) for _, y in share), means)

    def __add__(self, other: "Sums") -> "Sums":
        names = self.__dataclass_fields__
        return Sums(*(getattr(self, name) + getattr(other, name) for name in names))


Step = tuple[Sums, torch.Tensor, torch.Tensor]  # a rank's own, the gradient found, the loss


def flat(tensors) -> torch.Tensor:
    """Concatenate all elements into one 1-D tensor with its own memory."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All `.grad` in one tensor, zeros where there is none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def scalar(what: str, value: object, like: torch.Tensor) -> torch.Tensor:
    """A 0-D tensor of the type of `like`, at least fp32."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.tensor(a_number(what, "what is returned", value), dtype=dtype)


def parallel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is a multiple of the other, to five digits; False for zeros."""
    return float(torch.cosine_similarity(a.double(), b, dim=0)) > 1 - 1e-10


def symptom(rank: int, found: list[torch.Tensor], right: torch.Tensor, total: Sums) -> str:
    """A hint for a wrong gradient. found: by rank."""
    got, size = found[rank], len(found)
    if not got.any():
        return (
            "It is zero. A rank without micro-batches gets the sum like every other rank; and "
            "zeroing comes\nafter the optimizer's step."
        )
    if parallel(got, right):
        return (
            f"It is {float(got.double() @ right / (right @ right)):.5g} times the right one, and "
            f"{total.tokens} tokens count on {size} ranks. What is it divided by?\nDDP takes the "
            "mean over the ranks, and you need a sum over tokens. Clip once, before the "
            "optimizer's step."
        )
    if parallel(got, total.means):
        return "It is the mean of the micro-batches' means: short ones weigh too much."
    if not all(alike(got, other) for other in found):
        return (
            "The ranks have unequal gradients, and their models will diverge. What was "
            "all-reduced, and is it\ncopied back? DDP reads its flag in the forward pass."
        )
    return "Does every micro-batch count, each token with the same weight, and nothing else?"


def right_steps(case: str, by_rank: list[list[Step]], norms: list[float] | None = None) -> None:
    """Compare the steps of all ranks. norms: the norms to which the gradients are clipped."""
    for number, steps in enumerate(zip(*by_rank)):
        total = sum((own for own, _, _ in steps[1:]), steps[0][0])
        right, most = total.gradient / total.tokens, norms[number] if norms else math.inf
        clips = right.norm() > most
        if clips:
            right *= most / right.norm()
        loss = torch.tensor(total.loss / total.tokens, dtype=torch.float64)
        found = [gradient for _, gradient, _ in steps]
        for rank, (_, gradient, returned) in enumerate(steps):
            where = f"{case}, rank {rank}, step {number + 1}"
            # a hand-written clip may leave out the 1e-6 that clip_grad_norm_ adds to the norm
            slack = 1e-4 / torch.finfo(gradient.dtype).eps if clips else 64
            hint = symptom(rank, found, right, total)
            close(where, "the gradient", gradient, right, hint=hint, slack=slack)
            hint = "It is the mean over the tokens of all ranks: in which type is it sent?"
            close(where, "the loss returned", returned, loss, hint=hint)
        same_bits(case, f"the gradient of step {number + 1}", found)
        same_bits(case, f"the loss of step {number + 1}", [loss for _, _, loss in steps])


# ---- on a rank


@contextlib.contextmanager
def one_at_a_time(step: str, model: torch.nn.Module, share: list[MicroBatch]) -> Iterator[Look]:
    """Look at the block's operations; only one micro-batch's activations may be in memory."""
    twin = copy.deepcopy(model)
    with Look() as enough:
        for x, y in sorted(share, key=lambda one: len(one[0]))[-1:]:
            loss_sum(twin, x, y).backward()
    with Look() as look:
        yield look
    if look.peak > 1.1 * enough.peak + 4 * gradients(model).nbytes + 4096:
        raise Wrong(
            f"{step}: up to {look.peak:,} bytes allocated during the step are in memory;\n"
            f"one micro-batch at a time needs {enough.peak:,}. Call backward for each micro-batch "
            "before the next\none's forward pass, and keep none of its tensors or graphs."
        )


def one_all_reduce(where: str, events: list[Event], most: int, how: str) -> None:
    """There is one all-reduce of at most `most` bytes; a single rank needs none."""
    ops = [event.op for event in events]
    if ops != ["all_reduce"] and (ops or dist.get_world_size() > 1):
        raise Wrong(
            f"{where} calls {', '.join(ops) or 'nothing'} ({len(ops)} collectives); one "
            f"all-reduce is enough:\n{how}"
        )
    if ops and events[0].payload > most:
        raise Wrong(
            f"{where}: an all-reduce of {events[0].payload:,} bytes; {most:,} are enough for all "
            "that must be sent."
        )


# ---- 02a


def accumulation(trial: Trial) -> str:
    """Judge `accumulate` and `reduce_once` in the file."""
    for group in trial.groups(hang="Do all ranks call the all-reduce, each once?"):
        for training, late in trainings(trial, group.size, unequal=True):
            case = group.case(str(training))
            right_steps(case, group.run(case, accumulated, training, late=late))
    return (
        "the gradient of the mean over all tokens equals one rank's, on 1 to 6 ranks, in fp32 and\n"
        "fp64; padding, a rank without micro-batches and a missing gradient change nothing;\n"
        "bf16 gradients are accumulated in fp32, as are a bf16 model's losses; one all-reduce per\n"
        "step for everything, and the activations of one micro-batch at a time, of 1 to 8."
    )


def accumulated(answer, training: Training) -> list[Step]:
    """On a rank: run `accumulate`, compare it with the rank's own sums, and run `reduce_once`."""
    rank, steps, model = dist.get_rank(), [], training.model()
    how = "put the gradients, the loss and the number of tokens into one tensor."
    for number in range(STEPS):
        name, share = f"step {number + 1}", training.share(number, rank)
        model.zero_grad(set_to_none=number % 2 == 0)
        own = Sums.of(model, share)
        with one_at_a_time(name, model, share) as look:
            sums = answer.accumulate(model, share)
        right_sums(name, sums, gradients(model), own, look.events)
        with Look() as look:
            loss = answer.reduce_once(model, *sums)
        gradient = gradients(model)
        most = (len(gradient) + 2) * max(gradient.itemsize, 4)
        one_all_reduce(f"{name}: reduce_once", look.events, most, how)
        steps.append((own, gradient, scalar(f"{name}: reduce_once", loss, gradient)))
    return steps


def right_sums(
    step: str, sums: tuple, gradient: torch.Tensor, own: Sums, events: list[Event]
) -> None:
    """Check what accumulate returns and leaves in `.grad`."""
    if events:
        raise Wrong(
            f"{step}: accumulate communicates ({events[0].op}).\n"
            "The sums are not needed before the last micro-batch: leave that to reduce_once."
        )
    loss, tokens = sums
    if tokens != own.tokens:
        raise Wrong(
            f"{step}: accumulate counts {float(tokens):g} tokens; this rank's micro-batches have "
            f"{own.tokens}.\nPadding (the target -100) does not count."
        )
    hint = (
        "It is a sum, not a mean: every token weighs the same. In which type is it added up? And "
        "a\nmicro-batch may have no token that counts."
    )
    right = torch.tensor(own.loss, dtype=torch.float64)
    found = scalar(f"{step}: accumulate", loss, gradient)
    close(step, "accumulate's sum of losses", found, right, hint=hint)
    hint = "accumulate leaves the gradient of the sum of this rank's losses in `.grad`."
    if parallel(gradient, own.means):
        hint += "\nIt adds up the micro-batches' means: tokens in short ones weigh too much."
    close(step, ".grad after accumulate", gradient, own.gradient, hint=hint)


# ---- 02b


def ddp(trial: Trial) -> str:
    """Judge `tokens_of_all`, `backward` and `train_step` in the file."""
    for group in trial.groups(hang="Does every rank make the same calls, each time?"):
        if group.size == 2:
            group.run(group.case(), counts_all, trial.draw.randrange(2**23, 2**24) * 2 + 1)
        for training, late in trainings(trial, group.size, unequal=False):
            low, high = trial.draw.uniform(0.01, 0.04), trial.draw.uniform(20, 30)
            norms = [math.inf, low, high, low]  # the gradients' norms are between low and high
            case = group.case(str(training))
            right_steps(case, group.run(case, synchronized, training, norms, late=late), norms)
    return (
        "steps equal one rank's with the whole batch, on 1 to 6 ranks, in fp32 and fp64, with\n"
        "clipping too; one all-reduce of the gradients per step, for any number of micro-batches,\n"
        "and two of one value; the activations of one micro-batch at a time; the same model on\n"
        "all ranks."
    )


def counts_all(answer, tokens: int) -> None:
    """On a rank: run tokens_of_all, where rank 0 has `tokens` tokens, all views of one element."""
    one, padding = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), tiny_model.IGNORE)
    many = one.expand(1, tokens if dist.get_rank() == 0 else 2)
    with Look() as look:
        found = answer.tokens_of_all([(y, y) for y in (many, padding.expand(1, 5))])
    if found != tokens + 2:
        raise Wrong(
            f"tokens_of_all returns {found:,.0f}, but the two ranks together have {tokens + 2:,} "
            "tokens that count."
        )
    one_all_reduce("tokens_of_all", look.events, A_FEW, "of the number of tokens.")


def synchronized(answer, training: Training, norms: list[float]) -> list[Step]:
    """On a rank: take steps with DDP."""
    rank, steps, seen = dist.get_rank(), [], []
    model = DDP(training.model(), bucket_cap_mb=100)
    for _ in range(2):  # DDP agrees on the order of its buckets once, which must not be counted
        loss_sum(model, *training.share(2, 0)[0]).backward()
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(model)))
    for number, max_norm in enumerate(norms):
        name, share = f"step {number + 1}", training.share(number, rank)
        model.zero_grad(set_to_none=number % 2 == 0)
        own = Sums.of(model.module, share)
        with one_at_a_time(name, model.module, share) as look:
            loss = answer.train_step(model, share, optimizer, max_norm)
        if len(seen) != 1:
            raise Wrong(
                f"{name}: train_step takes {len(seen)} optimizer steps. It should take one, after "
                "all micro-batches."
            )
        gradient = seen.pop()
        synchronized_once(name, look.events)
        if gradients(model).any():
            raise Wrong(f"{name}: gradients are left over after the step: zero them.")
        steps.append((own, gradient, scalar(f"{name}: train_step", loss, gradient)))
    return steps


def synchronized_once(step: str, events: list[Event]) -> None:
    """There are DDP's own all-reduce and two of one value each."""
    large = sum(event.payload > A_FEW for event in events)
    if large != 1 or len(events) > 3:
        hint = "The two small ones: tokens before the first micro-batch, loss after the last."
        if not large:
            hint = "Gradients are never all-reduced: does the last micro-batch run outside no_sync?"
        elif large > 1:
            hint = "Is the *forward* pass inside no_sync too? DDP decides there."
        raise Wrong(
            f"{step}: {large} collectives with gradients, {len(events) - large} small ones; 1 and "
            f"2 are enough.\n{hint}"
        )


# ---- 02c


def norms(trial: Trial) -> str:
    """Judge `squared_norms` in the file."""
    for group in trial.groups(hang="Does every rank call the all-reduce?"):
        for drawn in tensors(trial, group.size):
            case = replace(drawn, shape=(max(1, math.prod(drawn.shape)),))
            where = group.case(f"{case}{', on a slow network' * case.late}")
            for number, calls in enumerate(zip(*group.run(where, measured, case, late=case.late))):
                given = [case.numbers(rank, group.size, number) for rank in range(group.size)]
                right_norms(where, torch.stack(given), calls)
    return (
        "both norms and the mean gradient are right on 1 to 6 ranks, in fp32 and fp64, for a few\n"
        "elements and for 50,000, even where one rank's gradient is zero or has a NaN; one\n"
        "all-reduce, one element longer than the gradient."
    )


def measured(answer, case: Case) -> list[list[torch.Tensor]]:
    """On a rank: the gradient afterwards and the two results, for each call."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), []
    how = "append `small` to the gradient, and send them together."
    for call in range(case.calls):
        own = case.numbers(rank, size, call)
        around = torch.cat([own.new_ones(3), own, own.new_ones(3)])  # memory on either side
        with Look() as look:
            small, big = answer.squared_norms(around[3:-3])
        if not (torch.cat([around[:3], around[-3:]]) == 1).all():
            raise Wrong("squared_norms writes beyond the ends of `gradient`.")
        one_all_reduce("squared_norms", look.events, (len(own) + 1) * own.itemsize, how)
        results = (scalar("squared_norms", value, own) for value in (small, big))
        found.append([around[3:-3].clone(), *results])
    return found


def right_norms(where: str, given: torch.Tensor, calls: tuple[list[torch.Tensor], ...]) -> None:
    """Check one call. given: the gradients, one row per rank; calls: the results, by rank."""
    size, given = len(given), given.double()
    mean, squares = given.mean(0), given.square().sum(1)
    big = mean.square().sum()
    for rank, found in enumerate(calls):
        for got, (name, right, wrongs) in zip(found, (
            ("`gradient` afterwards", mean, [
                (size * mean, "It is the sum over the ranks, not the mean."),
                (given[rank], "It still holds this rank's own values: copy the mean into it."),
            ]),
            ("`small`", squares.mean(), [
                (squares.sum(), "It is the sum: take the mean."),
                (squares[rank], "It is this rank's own: the mean must include the others' as "
                                "well."),
            ]),
            ("`big`", big, [
                (big.sqrt(), "It is the norm: take its square."),
                (size**2 * big, "It is the squared norm of the sum: take that of the mean."),
            ]),
        )):
            hint = next((words for wrong, words in wrongs if alike(got, wrong, 512)), "")
            close(f"{where}, rank {rank}", name, got, right, hint=hint)
    for name, found in zip(("`gradient`", "`small`", "`big`"), zip(*calls)):
        same_bits(where, name, [got.nan_to_num() for got in found])


def estimate(trial: Trial) -> str:
    """Judge `signal_and_noise` and `noise_scale` in the file."""
    trial.alone("in one process", estimated, trial.new_seed())
    return (
        "signal and noise solve the two equations in all drawn cases; noise_scale averages first\n"
        "and divides last, for histories of up to 60 steps, even where the mean |G|² is negative."
    )


def estimated(answer, seed: int) -> None:
    """On a rank: check both functions."""
    rows = st.tuples(st.integers(1, 39), st.integers(2, 8), st.integers(0, 4)).map(
        lambda drawn: (drawn[0], drawn[0] * drawn[1] + drawn[2])
    )
    sizes = st.integers(-6, 3).map(lambda exponent: 10.0**exponent)  # of squared norms
    norms = st.tuples(sizes, st.floats(-1, 5), st.just(0.0) | st.floats(0.1, 90), rows)
    for_all(seed, norms, lambda drawn: solves(answer, *drawn), 40)
    draws, signs = st.integers(0, 2**20), st.sampled_from((1, -1))
    histories = st.tuples(draws, st.integers(1, 60), sizes, signs, rows)
    for_all(seed, histories, lambda drawn: averages(answer, *drawn), 40)


def solves(answer, size: float, signal: float, noise: float, rows: tuple[int, int]) -> None:
    """signal_and_noise recovers the signal and noise from which the two norms were computed."""
    signal, noise = size * signal, size * noise
    norms = [signal + noise / n for n in rows]
    near = 1e-9 * max(map(abs, norms)) * rows[0]
    found = answer.signal_and_noise(*norms, *rows)
    for name, value, right in zip(("|G|²", "tr Σ"), found, (signal, noise), strict=True):
        if not math.isclose(value, right, rel_tol=1e-9, abs_tol=near):
            raise Wrong(
                f"norms of {norms[0]:.4g} for {rows[0]} rows and {norms[1]:.4g} for {rows[1]} come "
                f"from {name} = {right:.4g}; signal_and_noise\nfinds {value:.4g}. Put your two "
                "results back into the two equations."
            )


def averages(
    answer, seed: int, steps: int, size: float, sign: int, rows: tuple[int, int]
) -> None:
    """Check noise_scale on noisy steps whose mean |G|² has this sign or is too close to zero."""
    draw, noise = random.Random(seed), 20.0
    history = [
        tuple(size * (sign + noise / n + draw.gauss(0, 0.8)) for n in rows) for _ in range(steps)
    ]
    small, big = (math.fsum(column) / steps for column in zip(*history))
    noise = (small - big) / (1 / rows[0] - 1 / rows[1])
    signal = big - noise / rows[1]
    found = a_number("noise_scale", "the result", answer.noise_scale(history, *rows))
    if abs(signal) > 0.1 * size and not math.isclose(found, noise / signal, rel_tol=1e-8):
        mine, wanted = told_apart(found, noise / signal)
        raise Wrong(
            f"noise_scale of {steps} noisy steps, {rows[0]} and {rows[1]} rows, with the mean "
            f"|G|² = {signal:.4g},\nis {mine}, not {wanted}. First average the signal and the "
            "noise over all steps,\nas they are; divide last."
        )
