"""Given: what exercises 02a to 02c ask for, and how their check cells judge it.

Ranks take steps, and each computes in float64 what is right for its own micro-batches. The judge
adds that up over the ranks, and compares gradients and losses; messages and memory are looked at
on the rank.
"""

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.nn.parallel import DistributedDataParallel as DDP

from labs.support.gradient_accumulation import tiny_model
from labs.support.gradient_accumulation.tiny_model import MicroBatch, counted, loss_sum
from utils.course import assertions
from utils.course.assertions import Wrong, a_number, close, described, same_bits, unchanged
from utils.course.contract import Case, tensors
from utils.course.observe import Look
from utils.course.properties import for_all
from utils.course.runner import Trial
from utils.measure.traffic import Event

STEPS = 6
A_FEW = 16  # bytes: a count or a loss
PADDING = [0] * 24  # rows of which no target counts

# ---- the micro-batches


@dataclass(frozen=True)
class Training:
    """A model, and for each step and rank its micro-batches.

    In the last step one rank, `odd`, has a NaN in its weights. size: how many ranks; unequal: they
    have different numbers of micro-batches.
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
        """The same on every rank."""
        return tiny_model.new_model(self.seed, self.vocab, self.width, self.dtype)

    def share(self, step: int, rank: int) -> list[MicroBatch]:
        """The micro-batches of a rank: in step 1 the odd rank has none, in step 2 only padding."""
        seed, odd = self.seed + 100 * step + rank, rank == self.odd and self.size > 1
        draw, count = random.Random(seed), self.counts[(step + rank * self.unequal) % STEPS]
        rows = [[draw.randrange(self.length + 1) for _ in range(draw.randrange(22, 25))]
                for _ in range(count)]
        rows[0].append(self.length)  # some tokens must count
        if step == 0 and odd and self.unequal:
            rows = []
        elif step == 1 and odd:
            rows = [PADDING] * count
        elif step == 2:
            rows.append(PADDING)
        return tiny_model.micro_batches(seed, rows, self.vocab, self.length)

    def prepare(self, step: int, rank: int, model: torch.nn.Module) -> None:
        """No gradients, None or zeros in turn; the NaN."""
        model.zero_grad(set_to_none=step % 2 == 0)
        if step == STEPS - 1 and rank == self.odd:
            model[0].weight.data.fill_(math.nan)


def trainings(trial: Trial, size: int, unequal: bool) -> Iterator[tuple[Training, bool]]:
    """Of 1 to 11 micro-batches per step, and whether the network is slow.

    On 2 and 3 ranks all types, else one. On two ranks the gradients of one model have more than
    50,000 elements.
    """
    draw, counts = trial.draw, [1, 2, 2, 3, trial.draw.randrange(9, 12), 3]
    draw.shuffle(counts)
    types = [torch.float64, torch.float32, *[torch.bfloat16] * unequal]
    for dtype in types if size in (2, 3) else [draw.choice(types)]:
        large = 200 * (size == 2 and dtype == torch.float32)
        yield Training(
            dtype, size, draw.randrange(9, 14) + large, draw.randrange(4, 8) + large // 2,
            draw.randrange(8, 13), counts, unequal, draw.randrange(size), trial.new_seed() // 2,
        ), dtype == torch.float32


# ---- what is right


@dataclass(frozen=True)
class Sums:
    """Of a rank's tokens, in float64; gradients of all parameters, 1-D."""

    gradient: torch.Tensor
    loss: float
    tokens: int
    positions: int  # tokens and padding
    means: torch.Tensor  # the sum of the micro-batches' mean gradients
    last: torch.Tensor  # the gradient of the last micro-batch

    @classmethod
    def of(cls, model: torch.nn.Module, share: list[MicroBatch]) -> "Sums":
        """What is right for one rank; each loss is one of the model's own type."""
        twin, losses = copy.deepcopy(model).double(), []
        gradient = means = last = torch.zeros_like(flat(twin.parameters()))
        for x, y in share:
            last = flat(torch.autograd.grad(loss_sum(twin, x, y), list(twin.parameters())))
            gradient, means = gradient + last, means + last / max(counted(y), 1)
            losses.append(loss_sum(model, x, y).item())
        tokens, positions = (sum(count(y) for _, y in share) for count in (counted, torch.numel))
        return cls(gradient, math.fsum(losses), tokens, positions, means, last)

    def __add__(self, other: "Sums") -> "Sums":
        names = self.__dataclass_fields__
        return Sums(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True)
class Step:
    """What a rank has found in a step or a call: the gradients, 1-D, and what is returned.
    max_norm: to which the gradient is clipped."""

    name: str
    own: Sums
    found: list[torch.Tensor]
    max_norm: float = math.inf


@dataclass(frozen=True)
class Seen:
    """A value of a rank, those of all ranks, and the sums that are right for it and for all."""

    got: torch.Tensor
    by_rank: Sequence[torch.Tensor]
    own: Sums
    total: Sums

    def is_gradient_over(self, divisor: float) -> bool:
        return bool(divisor) and alike(self.got, self.total.gradient / divisor)


def flat(tensors) -> torch.Tensor:
    """One 1-D tensor of all elements, in memory of its own."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """All `.grad` in one, zeros where there is none."""
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """0-D, of the type of `like`, fp32 at least."""
    return torch.tensor(value, dtype=torch.promote_types(like.dtype, torch.float32))


def alike(a: torch.Tensor, b: torch.Tensor | float) -> bool:
    """Whether they are equal to five digits."""
    a, b = a.double(), torch.as_tensor(b).double()
    return bool((a - b).norm() <= 1e-5 * b.norm())


def parallel(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one is a multiple of the other, to five digits."""
    return bool(b.any()) and alike(a.double() * b.norm(), b * a.double().norm())


Symptoms = Sequence[tuple[Callable[[Seen], bool], str]]  # the first that holds is told
GRADIENT: Symptoms = [
    (lambda seen: not seen.got.any(),
     "It is zero. A rank without micro-batches gets the sum like all others; and zeroing comes "
     "after the\noptimizer's step."),
    (lambda seen: seen.is_gradient_over(1),
     "It is the sum over all tokens, and as many times too large as there are tokens: divide."),
    (lambda seen: seen.is_gradient_over(len(seen.by_rank)),
     "It is the sum divided by the number of ranks, not by the number of tokens."),
    (lambda seen: seen.is_gradient_over(seen.total.positions),
     "It is the sum divided by all positions: padding does not count."),
    (lambda seen: seen.is_gradient_over(seen.own.tokens),
     "It is the sum divided by the tokens of this rank, not by those of all ranks."),
    (lambda seen: seen.is_gradient_over(seen.total.tokens * len(seen.by_rank)),
     "It is 1/N of the right one on N ranks. DDP takes the mean over the ranks, and you need a sum "
     "over tokens."),
    (lambda seen: parallel(seen.got, seen.total.means),
     "It is the mean of the micro-batches' means: short ones weigh too much."),
    (lambda seen: not all(alike(got, seen.by_rank[0]) for got in seen.by_rank),
     "The ranks have unequal gradients, and will hold different models. What was all-reduced, and "
     "is it\ncopied back? DDP reads its flag in the forward pass."),
    (lambda seen: True,
     "Does every micro-batch count, each token with the same weight, and nothing else?"),
]
LOSS: Symptoms = [
    (lambda seen: (seen.got / seen.total.loss * seen.total.tokens - 1).abs() < 0.02,
     "In which type do the numbers travel, and what does it make of this count? Is there a "
     "float32\ntensor on the way?"),
    (lambda seen: True, "It should be the mean loss over the tokens of all ranks."),
]
Values = dict[str, tuple[Callable[[Sums], torch.Tensor], Symptoms]]  # by name


def mean_gradient(total: Sums) -> torch.Tensor:
    return total.gradient / total.tokens


def mean_loss(total: Sums) -> torch.Tensor:
    return torch.tensor(total.loss / total.tokens, dtype=torch.float64)


OF_A_STEP = {"the gradient": (mean_gradient, GRADIENT), "the loss returned": (mean_loss, LOSS)}


def right_steps(case: str, found: list[tuple[list[Step], int]], values: Values) -> None:
    """Compares the values of all ranks. found: by rank, (its steps, bytes that are kept)."""
    for steps in zip(*(steps for steps, _ in found)):
        total = sum((step.own for step in steps[1:]), steps[0].own)
        found_by_name = zip(*(step.found for step in steps))
        for (name, (right, symptoms)), by_rank in zip(values.items(), found_by_name):
            for rank, (step, got) in enumerate(zip(steps, by_rank)):
                seen = Seen(got, by_rank, step.own, total)
                hint = next((words for test, words in symptoms if test(seen)), "")
                where, wanted = f"{case}, rank {rank}, {step.name}", right(total)
                if wanted.dim() and wanted.isnan().any() and step.max_norm < math.inf:
                    continue  # how a NaN is clipped is not said
                if wanted.dim() and wanted.norm() > step.max_norm:
                    got, wanted = clipped(where, got, wanted, step.max_norm)
                    hint = f"Its norm is right, and its direction is not. {hint}"
                close(where, name, got, wanted, hint=hint)
            same_bits(case, f"{name} of {steps[0].name}", [got.nan_to_num() for got in by_rank])
    for rank, (steps, kept) in enumerate(found):
        if kept:
            raise Wrong(
                f"{case}, rank {rank}: after {len(steps)} steps {kept:,} bytes of what was made "
                "are still held,\ngradients not counted. Who keeps them, and for what?"
            )


def clipped(
    where: str, got: torch.Tensor, right: torch.Tensor, most: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with the norm `most`, which is that of `got` already."""
    found = got.double().norm()
    # a hand-written clip may leave out the 1e-6 that clip_grad_norm_ adds to the norm
    if (found / most - 1).abs() > 2e-6 / right.norm() + 1e-5:
        raise Wrong(
            f"{where}: the gradient, clipped to {most:.4g}, has the norm {found:.4g} at the "
            "optimizer's step.\nClip once, before that step, the accumulated gradient of all ranks."
        )
    return (got.double() * (most / found)).to(got.dtype), right * (most / right.norm())


# ---- on a rank


@contextlib.contextmanager
def observed(step: str, model: torch.nn.Module, share: list) -> Iterator[Look]:
    """Looks at what happens inside: micro-batches stay as they are, and one is in memory."""
    given, twin, enough = list(share), copy.deepcopy(model), Look()
    with enough, forward_passes(twin, enough) as needed:
        for x, y in sorted(share, key=lambda one: len(one[0]))[-1:]:
            loss_sum(twin, x, y)
    look = Look(tokens=[x for x, _ in share], targets=[y for _, y in share])
    with look, forward_passes(model, look) as alive:
        yield look
    if len(share) != len(given) or any(a is not b for a, b in zip(share, given)):
        raise Wrong(f"{step}: the caller's list of micro-batches is not what it was.")
    unchanged(step, look.changed())
    if max(alive) > 1.1 * max(needed) + 4 * gradients(model).nbytes + 2048:
        raise Wrong(
            f"{step}: {max(alive):,} bytes that were made in the step are alive at the end of a "
            f"forward pass;\none micro-batch at a time needs {max(needed):,}. Call backward for "
            "each micro-batch, before the next\none's forward pass, and keep no tensor and no "
            "graph of it."
        )


@contextlib.contextmanager
def forward_passes(model: torch.nn.Module, look: Look) -> Iterator[list[int]]:
    """Bytes that are alive, by `look`, at the end of each forward pass."""
    ends = [0]
    handle = model.register_forward_hook(lambda *_: ends.append(look.alive))
    yield ends
    handle.remove()


def one_all_reduce(where: str, events: list[Event], most: int, how: str) -> None:
    """Of at most so many bytes; a rank alone needs none."""
    ops = [event.op for event in events]
    if ops != ["all_reduce"] and (ops or dist.get_world_size() > 1):
        raise Wrong(
            f"{where} calls {', '.join(ops) or 'nothing'} ({len(ops)} collectives), where one "
            f"all-reduce is enough:\n{how}"
        )
    if ops and events[0].payload > most:
        raise Wrong(
            f"{where}: an all-reduce of {events[0].payload:,} bytes, and {most:,} hold all that "
            "must travel."
        )


def two_numbers(function: str, found: Any, names: str) -> list[float]:
    """What a function returns."""
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Wrong(f"{function} returns {described(found)}: two numbers are asked for, ({names}).")
    return [a_number(function, "one result", value) for value in found]


# ---- 02a


def accumulation(trial: Trial) -> str:
    """Judges `accumulate` and `reduce_once` in the file."""
    for group in trial.groups(hang="Do all ranks call the all-reduce, each once?"):
        for training, late in trainings(trial, group.size, unequal=True):
            case = group.case(str(training))
            right_steps(case, group.run(case, accumulated, training, late=late), OF_A_STEP)
    return (
        "the gradient of the mean over all tokens is one rank's, on 1 to 6 ranks, in fp32 and\n"
        "fp64; padding, a rank without micro-batches and a missing gradient change nothing;\n"
        "bf16 gradients are added up in fp32, and so are a bf16 model's losses; one all-reduce a\n"
        "step for everything, also for 50,000 numbers, the activations of one micro-batch at a\n"
        "time, of 1 to 11, and nothing kept after the step."
    )


def accumulated(answer, training: Training) -> tuple[list[Step], int]:
    """On a rank: `accumulate`, compared with the rank's own sums, and `reduce_once`."""
    rank, steps, model, whole = dist.get_rank(), [], training.model(), Look()
    how = "put the gradients, the loss and the number of tokens into one tensor."
    for number in range(STEPS):
        name, share = f"step {number + 1}", training.share(number, rank)
        training.prepare(number, rank, model)
        own = Sums.of(model, share)
        with whole, observed(name, model, share) as look:
            sums = answer.accumulate(model, share)
        right_sums(name, sums, gradients(model), own, look.events)
        if number == 3 and rank == training.odd:
            model[1].bias.grad = None
        own = replace(own, gradient=gradients(model).double())
        with whole, Look() as look:
            loss = answer.reduce_once(model, *sums)
        loss, gradient = a_number(name, "what reduce_once returns", loss), gradients(model)
        most = (len(gradient) + 2) * max(gradient.itemsize, 4)
        one_all_reduce(f"{name}: reduce_once", look.events, most, how)
        steps.append(Step(name, own, [gradient, scalar(loss, gradient)]))
        del sums, look
    kept = whole.kept([p.grad for p in model.parameters()], allowed=64)
    return steps, kept * (kept > 64)


def right_sums(
    step: str, sums: Any, gradient: torch.Tensor, own: Sums, events: list[Event]
) -> None:
    """What accumulate returns, and leaves in `.grad`."""
    if events:
        raise Wrong(
            f"{step}: accumulate communicates ({events[0].op}).\n"
            "Nobody needs the sums before the last micro-batch: leave it to reduce_once."
        )
    loss, tokens = two_numbers(f"{step}: accumulate", sums, "losses, tokens")
    if tokens != own.tokens:
        hint = "\nPadding (the target -100) does not count." * (tokens == own.positions)
        raise Wrong(
            f"{step}: accumulate counts {tokens:g} tokens, this rank's micro-batches have "
            f"{own.tokens}.{hint}"
        )
    hint = (
        "A sum, not a mean: every token weighs the same. In which type is it added up? And a "
        "micro-batch\nmay have no token that counts."
    )
    right = torch.tensor(own.loss, dtype=torch.float64)
    close(step, "accumulate's sum of losses", scalar(loss, gradient), right, hint=hint)
    hint = "accumulate leaves the gradient of the sum of this rank's losses in `.grad`."
    if alike(gradient, own.last):
        hint += "\nIt is that of the last micro-batch alone."
    elif parallel(gradient, own.means):
        hint += "\nIt adds up the micro-batches' means: the tokens of short ones weigh too much."
    close(step, ".grad after accumulate", gradient, own.gradient, hint=hint)


# ---- 02b


def ddp(trial: Trial) -> str:
    """Judges `tokens_of_all`, `backward` and `train_step` in the file."""
    hang = "Does every rank make the same calls, also for an empty micro-batch?"
    for group in trial.groups(hang=hang):
        tokens = [trial.draw.randrange(2**23, 2**24) * 2 + 1] + [2] * (group.size - 1)
        for training, late in trainings(trial, group.size, unequal=False):
            low, high = trial.draw.uniform(0.01, 0.04), trial.draw.uniform(20, 30)
            norms = math.inf, low, high, low, math.inf, high  # the gradients' lie between
            case = group.case(str(training))
            found = group.run(case, synchronized, training, tokens, norms, late=late)
            right_steps(case, found, OF_A_STEP)
    return (
        "steps equal one rank's with the whole batch, on 1 to 6 ranks, in fp32 and fp64, also\n"
        "clipped; one all-reduce of the gradients a step, for any number of micro-batches, and\n"
        "two of one number; the activations of one micro-batch at a time; one model on all ranks."
    )


def synchronized(
    answer, training: Training, tokens: list[int], norms: Sequence[float]
) -> tuple[list[Step], int]:
    """On a rank: `tokens_of_all`, then steps."""
    rank, steps, seen, whole = dist.get_rank(), [], [], Look()
    right_count(answer, tokens)
    model = DDP(training.model(), bucket_cap_mb=100)
    for _ in range(2):  # DDP agrees on the order of its buckets once: not to be counted
        loss_sum(model, *training.share(2, 0)[0]).backward()
        model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(model)))
    for number, max_norm in enumerate(norms):
        name, share = f"step {number + 1}", training.share(number, rank)
        training.prepare(number, rank, model.module)
        own = Sums.of(model.module, share)
        with whole, observed(name, model.module, share) as look:
            loss = answer.train_step(model, share, optimizer, max_norm)
        loss = a_number(name, "what train_step returns", loss)
        if len(seen) != 1:
            raise Wrong(
                f"{name}: train_step takes {len(seen)} optimizer steps. One is right, after all "
                "micro-batches."
            )
        gradient = seen.pop()
        synchronized_once(name, look.events)
        if gradients(model).any():
            raise Wrong(f"{name}: gradients are left over after the step: zero them.")
        steps.append(Step(name, own, [gradient, scalar(loss, gradient)], max_norm))
        del share, look
    kept = whole.kept([p.grad for p in model.parameters()], [step.found for step in steps])
    return steps, kept * (kept > 3 * gradient.nbytes)


def synchronized_once(step: str, events: list[Event]) -> None:
    """DDP's own all-reduce, and two of one number each."""
    large = sum(event.payload > A_FEW for event in events)
    other = sorted({event.op for event in events} - {"all_reduce"})
    if other or large != 1 or len(events) > 3:
        hint = "Of the small ones there are two: the tokens before the first micro-batch, the loss "
        hint += "after the last."
        if not large:
            hint = "The gradients are never all-reduced: the last micro-batch runs outside of "
            hint += "no_sync, forward and backward."
        elif large > 1:
            hint = "Is the *forward* pass inside no_sync, too? DDP decides there. And DDP does all "
            hint += "of them itself."
        raise Wrong(
            f"{step}: {large} all-reduces of gradients, {len(events) - large} small ones"
            f"{', and '.join(['', *other])}; 1 and 2 are enough.\n{hint}"
        )


def right_count(answer, tokens: list[int]) -> None:
    """tokens_of_all, where each rank has so many tokens, in memory for one."""
    one, padding = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), tiny_model.IGNORE)
    batches = [y.expand(1, n) for y, n in ((one, tokens[dist.get_rank()]), (padding, 5))]
    with Look() as look:
        found = answer.tokens_of_all([(y, y) for y in batches])
    found = a_number("tokens_of_all", "the result", found)
    if found != sum(tokens):
        raise Wrong(
            f"tokens_of_all returns {found:,.0f}, but {sum(tokens):,} tokens count on all "
            f"{len(tokens)} ranks together."
        )
    one_all_reduce("tokens_of_all", look.events, A_FEW, "of the number of tokens.")


# ---- 02c

NORMS: Values = {  # each rank counts as one token, with |gradient|² as its loss
    "`gradient` afterwards": (mean_gradient, [
        (lambda seen: seen.is_gradient_over(1), "It is the sum over the ranks, not the mean."),
        (lambda seen: alike(seen.got, seen.own.gradient),
         "Its memory still has this rank's own: copy the mean into it."),
    ]),
    "`small`": (mean_loss, [
        (lambda seen: alike(seen.got, seen.total.loss), "It is the sum: take the mean."),
        (lambda seen: alike(seen.got, seen.own.loss),
         "It is this rank's own: the others' must go into the mean as well."),
        (lambda seen: True, "It should be the mean over the ranks of |gradient of one rank|²."),
    ]),
    "`big`": (lambda total: mean_gradient(total).square().sum(), [
        (lambda seen: alike(seen.got, mean_gradient(seen.total).norm()),
         "It is the norm: take its square."),
        (lambda seen: alike(seen.got, seen.total.gradient.square().sum()),
         "It is the squared norm of the sum: take that of the mean."),
        (lambda seen: True, "It should be |mean gradient|²."),
    ]),
}


def norms(trial: Trial) -> str:
    """Judges `squared_norms` in the file."""
    for group in trial.groups(hang="Does every rank call the all-reduce?"):
        cases = tensors(trial, group.size)
        for late in (False, True):
            some = [replace(case, shape=(max(1, math.prod(case.shape)),)) for case in cases
                    if case.late == late]
            case = group.case("a slow network" * late)
            right_steps(case, group.run(case, measured, some, late=late), NORMS)
    return (
        "both norms and the mean gradient are right on 1 to 6 ranks, in fp32 and fp64, for few\n"
        "and for 50,000 numbers, also where one rank's gradient is zero or has a NaN; one\n"
        "all-reduce, one number longer than the gradient."
    )


def measured(answer, cases: list[Case]) -> tuple[list[Step], int]:
    """On a rank: each call as a step."""
    rank, size, found, whole = dist.get_rank(), dist.get_world_size(), [], Look()
    how = "append the small number to the gradient, and let them travel together."
    for case in cases:
        for call in range(case.calls):
            own = case.numbers(rank, size, call)
            name, x, none = f"{len(own)} numbers in {own.dtype}", own.double(), torch.zeros(1)
            around = torch.cat([own.new_ones(3), own, own.new_ones(3)])  # others' memory beside it
            with whole, Look() as look:
                result = answer.squared_norms(around[3:-3])
            norms = two_numbers(f"{name}: squared_norms", result, "small, big")
            if not (torch.cat([around[:3], around[-3:]]) == 1).all():
                raise Wrong(f"{name}: squared_norms writes beyond the ends of `gradient`.")
            most = (len(own) + 1) * own.itemsize
            one_all_reduce(f"{name}: squared_norms", look.events, most, how)
            values = [around[3:-3].clone(), *(scalar(norm, own) for norm in norms)]
            sums = Sums(x, float(x.square().sum()), 1, 1, none, none)
            found.append(Step(name, sums, values))
            del result, look, around
    kept = whole.kept()
    return found, kept * (kept > 12 * (len(own) + 1))  # a message may stay, for the next one


def estimate(trial: Trial) -> str:
    """Judges `signal_and_noise` and `noise_scale` in the file."""
    trial.alone("in one process", estimated, trial.new_seed())
    return (
        "signal and noise solve the two equations, whatever is drawn; noise_scale averages first\n"
        "and divides last, for histories of up to 3,000 steps, also where the mean |G|² is below "
        "zero."
    )


def estimated(answer, seed: int) -> None:
    """On a rank: both functions."""
    small_rows = st.integers(1, 39)
    rows = st.tuples(small_rows, st.integers(2, 8), st.integers(0, 4)).map(
        lambda drawn: (drawn[0], drawn[0] * drawn[1] + drawn[2])
    )
    sizes = st.integers(-6, 3).map(lambda exponent: 10.0**exponent)  # of squared norms
    noises = st.just(0.0) | st.floats(0.1, 90)
    norms = st.tuples(sizes, st.floats(-1, 5), noises, rows)
    for_all(seed, norms, lambda drawn: solves(answer, *drawn), 40)
    draws, signs = st.integers(0, 2**20), st.sampled_from((1, -1))
    histories = st.tuples(draws, st.integers(1, 60), sizes, signs, rows)
    for_all(seed, histories, lambda drawn: averages(answer, *drawn), 30)
    for sign in (1, -1):
        averages(answer, seed, 1500 + seed % 1500, 1.0, sign, (4, 17))


def solves(answer, size: float, signal: float, noise: float, rows: tuple[int, int]) -> None:
    """signal_and_noise finds what the two norms were made of."""
    signal, noise = size * signal, size * noise
    norms = [signal + noise / n for n in rows]
    found = two_numbers("signal_and_noise", answer.signal_and_noise(*norms, *rows), "|G|², tr Σ")
    near = 1e-9 * max(map(abs, norms)) * rows[0]
    for name, value, right in zip(("|G|²", "tr Σ"), found, (signal, noise)):
        if not math.isclose(value, right, rel_tol=1e-9, abs_tol=near):
            raise Wrong(
                f"norms of {norms[0]:.4g} for {rows[0]} rows and {norms[1]:.4g} for {rows[1]} come "
                f"from {name} = {right:.4g}; signal_and_noise\nmakes {value:.4g} of them. Put your "
                "two results back into the two equations."
            )


def averages(
    answer, seed: int, steps: int, size: float, sign: int, rows: tuple[int, int]
) -> None:
    """noise_scale of noisy steps, in which the mean |G|² has the sign."""
    draw, signal = random.Random(seed), 0.0
    while sign * signal < 0.3:
        noise = draw.uniform(1, 40)
        pairs = [[sign + noise / n + draw.gauss(0, 0.8) for n in rows] for _ in range(steps)]
        small, big = (math.fsum(column) / steps for column in zip(*pairs))
        noise = (small - big) / (1 / rows[0] - 1 / rows[1])
        signal = big - noise / rows[1]
    given = [(size * small, size * big) for small, big in pairs]
    with Look() as look:
        found = a_number("noise_scale", "the result", answer.noise_scale(given, *rows))
    if look.events:
        raise Wrong(
            f"noise_scale calls {look.events[0].op}: squared_norms has given all ranks the same "
            "numbers already,\nand a rank that asks alone would wait for ever."
        )
    if given != [(size * small, size * big) for small, big in pairs]:
        raise Wrong("noise_scale: the caller's history is not what it was before the call.")
    if not math.isclose(found, noise / signal, rel_tol=1e-8):
        hint = (
            "Average the signal and the noise over the steps first, over\nall of them and as they "
            "are; divide last."
        )
        if math.isclose(found, noise / signal, rel_tol=1e-4):
            hint = "In which type is it added up?"
        mine, wanted = assertions.told_apart(found, noise / signal)
        raise Wrong(
            f"noise_scale of {steps} noisy steps, {rows[0]} and {rows[1]} rows, with the mean "
            f"|G|² = {size * signal:.4g},\nis {mine}, not {wanted}. {hint}"
        )
